"""Reward functions in the form of TRL's documentation, unchanged, and weighted sums of several functions."""

import asyncio
import json
import random

import pytest

import envgym
from envgym import registry
from envgym.errors import ConfigError, NameNotFound

EXAMPLES = r'''
import asyncio
import re


def by_tokens(completion_ids, **kwargs):
    """Longer is better, in tokens."""
    return [float(len(ids)) for ids in completion_ids]


def reward_func(completions, **kwargs) -> list[float]:
    """Longer is better, in characters."""
    return [float(len(completion)) for completion in completions]


def format_reward(completions, **kwargs):
    """For conversations: completions are lists of messages."""
    texts = [completion[0]["content"] for completion in completions]
    assert all(set(completion[0]) == {"role", "content"} for completion in completions)
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]


def accuracy(completions, ground_truth, **kwargs):
    """By a column of the data."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if match and match[1] == truth else 0.0 for match, truth in zip(found, ground_truth, strict=True)]


def by_keyword(prompts, completions, **kwargs):
    """The same columns in `kwargs`, and none of the trainer's own."""
    assert not {"trainer_state", "log_extra", "log_metric", "environments", "completion", "prompt"} & set(kwargs)
    return [
        float((prompt, truth, level) == ("What is 1 + 1?", "2", 3))
        for prompt, truth, level in zip(prompts, kwargs["ground_truth"], kwargs["level"], strict=True)
    ]


def of_messages(prompts, completions, **kwargs):
    return [float(prompt == [{"role": "user", "content": "What is 1 + 1?"}]) for prompt in prompts]


async def by_service(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else None for completion in completions]


def with_default(completions, log_extra=None, log_metric=None, **kwargs):
    return [float(log_extra is None and log_metric is None)] * len(completions)


def plain(completion):
    return 1.0
'''
TEXT = {"prompt": "What is 1 + 1?", "ground_truth": "2", "level": 3}
CHAT = TEXT | {"prompt": [{"role": "user", "content": "What is 1 + 1?"}]}


@pytest.fixture
def data(tmp_path):
    def write_rows(*rows):
        path = tmp_path / f"rows-{len(list(tmp_path.glob('rows-*')))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), "test_fraction": 0.0}

    return write_rows


def rewards(groups):
    return [episode.reward for group in groups for episode in group.episodes]


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("reward_func", TEXT, [0.0, 9.0, 9.0]),
        ("format_reward", CHAT, [0.0, 0.0, 0.0]),
        ("accuracy", TEXT, [0.0, 1.0, 0.0]),
        ("by_keyword", TEXT, [1.0, 1.0, 1.0]),
        ("of_messages", CHAT, [1.0, 1.0, 1.0]),
        ("by_service", TEXT, [None, 1.0, 1.0]),
        ("with_default", TEXT, [1.0, 1.0, 1.0]),
    ],
)
def test_functions_of_trls_documentation_run_unchanged(play, write, data, name, row, expected):
    """From the command line: the file knows nothing of envgym."""
    spec = registry.spec(f"{write(EXAMPLES)}:{name}", data=data(row))
    assert rewards(play(spec, None, ("", r"\boxed{2}", r"\boxed{3}"))) == expected
    assert registry.spec_from_json(spec.to_json()) == spec
    assert spec.fingerprint()["code"]


def test_tokens_and_messages(play, write, data):
    path = write(EXAMPLES)
    [group] = play(registry.spec(f"{path}:by_tokens", data=data(TEXT)), None)
    assert rewards([group]) == [len(episode.rows[0].segments[-1].token_ids) for episode in group.episodes]
    texts = ("<think>1 + 1</think><answer>2</answer>", "2")
    assert rewards(play(registry.spec(f"{path}:format_reward", data=data(CHAT)), None, texts)) == [1.0, 0.0]
    with pytest.raises(NameNotFound, match="no function decorated with"):
        registry.spec(str(path))
    assert rewards(play(registry.spec(f"{path}:plain", data=data(TEXT)), None)) == [1.0] * 3


def test_decorated_they_are_batch_functions(play):
    @envgym.reward(tasks=[TEXT] * 2)
    def right(completions, ground_truth, **kwargs):
        return [float(truth in text) for text, truth in zip(completions, ground_truth, strict=True)]

    assert right(["2", "3"], ["2", "2"]) == [1.0, 0.0]
    assert rewards(play(right.__environment__("mine"), None, ("2", "3"))) == [1.0, 0.0]

    @envgym.reward(batch=True, tasks=[TEXT] * 2)
    def both(completion, completions, prompts, prompt):
        return [float(completion == completions and prompts == prompt)] * len(prompts)

    assert rewards(play(both.__environment__("mine"), None)) == [1.0] * 3


def test_what_the_trainer_alone_has_is_an_error_before_the_run():
    @envgym.reward(tasks=[TEXT] * 2)
    def scheduled(completions, trainer_state, **kwargs):
        return [0.0] * len(completions)

    async def main():
        async with scheduled.__environment__("mine"):
            raise AssertionError

    with pytest.raises(ConfigError, match="scheduled takes 'trainer_state', which is none of completion"):
        asyncio.run(main())


# -- several functions ---------------------------------------------------------------------------------------


def math(prompts, completions, task, **kwargs):
    """TRL's documentation has a column `task`; it is the column here, and not the `envgym.Task`."""
    return [None if kind != "math" else float(text == "2") for text, kind in zip(completions, task, strict=True)]


