"""A step whose episodes there is no room for is refused before anything starts."""

import asyncio

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError
from envgym.jobs.parts import part_of_rollout, parts_of_env
from envgym.launch import memory
from envgym.launch.memory import EPISODE_BYTES, GIB, check_episodes


@pytest.fixture
def free(monkeypatch):
    """A machine with 8 GiB of free memory: room for 1,263,225 episodes."""
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * GIB)
    assert 4 * GIB // EPISODE_BYTES == 1_263_225


TASKS = "rollout.tasks_per_step"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({TASKS: 2, "rollout.group_size": 600_000}, ""),
        (
            {"rollout.group_size": 10**9},
            r"a step \(rollout.tasks_per_step, rollout.group_size\) of 64 tasks, 1,000,000,000 episodes of each, would "
            r"take 202,655.8 GiB of memory or more, 3,400 bytes per episode: it may take half of the 8.0 GiB that are "
            r"free, 1,263,225 episodes",
        ),
        ({TASKS: 2, "rollout.group_size": 700_000}, r"a step .* of 2 tasks, 700,000 episodes of each"),
        ({TASKS: 2, "rollout.group_size": 600_000, "rollout.max_staleness": 1}, "of 4 tasks, 600,000"),
        ({TASKS: 2, "rollout.group_size": 600_000, "rollout.filter.max_rounds": 2}, ""),  # no filter is on
        (
            {
                TASKS: 2,
                "rollout.group_size": 600_000,
                "rollout.filter.zero_variance": True,
                "rollout.filter.max_rounds": 2,
            },
            r"a step \(rollout.tasks_per_step, rollout.group_size, rollout.filter.max_rounds\) of 4 tasks, 600,000",
        ),
        ({TASKS: 10**9, "agent": "replay", "learner": "sft"}, "a step .* of 1,000,000,000 tasks, 1 episodes"),
        ({"eval.samples": 10**9}, r"an evaluation \(eval.tasks, eval.samples\) of 512 tasks"),
        ({"eval.tasks": 10**9}, ""),  # there are no more than 512
        ({"eval.samples": 10**9, "eval.every": 0}, ""),
    ],
)
def test_what_asks_for_more_than_half_of_the_free_memory_is_refused_with_the_numbers(free, settings, says):
    from envgym.config.words import nest_keys

    stage = resolve(nest_keys({"env": "math_verify", **settings}.items())).stages[0]
    if not says:
        check_episodes(stage, stage.make_spec())
        return
    with pytest.raises(ConfigError, match=says):
        check_episodes(stage, stage.make_spec())


@pytest.mark.parametrize(
    "selection", [{"tasks": 10**9, "samples": 10**5}, {"samples": 10**9}, {"key": "x", "samples": 10**9}]
)
def test_a_rollout_into_a_file_is_too(free, selection):
    part = part_of_rollout(resolve({"env": "math_verify"}), **selection)
    with pytest.raises(ConfigError, match=r"would take .* GiB of memory or more"):
        asyncio.run(part.tasks(part.stage.make_spec()))


def test_an_evaluation_is_too(free):
    part = parts_of_env({"env": "math_verify", "eval": {"samples": 10**9}})[0]
    with pytest.raises(ConfigError, match=r"a rollout of 512 tasks, 1,000,000,000 episodes of each"):
        asyncio.run(part.tasks(part.stage.make_spec()))


def test_the_free_memory_is_some_of_the_machines():
    assert 0 < memory.free_memory() < 2**50
