"""Two evaluations side by side: what is paired, what is only noted, and the gate."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.errors import RunError
from envgym.evaluation.compare import Comparison, EnvComparison, compare
from envgym.evaluation.paired import paired_difference
from envgym.evaluation.statistics import t_quantile
from envgym.evaluation.suite import Suite
from envgym.jobs.evaluation import new_evaluation, run_evaluation
from envgym.jobs.folder import JobFolder
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model
from envgym.types import Episode, Outcome, Task

ENVGYM = Path(sys.executable).with_name("envgym")

SCRIPTED = '''
import json
from pathlib import Path

import envgym


class Scripted(envgym.Env):
    """Pays what scores.json says of the task; None breaks the episode."""

    async def reset(self, *, seed=None, options=None):
        self.number = str(options["task"].seed - 2**31)
        return [{"role": "user", "content": "?"}], {}

    async def step(self, action):
        score = json.loads(Path("scores.json").read_text())[self.number]
        if score is None:
            raise ValueError("broken")
        return [], None, True, False, {"score": score}
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scripted.py").write_text(SCRIPTED)
    return tmp_path


@pytest.fixture
def play(tiny_model, folder):
    def play(name, *scores, weight=1.0, **more):
        Path("scores.json").write_text(json.dumps(dict(enumerate(scores))))
        suite = Suite(
            tasks=len(scores),
            environments={"one": {"env": "scripted.py:Scripted", "weight": weight}, **more.pop("environments", {})},
        )
        settings = {
            "model": str(tiny_model), "engine": {"kind": "transformers"}, "debug": True, "name": name,
            "rollout": {"max_tokens": 2, "refills": 0}, **more,
        }  # fmt: skip
        run_evaluation(new_evaluation(settings, suite=suite), Display(), make_model)
        return JobFolder(Path("evals", name))

    return play


def test_tasks_are_paired_and_what_one_side_lacks_is_counted(play):
    a = play("a", 0.0, 1.0, 1.0, None, 0.0, 0.5)
    b = play("b", 1.0, 1.0, 0.0, 1.0, 1.0, None)
    found = compare(a, b).as_dict()
    # By hand: +1, 0, -1, +1 on the four that both have.
    assert found["difference"] == 0.25
    assert (found["n_tasks"], found["better"], found["worse"], found["equal"]) == (4, 2, 1, 1)
    one = found["envs"]["one"]
    assert (one["only_a"], one["only_b"]) == (1, 1)
    # The mean of the four has variance (sum of squares 3 - 4 * 0.25^2) / 3 / 4.
    assert one["stderr"] == pytest.approx(((3 - 0.25) / 12) ** 0.5)
    # Of the 2^3 ways to sign three ones, all but none are at least 1 away from 0.
    assert one["p_value"] == 1.0
    assert [(flip["task"][-1], flip["a"], flip["b"]) for flip in one["flips"]] == [
        ("8", 0.0, 1.0), ("0", 1.0, 0.0), ("2", 0.0, 1.0),
    ]  # fmt: skip


def test_the_suites_difference_is_weighted(play):
    other = {"environments": {"two": {"env": {"name": "scripted.py:Scripted"}, "weight": 3, "tasks": 2}}}
    a = play("a", 0.0, 0.0, 0.0, 0.0, **other)
    b = play("b", 1.0, 0.0, 1.0, 1.0, **other)
    found = compare(a, b)
    assert found.envs["one"].paired.mean == 0.75
    assert found.envs["two"].paired.mean == 0.5
    assert found.suite["difference"] == pytest.approx((0.75 + 3 * 0.5) / 4)
    low, high = found.suite["ci95"]
    assert low < found.suite["difference"] < high


def test_other_problems_are_not_paired(play):
    a, b = play("a", 1.0, 0.0), play("b", 1.0, 0.0, seed=1)
    with pytest.raises(RunError, match=r"share no task that has a score in both.*another seed"):
        compare(a, b)


def test_what_makes_two_evaluations_less_alike_is_noted(play):
    a = play("a", 1.0, 0.0)
    b = play("b", 1.0, 0.0, rollout={"max_tokens": 3, "refills": 0}, weight=2.0)
    notes = "\n".join(compare(a, b).notes)
    assert "sampled differently" in notes
    assert "weights differ (1 and 2)" in notes
    assert "both evaluate the same model" in notes
    Path("scripted.py").write_text(SCRIPTED + "\n# another version\n")
    c = play("c", 1.0, 0.0, environments={"more": "scripted.py:Scripted"})
    notes = "\n".join(compare(a, c).notes)
    assert "more: not in evals/a" in notes


def test_another_specification_is_told_of_where_the_code_is_the_same(play):
    def more(timeout):
        return {
            "environments": {"more": {"env": {"name": "scripted.py:Scripted", "call_timeout": timeout}, "tasks": 1}}
        }

    a, b, c = (play(name, 1.0, 0.0, **more(timeout)) for name, timeout in (("a", 50), ("b", 60), ("c", 50)))
    assert "more: the environment's settings differ" in compare(a, b).notes
    assert not [note for note in [*compare(a, c).notes, *compare(a, b).notes] if note.startswith("one: the env")]
    assert not [note for note in compare(a, c).notes if "the environment's" in note]


def test_an_environment_that_cannot_be_compared_leaves_no_difference_of_the_whole(play):
    """A policy that breaks one environment altogether must not pass a gate by the others."""
    two = {"environments": {"two": {"env": {"name": "scripted.py:Scripted"}, "tasks": 1}}}
    a, b = play("a", 1.0, 0.5, **two), play("b", None, 0.5, **two)
    found = compare(a, b)
    assert (found.unpaired, found.suite, found.as_dict()["difference"]) == (["two"], None, None)
    assert found.envs["one"].paired.mean == 0.0
    assert any("1 tasks have a score in A alone and 0 in B alone" in note for note in found.notes)
    done = subprocess.run([ENVGYM, "compare", "a", "b", "--fail-below=-1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "none of the whole: two cannot be compared" in done.stdout
    assert "failed: there is no difference" in done.stdout
    c = play("c", 1.0, 0.5)
    assert compare(a, c).unpaired == compare(c, a).unpaired == ["two"]


def test_one_environment_under_two_names_is_one(play, folder, tiny_model):
    import shutil

    a = play("a", 1.0, 0.0)
    b = JobFolder(Path("evals/b"))
    shutil.copytree(a.path, b.path)
    for path in (b.result_file, b.journal.path):
        path.write_text(path.read_text().replace('"one"', '"./one"').replace('"one/', '"./one/'))
    found = compare(a, b)
    assert found.suite["n_tasks"] == 2
    assert "one of A is compared with ./one of B" in found.notes


def test_what_a_suite_could_show_by_hand():
    """Two environments of three tasks each: two degrees of freedom of each, and half of each one's error."""
    a = {str(task): [0.0] for task in range(3)}
    envs = {
        name: EnvComparison(paired_difference(a, {str(n): [value] for n, value in enumerate(values)}), 1.0, clusters)
        for name, values in {"one": (0.0, 0.5, 1.0), "two": (0.25, 0.5, 0.5)}.items()
        for clusters in [{str(task): f"{name}/{task}" for task in range(3)}]
    }
    suite = Comparison("a", "b", envs, [], []).suite
    error = math.hypot(*(env.paired.stderr / 2 for env in envs.values()))
    assert suite["stderr"] == pytest.approx(error)
    assert suite["detectable"] == pytest.approx((t_quantile(0.975, 4) + t_quantile(0.8, 4)) * error)
    assert (suite["n_tasks"], suite["n_clusters"]) == (6, 6)


