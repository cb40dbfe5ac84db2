"""The exercises that the starter policy was trained on."""

import asyncio
import random
from pathlib import Path

import pytest

import envgym
from envgym.config.recipes import load_recipe, makes_model
from envgym.config.resolve import resolve
from examples.starter import Exercises, exercise_of
from examples.starter.families import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES), ids=lambda family: family.__name__)
def test_a_demonstration_has_a_reply_between_two_turns_and_is_short(family):
    for seed in range(50):
        exercise = family(random.Random(seed))
        assert len(exercise.replies) == len(exercise.turns) - 1
        assert 0 < len(exercise.question) < 200
        assert all(0 < len(turn) < 120 for turn in exercise.turns if isinstance(turn, str))


def test_the_same_seed_poses_the_same_exercise():
    tasks = [envgym.Task(str(seed), seed=seed) for seed in range(100)]
    assert [exercise_of(task) for task in tasks] == [exercise_of(task) for task in tasks]
    assert len({exercise_of(task)[1].question for task in tasks}) > 90


def test_the_recipe_in_the_folder_of_the_exercises_makes_the_starter_of_them(monkeypatch):
    """The slow test `tests/acceptance/test_starter.py` makes it."""
    monkeypatch.chdir(ROOT)
    recipe = "examples/starter/starter.yaml"
    [stage] = resolve({}, recipe=recipe).stages
    assert makes_model(recipe)
    assert load_recipe(recipe)["new_model"] == load_recipe("starter")["new_model"]
    members = stage.env.settings["members"]
    assert envgym.spec(members["exercises"]["env"]).__class__ is Exercises


def rewards(turns_of):
    """Rewards and metrics of 200 exercises; `turns_of(spec, task)` are the policy's turns."""

    async def run_episode(seed):
        task = envgym.Task(str(seed), seed=seed)
        async with Exercises("starter") as spec, spec.make() as env:
            await env.reset(options={"task": task})
            for turn in turns_of(spec, task):
                message = turn if isinstance(turn, envgym.Message) else envgym.Message.assistant(turn)
                action = envgym.Action(message.text, tool_calls=message.tool_calls)
                _, reward, terminated, truncated, info = await env.step(action)
            assert (terminated, truncated) == (True, False)
            return reward, info.get("metrics")

    async def run_all():
        return [await run_episode(seed) for seed in range(200)]

    return asyncio.run(run_all())


def test_the_demonstrated_turns_end_the_episode_with_the_reward():
    results = rewards(lambda spec, task: spec.demonstrations(task, 0))
    assert {reward for reward, _ in results} == {1.0}
    assert {tuple(metrics.values()) for _, metrics in results if metrics} == {(1.0,)}
    assert any(metrics is None for _, metrics in results)  # where other answers are right as well


def test_another_turn_is_wrong_even_if_the_last_one_is_right():
    results = rewards(lambda spec, task: ["none of these", *spec.demonstrations(task, 0)[1:]])
    assert {reward for reward, _ in results} == {0.0}
