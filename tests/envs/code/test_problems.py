"""The problems that are made up: the same everywhere, disjoint, and with tests that tell right from wrong."""

import hashlib
import json
from collections import Counter

from envgym.envs.code.cases import read_cases
from envgym.envs.code.problems import families, held_out_tasks, train_task


def train(index):
    return train_task(index, 10)


def question(task):
    return task.prompt.partition("\n")[0]


def test_train_and_test_share_no_problem():
    trained = {question(train(index)) for index in range(1500)}
    tested = [question(task) for task in held_out_tasks(10)]
    assert len(trained) > 800
    assert len(set(tested)) == len(tested) == 256
    assert not trained & set(tested)


def test_every_family_is_in_both():
    names = {family.name for family in families()}
    assert len(names) == len(families()) >= 36
    assert {task.fields["family"] for task in held_out_tasks(10)} == names
    assert {train(index).fields["family"] for index in range(1000)} == names


def test_a_task_is_a_function_of_its_index():
    assert train(77) == train_task(77, 10)
    assert held_out_tasks(10) == held_out_tasks(10)


def test_the_tasks_are_the_same_everywhere():
    """Drawn without anything that changes between processes; this pins them."""
    assert [train(index).fields["family"] for index in range(4)] == [
        "common", "recurrence", "steps_to_one", "running_sums",
    ]  # fmt: skip
    assert question(held_out_tasks(10)[0]).endswith(" decimal digits of n, each raised to the power 2, modulo 13.")
    posed = "".join(repr(train(index).fields["tests"]) for index in range(100))
    assert hashlib.sha256(posed.encode()).hexdigest()[:12] == "9781e3761461"


def test_no_constant_passes_most_tests():
    for task in [*(train(index) for index in range(300)), *held_out_tasks(10)]:
        [(_, alike)] = Counter(repr(case.expected) for case in read_cases(task.fields["tests"])).most_common(1)
        assert alike <= 6, task.prompt


def test_tests_are_data_and_two_of_them_are_shown():
    for task in held_out_tasks(6):
        assert json.loads(json.dumps(task.fields["tests"])) == task.fields["tests"]
        cases = read_cases(task.fields["tests"])
        assert len(cases) == 6
        assert all(f"{case.text} == {case.result}" in task.prompt for case in cases[-2:])
        assert task.answer not in task.prompt
