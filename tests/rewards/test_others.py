"""Reward functions of other programs, unmodified: they score as at home.

TRL's come from the installed package, the others from checkouts in the folder `ENVGYM_REWARDS`: `verl`, `ms-swift`,
`RL` (NeMo-RL), `EasyR1`, and `unsloth/rewards.py` with the functions of Unsloth's GRPO notebook.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

import envgym
from envgym import registry
from tests.page_files import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming_from.md"


@pytest.fixture
def home(monkeypatch):
    """`home("verl/…")`: a path in a checkout."""

    def path_of(name):
        folder = Path(os.environ.get("ENVGYM_REWARDS") or "")
        if "ENVGYM_REWARDS" not in os.environ or not (folder / name).exists():
            pytest.skip(f"ENVGYM_REWARDS names no folder with {name}")
        return folder / name

    return path_of


@pytest.fixture
def load(monkeypatch):
    """`load(path)`: the module of a file, with empty modules in place of those of its program."""

    def load_file(path, **stand_ins):
        for name, content in stand_ins.items():
            module = types.ModuleType(name.replace("__", "."))
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        spec = importlib.util.spec_from_file_location(f"of_others_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_file


def rewards(groups):
    return [episode.reward for group in groups for episode in group.episodes]


def messages(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


# -- math-verify on a thread ---------------------------------------------------------------------------------


def test_math_verify_works_where_exceptions_are_swallowed(play):
    """Its time limits need signals, which Python allows to the main thread alone: every answer was wrong."""
    math_verify = pytest.importorskip("math_verify")

    def right(completion, answer):
        try:
            return float(math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(completion)))
        except Exception:
            return 0.0

    def batch(completions, answer):
        return [right(text, truth) for text, truth in zip(completions, answer, strict=True)]

    texts = (r"\boxed{\frac{1}{2}}", r"\boxed{0.50}", r"\boxed{2}")
    for function in (right, batch, [right]):
        spec = envgym.reward(function, tasks=[{"prompt": "p", "answer": "0.5"}] * 2).__environment__("mine")
        assert rewards(play(spec, None, texts)) == [1.0, 1.0, 0.0]


def test_math_verify_is_interrupted_on_a_thread(play):
    """Past its own time limit, and not only past the call's, which leaves the thread running."""
    utils = pytest.importorskip("math_verify.utils")
    errors = importlib.import_module("math_verify.errors")

    def endless(completion):
        @utils.timeout(1)
        def forever():
            while True:
                pass

        try:
            forever()
        except errors.TimeoutException as error:
            return {"reward": 0.25, "metrics": {"told": "timed out" in str(error)}}

    [group] = play(envgym.reward(endless, tasks=[{"prompt": "p"}] * 2).__environment__("mine"), None, ("2",))
    assert [(episode.reward, episode.metrics) for episode in group.episodes] == [(0.25, {"told": 1.0})]


# -- TRL -----------------------------------------------------------------------------------------------------

SOLUTION = r"$\frac{1}{3}$"
TEXTS = (
    r"<think>one of three</think> It is \boxed{\frac{1}{3}}", r"<think>half</think> It is \boxed{\frac{1}{2}}",
    "one one one one one one", "",
)  # fmt: skip
OF_TRL = {
    "accuracy_reward": None,
    "reasoning_accuracy_reward": None,
    "think_format_reward": None,
    "get_cosine_scaled_reward": (100,),
    "get_repetition_penalty_reward": (1,),
    "get_soft_overlong_punishment": (30, 25),
}
CHAT = {"prompt": [{"role": "user", "content": "What is a third of 1?"}], "solution": SOLUTION}


def test_no_reward_of_trls_is_left_out():
    names = {name for name in dir(pytest.importorskip("trl.rewards")) if name.endswith(("_reward", "_punishment"))}
    assert names == set(OF_TRL)


@pytest.mark.parametrize("name", OF_TRL)
def test_the_whole_of_trls_rewards_scores_as_at_home(play, write, tmp_path, name):
    """By its import path or a name in a file, decorated, and in a list."""
    function = getattr(pytest.importorskip("trl.rewards"), name)
    target = f"trl.rewards:{name}"
    if OF_TRL[name] is not None:
        file = write(f"from trl.rewards import {name}\nmade = {name}(*{OF_TRL[name]})\n", "made.py")
        function, target = function(*OF_TRL[name]), f"{file}:made"
    rows = write("".join(json.dumps(CHAT) + "\n" for _ in range(2)), "rows.jsonl")
    data = {"path": str(rows), "test_fraction": 0.0}
    groups = [
        play(registry.spec(target, data=data), None, TEXTS),
        play(envgym.reward(function).__environment__("mine", data=data), None, TEXTS),
        play(envgym.reward([function]).__environment__("mine", data=data), None, TEXTS),
    ]
    ids = [list(episode.rows[0].segments[-1].token_ids) for episode in groups[0][0].episodes]
    columns = {"completions": messages(*TEXTS), "completion_ids": ids, "solution": [SOLUTION] * len(TEXTS)}
    expected = function(**columns)
    assert len(set(expected)) > 1
    assert list(map(rewards, groups)) == [expected] * 3


