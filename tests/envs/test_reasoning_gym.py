"""Puzzles of the real reasoning-gym, made and scored in processes of their own."""

import asyncio
import json
import random
import re
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym import errors, registry
from envgym.envs.reasoning_gym import ReasoningGymConfig, extract_answer, tagged_answer, without_length_ratio
from envgym.envs.reasoning_gym.datasets import TEST_START, Datasets, UnsafeExpression, restricted_eval
from envgym.types import Action, Task

TARGET = "envgym.envs.reasoning_gym:ReasoningGym"
WITHOUT_ANSWERS = {"boxnet", "rush_hour"}
"""Datasets that give no right answer, neither as the item's nor beside it."""


def make(*, processes=1, **settings):
    return registry.spec(TARGET, processes=processes, **settings)


async def earned(spec, task, text):
    """What an answer to a task is paid: (reward, metrics)."""
    env = spec.make()
    try:
        await env.reset(seed=0, options={"task": task})
        _, reward, terminated, truncated, info = await env.step(Action(text))
        assert (terminated, truncated, info["score"]) == (True, False, reward)
        return reward, info["metrics"]
    finally:
        await env.close()


async def tasks_of(spec, split, count):
    return [await spec.tasks(split).get(index) for index in range(count)]


MIXED = ["leg_counting", "isomorphic_strings", "ransom_note", "word_ladder", "pool_matrix", "graph_color", "sudoku"]
"""One for each of a few kinds: the second to fourth write sets of strings, the fifth uses NumPy's global generator."""


@pytest.fixture(scope="module")
def mixed():
    """An environment of several datasets in two processes, and what runs its coroutines: starting takes seconds."""
    with asyncio.Runner() as runner:
        spec = make(dataset=MIXED, processes=2)
        runner.run(spec.ensure_setup())
        yield spec, runner.run
        runner.run(spec.close())


def make_datasets(weights, params, levels, attributes, seed):
    return Datasets(ReasoningGymConfig(dataset=weights, params=params, level=levels, attributes=attributes, seed=seed))


def item(name, number=0, seed=0, **params):
    """An item made here, without a process, and what scores it."""
    datasets = make_datasets({name: 1.0}, {name: params}, [], {}, seed)
    return datasets.item(number), lambda answer: datasets.score(number, answer)


@pytest.fixture(autouse=True)
def no_memory_limit(monkeypatch):
    """`Datasets` limits the process it is made in, which here is that of the tests."""
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)


# -- answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>12</answer>", "12"),
        ("<think><answer>1</answer></think>\n<answer>\n1 2\n3 4\n</answer> I hope.", "1 2\n3 4"),
        ("Let me see.\nThe first is 3.\n\n  42 \n", "42"),
        ("<answer>12", "<answer>12"),
        ("<ANSWER>a</ANSWER>", "a"),
        ("", ""),
    ],
)
def test_the_answer_is_taken_out_of_the_words_around_it(text, answer):
    assert extract_answer(text) == answer


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<ANSWER>", "</Answer>", "<answer", "1", " ", "\n"])))
def test_of_all_answers_the_last_is_taken_as_one_pattern_finds_it(pieces):
    text = "".join(pieces)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    assert tagged_answer(text) == (answers[-1].strip() if answers else None)


def test_a_tag_repeated_without_an_end_takes_no_square_of_its_number():
    """By one pattern a million of them take hours."""
    assert tagged_answer("<answer>" * 1_000_000) is None
    assert tagged_answer("<answer>1</answer>" + "<answer>" * 1_000_000) == "1"


def test_only_closed_tags_count_as_answered():
    assert tagged_answer("<answer>12") is None
    assert tagged_answer("<answer></answer>") == ""


def test_what_the_library_pays_for_a_share_of_the_characters_is_not_paid():
    _, score = item("chain_sum")
    right = item("chain_sum")[0].answer
    chatty = f"the answer is {right}"
    assert score(right) == 1
    assert 0 < score(chatty) < 1
    assert without_length_ratio(score(chatty), chatty, right) == 0
    assert without_length_ratio(0.5, "anything", "3") == 0.5  # credit of a dataset's own stays


