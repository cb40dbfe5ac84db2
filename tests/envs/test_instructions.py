"""The environment of the page on pretrained models: what it rewards, and what it holds out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import envgym
from envgym import registry
from envgym.types import Action, Task

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'instructions.py'}:Instructions"


async def tasks(split: str) -> list[Task]:
    found = registry.spec(EXAMPLE).tasks(split)
    return [await found.get(index) for index in range(found.size)]


async def rewards(*completions: str) -> list[float]:
    """The rewards for six words of which the last is `blue`."""
    env = envgym.make(EXAMPLE)
    task = next(t for t in await tasks("test") if t.fields == {"count": 6, "last": "blue"})
    results = []
    for completion in completions:
        await env.reset(seed=0, options={"task": task})
        _, reward, terminated, _, info = await env.step(Action(completion))
        assert terminated
        assert info["score"] == reward
        results.append(reward)
    await env.close()
    return results


def test_each_demand_is_paid_as_far_as_the_number_of_words_fits():
    full, capital, other_end, one_word, repeated, empty, end = asyncio.run(
        rewards(
            "the sea is wide and blue",
            "The sea is wide and blue.",
            "the sea is blue and wide",
            "blue",
            "sea sea sea sea sea blue",
            "",
            'the old sea was "blue".',
        )
    )
    assert full == 1.0
    assert capital == other_end == pytest.approx(2 / 3)
    assert one_word == pytest.approx(1 / 6)
    assert repeated == pytest.approx(2 / 6)
    assert empty == 0.0
    assert end == pytest.approx(5 / 6)


def test_words_and_numbers_of_words_are_held_out():
    train, test = (asyncio.run(tasks(split)) for split in ("train", "test"))
    assert (len(train), len(test)) == (768, 64)
    for key in ("count", "last"):
        assert not {task.fields[key] for task in train} & {task.fields[key] for task in test}