# -- verl ----------------------------------------------------------------------------------------------------

OF_VERL = [
    ("openai/gsm8k", "4", ("so #### 4", "so #### 5", "4"), [1.0, 0.0, 0.0], {}),
    ("lighteval/MATH", r"\frac{1}{2}", (r"\boxed{\frac12}", r"\boxed{2}", "no"), [1.0, 0.0, 0.0], {}),
    ("math_dapo", "4", ("Answer: 4", "Answer: 5", ""), [1.0, -1.0, -1.0], {"acc": [1.0, 0.0, 0.0]}),
    ("aime2024", "4", ("Answer: 4", "Answer: 5", ""), [1.0, -1.0, -1.0], {"acc": [1.0, 0.0, 0.0]}),
    ("searchR1_nq", {"target": ["Paris"]}, ("<answer>the Paris</answer>", "Paris", ""), [1.0, 0.0, 0.0], {}),
]


@pytest.fixture
def verl(home, monkeypatch):
    """verl's `reward_score` without the rest of verl, which needs its own packages."""
    for name in ("verl", "verl.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(home(f"verl/{name.replace('.', '/')}"))]
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("verl.utils.reward_score")
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)


def glue(compute_score):
    """The environment of the page's glue around a function of verl's."""
    [block] = [block for block in blocks_of(PAGE.read_text(), "python") if block.startswith("# from_verl.py\n")]
    variables = {"__name__": "from_verl"}
    exec(block, variables)
    variables["compute_score"] = compute_score
    return variables["verl_reward"].__environment__("mine", data={"path": "rows.jsonl", "test_fraction": 0.0})


@pytest.mark.parametrize(("source", "truth", "texts", "expected", "metrics"), OF_VERL)
def test_functions_of_verl_score_as_at_home_in_the_pages_glue(
    play, verl, tmp_path, monkeypatch, source, truth, texts, expected, metrics
):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "data_source": source, "ability": "math",
           "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": 0}}  # fmt: skip
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    [group] = play(glue(verl.default_compute_score), None, texts)
    at_home = [verl.default_compute_score(source, text, truth, {}) for text in texts]
    assert [item["score"] if isinstance(item, dict) else item for item in at_home] == expected
    assert rewards([group]) == expected
    assert {name: [episode.metrics[name] for episode in group.episodes] for name in metrics} == metrics
    assert all(set(episode.metrics) == set(metrics) for episode in group.episodes)


def test_verls_math_verify_scores_on_a_thread(play, verl, tmp_path, monkeypatch):
    """It takes every exception for a wrong answer."""
    monkeypatch.chdir(tmp_path)
    compute_score = importlib.import_module("verl.utils.reward_score.math_verify").compute_score
    row = {"prompt": "a half?", "data_source": "", "reward_model": {"ground_truth": r"\frac{1}{2}"}}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    texts = (r"\boxed{0.5}", r"\boxed{2}")
    groups = play(glue(lambda source, text, truth, extra: compute_score(text, truth)), None, texts)
    assert rewards(groups) == [compute_score(text, r"\frac{1}{2}") for text in texts] == [1.0, 0.0]


# -- ms-swift ------------------------------------------------------------------------------------------------

ARGUMENTS = types.SimpleNamespace(
    cosine_min_len_value_wrong=-0.5, cosine_max_len_value_wrong=0.0, cosine_min_len_value_correct=1.0,
    cosine_max_len_value_correct=0.5, cosine_max_len=100, repetition_n_grams=1, repetition_max_penalty=-1.0,
    soft_max_length=30, soft_cache_length=25,
)  # fmt: skip
SWIFT_TEXTS = (
    "<think>a third</think> <answer>$\\frac{1}{3}$</answer>", "<think>half</think><answer>$\\frac{1}{2}$</answer>",
    "<think>x</think> Action: add Action Input: {}", "one one one one one one one one one one one one one one one", "",
)  # fmt: skip


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("name", ["toolbench", "accuracy", "format", "react_format", "cosine", "repetition",
                                  "soft_overlong"])  # fmt: skip