# -- scorers that pay wrong answers in full ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("game_of_life_halting", ["I do not know.", "0", "maybe"]),
        ("complex_arithmetic", ["nan", "nan + nani"]),
        ("number_sorting", ["[" + ", ".join(["NaN"] * count) + "]" for count in range(3, 11)]),
        ("puzzle24", ["6*4*1*1", "24", "4*6 + 1 - 1"]),
        ("intermediate_integration", ["Integral(f(x), x)", "integrate(x)"]),
    ],
)
def test_no_answer_is_right_whatever_was_asked(name, wrong):
    datasets = make_datasets({name: 1.0}, {}, [], {}, 0)
    for number in range(8):
        right = datasets.item(number).answer
        assert datasets.score(number, right) == 1
        assert all(datasets.score(number, answer) < 0.1 for answer in wrong if answer != right)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("rearc", "1 2\n3 4"),
        ("power_function", "17.5"),
        ("rubiks_cube", "R U"),
        ("countdown", "1 + 2"),
        ("palindrome_generation", "abba"),
        ("advanced_geometry", "1"),
        ("group_anagrams", "[]"),
        ("calendar_arithmetic", "Monday"),
        ("propositional_logic", "(P ∨ ¬P)"),
    ],
)
def test_any_answer_of_the_right_form_earns_nothing(name, form):
    datasets = make_datasets({name: 1.0}, {}, [], {}, 0)
    for number in range(6):
        right = datasets.item(number).answer
        assert datasets.score(number, right) == 1
        for answer in (form, "", "I do not know.", "x"):
            assert answer == right or datasets.score(number, answer) == 0


def test_a_copy_of_the_question_is_no_part_of_the_answer():
    posed, score = item("prime_factorization")
    [number] = re.findall(r"factorization of (\d+)", posed.question)
    assert score(number) == score(f"1 × {number}") == 0
    posed, score = item("fraction_simplification")
    over, under = re.findall(r"\d+", posed.question)[:2]
    assert score(f"{over}/{under}") == 0
    assert score(posed.answer) == 1


def test_parts_of_the_answer_earn_their_share():
    posed, score = item("sudoku")
    cells = posed.answer.split()
    cells[0] = str(int(cells[0]) % 9 + 1)
    rows = "\n".join(" ".join(cells[start : start + 9]) for start in range(0, 81, 9))
    assert 0 < score(rows) < 1


def test_a_probability_is_compared_as_a_number():
    datasets = make_datasets({"coin_flip": 1.0}, {}, [], {}, 0)
    for number in range(8):
        right = float(datasets.item(number).answer)
        assert datasets.score(number, str(right)) == 1
        assert datasets.score(number, "0") == float(right == 0)
        assert datasets.score(number, "1e999999999/1") == 0
    assert datasets.score(0, "half") == 0


def test_a_puzzle_of_24_needs_the_numbers_it_gives():
    posed, score = item("puzzle24", 3)
    assert score(posed.answer) == score(f"({posed.answer})") == 1
    assert score(f"{posed.answer} + 0") == 0


# -- answers are data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "__import__('os').system('id')",
        "open('/etc/passwd').read()",
        "(1).__class__.__bases__",
        "[x for x in (1, 2)]",
        "eval('1')",
        "lambda: 1",
        "9**9**9",
        "2**99999",
        "exit()",
    ],
)
def test_an_answer_is_not_run(program):
    import sympy

    with restricted_eval():
        with pytest.raises(UnsafeExpression):
            eval(program)
        with pytest.raises((UnsafeExpression, ValueError, SyntaxError)):
            sympy.parse_expr(program)
    assert eval("len('abc')") == 3  # outside all is as it was


