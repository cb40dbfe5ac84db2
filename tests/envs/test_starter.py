"""The exercises that the starter policy has learned."""

import asyncio
import random

import pytest

import envgym
from envgym.envs.starter import FAMILIES, Exercises, exercise_of


@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES), ids=lambda family: family.__name__)
def test_a_demonstration_has_a_reply_between_two_turns_and_is_short(family):
    for seed in range(50):
        exercise = family(random.Random(seed))
        assert len(exercise.replies) == len(exercise.turns) - 1
        assert 0 < len(exercise.question) < 120
        assert all(0 < len(turn) < 120 for turn in exercise.turns if isinstance(turn, str))


def test_the_same_seed_poses_the_same_exercise():
    tasks = [envgym.Task(str(seed), seed=seed) for seed in range(100)]
    assert [exercise_of(task) for task in tasks] == [exercise_of(task) for task in tasks]
    assert len({exercise_of(task).question for task in tasks}) > 90


def test_no_entry_point_names_them():
    assert not [name for name in envgym.list_ids() if "starter" in name]


def test_the_demonstrated_turns_end_the_episode_with_the_reward():
    async def play(seed):
        task = envgym.Task(str(seed), seed=seed)
        async with Exercises("starter") as spec, spec.make() as env:
            await env.reset(options={"task": task})
            for turn in spec.demonstrations(task, 0):
                message = turn if isinstance(turn, envgym.Message) else envgym.Message.assistant(turn)
                action = envgym.Action(message.text, tool_calls=message.tool_calls)
                _, reward, terminated, truncated, _ = await env.step(action)
            return reward, terminated, truncated

    async def play_all():
        return [await play(seed) for seed in range(200)]

    assert set(asyncio.run(play_all())) == {(1.0, True, False)}