def test_ms_swifts_reward_classes_score_as_at_home(play, home, load, name, form):
    """As its trainer calls them: with texts, also where the rows hold messages."""
    stand_ins = {"swift": {"__path__": []}, "swift__infer_engine": {"InferRequest": object}}
    module = load(home("ms-swift/swift/rewards/orm.py"), **stand_ins)
    scorer = module.orms[name](ARGUMENTS)
    solution = "<think>x</think> Action: add Action Input: {}" if name == "toolbench" else SOLUTION
    row = {"prompt": CHAT["prompt"] if form == "messages" else "What is a third of 1?", "solution": solution}
    function = envgym.reward(scorer, tasks=[row] * 2)
    [group] = play(function.__environment__("mine"), None, SWIFT_TEXTS)
    ids = [list(episode.rows[0].segments[-1].token_ids) for episode in group.episodes]
    expected = scorer(list(SWIFT_TEXTS), solution=[solution] * len(SWIFT_TEXTS), response_token_ids=ids)
    assert len(set(expected)) > 1
    assert rewards([group]) == expected


def test_an_asynchronous_reward_class_of_ms_swifts_form(play):
    class AsyncORM:
        pass

    class Longer(AsyncORM):
        async def __call__(self, completions, **kwargs):
            await asyncio.sleep(0)
            assert all(isinstance(text, str) for text in completions)
            return [float(len(text)) for text in completions]

    class Shorter(AsyncORM):
        async def __call__(self, completions):
            return [-float(len(text)) for text in completions]

    spec = envgym.reward([Longer(), Shorter()], weights=[2, 1], tasks=[CHAT] * 2).__environment__("mine")
    assert rewards(play(spec, None, ("a", "bcd"))) == [1.0, 3.0]


# -- Unsloth, NeMo-RL, EasyR1 --------------------------------------------------------------------------------

XML = (
    "<reasoning>\n1 + 1\n</reasoning>\n<answer>\n2\n</answer>\n", "<reasoning>1</reasoning> <answer>2</answer>",
    "<answer>three</answer>", "2",
)  # fmt: skip


@pytest.mark.parametrize("name", ["correctness", "int", "strict_format", "soft_format", "xmlcount"])
def test_unsloths_functions_score_as_at_home(play, home, load, name):
    path = home("unsloth/rewards.py")
    function = getattr(load(path), f"{name}_reward_func")
    row = CHAT | {"answer": "2"}
    expected = function(prompts=[row["prompt"]] * 4, completions=messages(*XML), answer=["2"] * 4)
    assert len(set(expected)) > 1
    assert rewards(play(envgym.reward(function, tasks=[row] * 2).__environment__("mine"), None, XML)) == expected


@pytest.mark.parametrize("name", ["math_expression", "format", "exact_answer_alphanumeric", "bbox_giou", "geo3k"])
def test_nemo_rls_functions_score_as_at_home(play, home, load, name):
    function = getattr(load(home("RL/nemo_rl/environments/rewards.py")), f"{name}_reward")
    truth = "[0, 0, 1, 1]" if name == "bbox_giou" else r"\frac{1}{2}"
    texts = (f"<think>x</think><answer>{truth}</answer> \\boxed{{0.5}}", "<answer>7</answer>", "")

    @envgym.reward(tasks=[{"prompt": "p", "answer": truth}] * 2)
    def nemo_reward(completion, answer):
        return function(answer, completion)

    [group] = play(nemo_reward.__environment__("mine"), None, texts)
    at_home = [function(truth, text) for text in texts]
    assert rewards([group]) == [reward for reward, _ in at_home]
    assert at_home[0][0] > at_home[2][0]
    correct = [{} if is_correct is None else {"correct": float(is_correct)} for _, is_correct in at_home]
    assert [episode.metrics for episode in group.episodes] == correct


def test_easyr1s_functions_score_as_at_home(play, home, load):
    function = load(home("EasyR1/examples/reward_function/dapo.py")).compute_score

    @envgym.reward(batch=True, tasks=[{"prompt": "p", "answer": "4"}] * 2)
    def easy_reward(completion, answer, action):
        rows = zip(completion, answer, action, strict=True)
        return function(
            [{"response": r, "response_length": len(a.token_ids), "ground_truth": t} for r, t, a in rows], 30, 25, 1.0
        )

    [group] = play(easy_reward.__environment__("mine"), None, ("Answer: 4", "Answer: 5", ""))
    assert [episode.metrics["accuracy"] for episode in group.episodes] == [1.0, -1.0, -1.0]
    assert [episode.metrics["accuracy_normalized"] for episode in group.episodes] == [1.0, 0.0, 0.0]
    assert rewards([group]) == [e.metrics["accuracy"] + e.metrics["overlong"] for e in group.episodes]