def test_data_is_read():
    import sympy

    x = sympy.Symbol("x")
    with restricted_eval():
        assert eval("[[1, 2], ['a', -0x3]]") == [[1, 2], ["a", -3]]
        assert sympy.parse_expr("x**2*sin(x) + sqrt(2)*pi/2 + C", local_dict={"x": x}).has(x)


@pytest.mark.parametrize("name", ["spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "countdown"])
def test_a_program_as_an_answer_does_nothing(name, tmp_path):
    _, score = item(name)
    trace = tmp_path / "trace"
    assert score(f"__import__('pathlib').Path({str(trace)!r}).touch()") <= 0.05
    assert not trace.exists()


# -- the environment --------------------------------------------------------------------------------------


def test_an_episode(mixed):
    spec, run = mixed

    async def play():
        task = next(task for task in await tasks_of(spec, "train", 50) if task.fields["dataset"] == "leg_counting")
        env = spec.make()
        observation, _ = await env.reset(seed=0, options={"task": task})
        await env.close()
        assert observation.messages[0].text == f"{task.prompt}\n\n{spec.config.instruction}"
        [shown] = spec.demonstrations(task, 0)
        reward, metrics = await earned(spec, task, f"Hm.\n{shown}")
        assert reward == 1
        assert metrics == {"answered": 1, "scorer_timeout": 0, "scorer_crash": 0, "score_leg_counting": 1}
        reward, metrics = await earned(spec, task, task.answer)
        assert (reward, metrics["answered"]) == (1, 0)
        wrong = int(task.answer) + 1
        for text in (f"<answer>{wrong}</answer>", f"It is {task.answer}, I think.", "", "\n"):
            assert (await earned(spec, task, text))[0] == 0

    run(play())


def test_levels_of_the_curriculum():
    datasets = make_datasets({"chain_sum": 1.0}, {}, [0, 3], {"num_digits": 0}, 0)
    items = [datasets.item(number) for number in range(40)]
    assert {item.level for item in items} == {0, 3}

    def terms(level):
        return max(item.question.count("+") + item.question.count(" - ") for item in items if item.level == level)

    assert terms(3) > terms(0)
    assert all(len(word) == 1 for item in items for word in item.question.split() if word.isdigit())
    fixed = make_datasets({"chain_sum": 1.0}, {"chain_sum": {"min_terms": 9, "max_terms": 9}}, [2], {}, 0).item(0)
    assert fixed.question.count("+") + fixed.question.count("-") >= 8


def test_several_datasets_with_weights():
    datasets = make_datasets({"gcd": 3.0, "lcm": 1.0}, {"gcd": {"min_numbers": 4, "max_numbers": 4}}, [], {}, 0)
    items = [datasets.item(number) for number in range(200)]
    assert 110 < Counter(item.dataset for item in items)["gcd"] < 190
    assert all(item.question.count(",") == 3 for item in items if item.dataset == "gcd")
    assert make(dataset=["gcd", "lcm"]).config.weights == {"gcd": 1.0, "lcm": 1.0}


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"dataset": "chain_sums"}, errors.NameNotFound, "Did you mean 'chain_sum'"),
        ({"dataset": "composite"}, errors.NameNotFound, "composite"),
        ({"params": {"terms": 3}}, errors.ConfigError, "argument 'terms'. Its parameters are .*min_terms"),
        ({"params": {"min_terms": -1}}, errors.ConfigError, "dataset chain_sum: .*min_terms"),
        ({"level": 99}, errors.ConfigError, "levels 0 to"),
        ({"level": 0, "attributes": {"digits": 1}}, errors.ConfigError, "Did you mean 'num_digits'"),
        ({"dataset": "acre", "level": 1}, errors.ConfigError, "no curriculum"),
    ],
)
def test_what_does_not_exist_is_one_clear_line(settings, error, says):
    config = make(**settings).config
    with pytest.raises(error, match=says) as caught:
        Datasets(config)
    assert "\n" not in str(caught.value)