def code(prompts, completions, task, **kwargs):
    return [None if kind != "code" else -1.0 for kind in task]


async def length(completions, **kwargs):
    await asyncio.sleep(0)
    return [{"reward": len(text), "score": 0.25, "metrics": {"characters": len(text)}} for text in completions]


@pytest.mark.parametrize("kind", ["math", "code", "essay"])
def test_a_function_that_returns_none_does_not_count_for_that_completion(play, kind):
    rows = [TEXT | {"task": kind}] * 2
    [group] = play(envgym.reward([math, code], tasks=rows).__environment__("mine"), None, ("2", "3"))
    each = {"math": [1.0, 0.0], "code": [-1.0, -1.0], "essay": [None, None]}[kind]
    assert rewards([group]) == each
    assert [episode.metrics for episode in group.episodes] == [{} if r is None else {kind: r} for r in each]


def test_rewards_are_summed_by_weight_and_logged_by_function(play):
    """Plain and asynchronous functions, which wait for each other."""
    rows = [TEXT | {"task": "math"}] * 2
    summed = envgym.reward([math, length], weights=[2, 0.5], tasks=rows)
    [group] = play(summed.__environment__("mine"), None, ("2", "333"))
    assert rewards([group]) == [2 * 1.0 + 0.5 * 1, 0.5 * 3]
    assert [episode.metrics for episode in group.episodes] == [
        {"math": 1.0, "length": 1.0, "characters": 1.0},
        {"math": 0.0, "length": 3.0, "characters": 3.0},
    ]
    assert [episode.score for episode in group.episodes] == [0.25, 0.25]


def test_functions_of_single_completions_are_summed_as_well(play):
    def brevity(completion):
        return envgym.Reward(1 / (1 + len(completion.split())), score=0.25)

    def right(completion, answer):
        return envgym.Reward(float(completion == str(answer)), score=0.5)

    summed = envgym.reward([right, brevity], tasks=[{"prompt": "1 + 1?", "answer": 2}] * 2)
    [group] = play(summed.__environment__("mine"), None, ("2", "3 or so"))
    assert rewards([group]) == [0.5 + 1.0, 0.25]
    assert group.episodes[0].metrics == {"brevity": 0.5, "right": 1.0}
    assert [episode.score for episode in group.episodes] == [0.5, 0.5]


def test_an_invalid_reward_of_one_function_fails_that_episode_alone(play):
    def unsound(completions, **kwargs):
        return [float("nan") if text == "3" else 0.0 for text in completions]

    summed = envgym.reward([length, unsound], tasks=[TEXT] * 2)
    [group] = play(summed.__environment__("mine"), None, ("2", "3"))
    assert [(e.reward, e.outcome.reason) for e in group.episodes] == [(1.0, ""), (None, "invalid_environment")]
    assert group.episodes[1].outcome.message.startswith("unsound returned nan")

    def short(completions, **kwargs):
        return [1.0]

    [group] = play(envgym.reward([length, short], tasks=[TEXT] * 2).__environment__("mine"), None, ("2", "3"))
    assert {episode.outcome.message for episode in group.episodes} == {"short returned 1 values for 2 completions"}


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ([math, code], {"weights": [1.0]}, "1 weights for 2 reward functions"),
        ([math, math], {}, "a reward function stands twice among math, math"),
        ([math, lambda completion: 1.0], {}, "math takes lists of completions: all functions must"),
    ],
)
def test_lists_that_cannot_be_summed(functions, options, message):
    with pytest.raises(ConfigError, match=message):
        envgym.reward(functions, **options)


SUMS = """
import random
import envgym
from others import draw, zero

both = envgym.reward([draw, zero], weights=[1, 5], tasks=[{"prompt": "a"}, {"prompt": "b"}])
"""
OTHERS = """
import random

def draw(completions, **kwargs):
    return [random.random() for _ in completions]

def zero(completions, **kwargs):
    return [0.0 for _ in completions]
"""


def test_a_file_with_a_sum_is_an_environment_also_in_processes(play, write):
    write(OTHERS, "others.py")
    path = write(SUMS, "sums.py")
    spec = registry.spec(str(path), processes=1)
    assert registry.spec(f"{path}:both").function is spec.function
    first, second = rewards(play(spec)), rewards(play(registry.spec_from_json(spec.to_json())))
    assert first == second
    assert len(set(first)) == 3
    assert random.random() not in first
    several = write(SUMS + "second = envgym.reward([zero], tasks=[])\n", "several.py")
    with pytest.raises(NameNotFound, match=r"choose .*several.py:both or .*several.py:second"):
        registry.spec(str(several))


def test_trls_own_reward_functions(play):
    rewards_of_trl = pytest.importorskip("trl.rewards")
    functions = [rewards_of_trl.think_format_reward, rewards_of_trl.get_soft_overlong_punishment(100, 99)]
    summed = envgym.reward(functions, tasks=[CHAT] * 2)
    [group] = play(summed.__environment__("mine"), None, ("<think>1 + 1</think>2", "2"))
    n_tokens = [len(episode.rows[0].segments[-1].token_ids) for episode in group.episodes]
    punishments = [(1 - n) / 99 for n in n_tokens]
    assert rewards([group]) == pytest.approx([1 + punishments[0], punishments[1]])
    assert set(group.episodes[0].metrics) == {"think_format_reward", "soft_overlong_punishment_reward"}