def test_what_a_sample_could_show_is_not_told_where_it_is_not_known(play):
    other = {"environments": {"two": {"env": {"name": "scripted.py:Scripted"}, "tasks": 2}}}
    a, b = play("a", 0.0, 0.0, 0.0, **other), play("b", 0.0, 0.0, 1.0, **other)
    found = compare(a, b)
    assert found.envs["two"].paired.as_dict()["detectable"] is None  # its tasks all differ alike
    assert found.suite["detectable"] is None


def test_the_gate_is_the_exit_status(play, folder):
    play("a", 1.0, 1.0, 1.0, 0.0)
    play("b", 1.0, 0.0, 1.0, 0.0)

    def run(*words):
        return subprocess.run([ENVGYM, "compare", *words], capture_output=True, text=True, timeout=60)

    assert run("a", "b").returncode == 0
    passed, failed = run("a", "b", "--fail-below", "-0.25"), run("a", "b", "--fail-below", "-0.2")
    assert (passed.returncode, failed.returncode) == (0, 1)
    assert "-0.250 [" in passed.stdout
    assert "passed: not below -0.25" in passed.stdout
    assert "failed: below -0.2" in failed.stdout
    assert "1 no longer done: seed-2147483649" in passed.stdout
    told = run("evals/a", "evals/b", "--json", "--fail-below=-0.2")
    assert (json.loads(told.stdout)["difference"], told.returncode) == (-0.25, 1)


def test_mistakes_are_a_line(play, folder):
    play("a", 1.0)
    result = Path("evals/a/result.json")
    result.write_text(json.dumps({**json.loads(result.read_text()), "status": "running"}))
    for words, said in {
        ("a", "nothing"): "no evaluation 'nothing' in evals/",
        ("a", "a"): "is not finished: resume with: envgym eval --resume evals/a",
        ("a",): "the following arguments are required: B",
        ("a", "a", "--fail-below", "x"): "--fail-below: invalid float value",
    }.items():
        done = subprocess.run([ENVGYM, "compare", *words], capture_output=True, text=True, timeout=60)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert said in line


def test_rewards_that_are_no_scores_are_told_as_the_reason(tmp_path):
    def evaluated(name, *episodes):
        folder = JobFolder(tmp_path / name)
        folder.path.mkdir()
        part = {
            "weight": 1.0, "cluster": None, "success": {"threshold": 1.0}, "fingerprints": {"code": "c", "spec": "s"},
            "sampling": {}, "agent": {}, "split": "test",
        }  # fmt: skip
        result = {"status": "completed", "began": "", "seconds": 1.0, "fingerprints": {"model": name}}
        folder.write_result({**result, "envs": {"game": part}})
        for number, (reward, score) in enumerate(episodes):
            task = Task(f"t{number}")
            folder.journal.write(
                Episode("e", task, Outcome.finish(), reward=reward, score=score, group_id=f"game/{number:05d}")
            )
        return folder

    won, lost = evaluated("won", (1.0, 1.0), (1.0, 1.0)), evaluated("lost", (1.0, None), (-1.0, None))
    with pytest.raises(RunError, match=r"game: no task has a score in both \(in B rewards are not all in \[0, 1\]"):
        compare(won, lost)