def test_what_does_not_exist_is_known_before_the_first_episode():
    with pytest.raises(errors.NameNotFound, match="Did you mean 'chain_sum'"):
        asyncio.run(make(dataset="chain_sums").ensure_setup())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"params": {"seed": 1}}, "seed is a setting of its own"),
        ({"dataset": ["gcd", "lcm"], "params": {"min_numbers": 2}}, "'min_numbers' is none of them"),
        ({"dataset": {"gcd": 0.0}}, "weights"),
        ({"dataset": []}, "names no dataset"),
        ({"level": -1}, "level"),
    ],
)
def test_settings_that_contradict_each_other(settings, says):
    with pytest.raises(errors.ConfigError, match=says):
        make(**settings)


def test_without_the_library_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(errors.MissingDependency, match=r"-m pip install 'reasoning-gym>=[\d.]+'$"):
        make_datasets({"chain_sum": 1.0}, {}, [], {}, 0)


def test_an_item_is_the_same_in_every_process_and_touches_no_generator_here(mixed):
    spec, run = mixed

    async def made_elsewhere():
        async with make(dataset=MIXED) as other:
            return await tasks_of(other, "train", 30)

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    tasks = run(tasks_of(spec, "train", 30))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert asyncio.run(made_elsewhere()) == tasks
    assert len({task.prompt for task in tasks}) == 30
    assert len({task.id for task in tasks}) == 30


def test_an_item_that_draws_from_the_global_generators_is_the_same_again():
    for name in ("list_functions", "pool_matrix"):
        once = [item(name, number)[0] for number in range(40)]
        random.seed()
        np.random.seed()
        assert [item(name, number)[0] for number in range(40)] == once


def test_train_and_test_share_no_question(mixed):
    spec, run = mixed
    train, test = run(tasks_of(spec, "train", 40)), run(tasks_of(spec, "test", 40))
    assert not {task.id for task in train} & {task.id for task in test}
    few = make_datasets({"coin_flip": 1.0}, {}, [], {}, 0)  # some hundred questions there are
    posed = [{few.item(start + number).question for number in range(300)} for start in (0, TEST_START)]
    assert not posed[0] & posed[1]
    assert len(posed[0]) > len(posed[1]) > 5


def test_a_dataset_of_one_question_cannot_hold_any_out():
    single = make_datasets({"count_primes": 1.0}, {"count_primes": {"min_n": 7, "max_n": 7}}, [], {}, 0)
    with pytest.raises(RuntimeError, match="count_primes makes no puzzle with these parameters: there are too few"):
        [single.item(start) for start in (0, TEST_START)]


def test_train_tasks_may_have_an_end():
    spec = make(size=200)
    assert (spec.tasks("train").size, spec.tasks("test").size) == (200, None)
    with pytest.raises(IndexError):
        asyncio.run(spec.tasks("train").get(200))


def test_datasets_that_prepare_their_items_have_no_end():
    for name in ("acre", "gsm_symbolic", "list_functions"):
        far, score = item(name, 2**31 + 12345)
        assert score(far.answer) == 1


def test_concurrent_episodes_are_scored_each_for_itself(mixed):
    spec, run = mixed

    async def play():
        tasks = await tasks_of(spec, "train", 40)
        right = [f"<answer>{task.answer}</answer>" for task in tasks]
        paid = await asyncio.gather(*(earned(spec, *pair) for pair in zip(tasks, right, strict=True)))
        assert all(reward == 1 for reward, _ in paid)
        others = right[1:] + right[:1]
        paid = await asyncio.gather(*(earned(spec, *pair) for pair in zip(tasks, others, strict=True)))
        assert sum(reward for reward, _ in paid) < 5

    run(play())


def test_an_answer_that_hangs_its_scorer_is_wrong_and_holds_nobody_up():
    hanging = "<answer>C + factorial(99999999)</answer>"

    async def play():
        names = ["simple_integration", "word_sorting"]
        async with make(dataset=names, processes=2, score_timeout=4.0, exact=True) as spec:
            tasks = {task.fields["dataset"]: task for task in await tasks_of(spec, "train", 10)}
            task = tasks["simple_integration"]
            stuck = asyncio.create_task(earned(spec, task, hanging))
            await asyncio.sleep(0)
            assert (await earned(spec, task, f"<answer>{task.answer}</answer>"))[0] == 1
            assert not stuck.done()
            reward, metrics = await stuck
            assert (reward, metrics["scorer_timeout"]) == (0, 1)
            # The process is replaced. `exact`: what would earn credit in part earns none.
            task = tasks["word_sorting"]
            words = [word.strip() for word in task.answer.split(",")]
            swapped = ", ".join([words[1], words[0], *words[2:]])
            paid = [await earned(spec, task, f"<answer>{answer}</answer>") for answer in (task.answer, swapped) * 2]
            assert [reward for reward, _ in paid] == [1, 0, 1, 0]

    asyncio.run(play())


def test_demonstrations():
    for name in ("graph_color", "propositional_logic", "rubiks_cube"):  # many answers are right; one is given beside
        posed, score = item(name)
        assert score(posed.answer) == 1
    posed, _ = item("rush_hour")
    task = Task("rush_hour-0", posed.question, posed.answer, {"dataset": "rush_hour", "number": 0})
    with pytest.raises(errors.ConfigError, match="rush_hour has no answers"):
        make(dataset="rush_hour").demonstrations(task, 0)


def test_it_is_its_description():
    spec = make(dataset={"gcd": 2.0}, level=1, exact=True)
    assert registry.spec_from_json(spec.to_json()) == spec
    assert json.loads(spec.to_json())["kwargs"]["level"] == [1]


NONSENSE = [
    "", "None", "I do not know.", "0", "1", "-1", "x", "A", "[]", "{}", "[[0]]", "a b c", "True", "0.5", "zzzz",
    "lorem ipsum dolor sit amet", "1 2 3 4", "1 2\n3 4", "((", "?", "999999999", "1/2", '""', "null",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_dataset_rewards_nonsense_whatever_it_asks():
    """What earns something on one item in eight may be a part of its answer; what earns it on each is a consolation."""
    from reasoning_gym.factory import DATASETS

    rewarded = []
    for name in sorted(set(DATASETS) - {"composite"}):
        datasets = make_datasets({name: 1.0}, {}, [], {}, 0)
        items = [datasets.item(number) for number in range(8)]
        for answer in NONSENSE:
            scores = [
                without_length_ratio(datasets.score(number, answer), answer, posed.answer)
                for number, posed in enumerate(items)
            ]
            rewarded += [(name, answer, scores)] if min(scores) > 0 else []
    assert rewarded == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 12345])
def test_every_dataset_is_played_and_its_right_answer_earns_one(seed):
    """All 105 through the environment, 3 items each at least; two give no right answers and are only posed."""
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) == 105

    async def play():
        async with make(dataset=names, seed=seed, processes=2, score_timeout=120) as spec:
            left, number = Counter(dict.fromkeys(names, 3)), 0
            while left.total() and number < 5000:
                name = random.Random(f"{seed} {number}").choices(names, [1.0] * len(names))[0]  # spares making the rest
                if left[name]:
                    left[name] -= 1
                    task = await spec.tasks("train").get(number)
                    assert task.fields["dataset"] == name
                    await check(spec, task)
                number += 1
            assert not left.total()

    async def check(spec, task: Task):
        name = task.fields["dataset"]
        assert task.prompt
        assert (task.answer is None) == (name in WITHOUT_ANSWERS)
        if task.answer is not None:
            reward, metrics = await earned(spec, task, *spec.demonstrations(task, 0))
            assert reward == 1, (name, task.id)
            assert metrics["answered"] == 1
        reward, _ = await earned(spec, task, "I do not know.")
        assert reward < 0.35, (name, task.id)

    asyncio.run(play())
