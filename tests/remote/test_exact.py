"""Tasks and options are on the server what they are here, to the last tuple."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envgym.registry as registry
from envgym.env import EnvSpec
from envgym.remote.encoding import encode
from envgym.remote.wire import Opening, TaskPage
from envgym.rollout.runner import as_reward
from envgym.types import Action, Episode, Outcome, Task

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.sampled_from(["$tuple", "$items", "$", "$$tuple", ""]) | st.text()
keys = st.recursive(
    names | plain,
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    answer=values, fields=st.dictionaries(keys, values, max_size=3), options=st.dictionaries(names, values, max_size=3)
)
def test_whatever_is_of_pythons_plain_kinds_arrives_as_it_was(answer, fields, options):
    task = Task("t", "?", answer, fields)
    for sent in (
        Opening(session_id="s", seed=1, task=task, options=options),
        TaskPage(split="train", start=0, tasks=(task, task)),
    ):
        arrived = type(sent).model_validate_json(encode(sent), strict=True)
        assert repr(arrived) == repr(sent)  # equality alone takes 1 for True


def test_a_task_is_worth_on_a_server_what_it_is_worth_here(unruly):
    async def played(spec: EnvSpec) -> list[Any]:
        task, env = await spec.tasks("train").get(1), spec.make()
        judged = await spec.score_group(task, [Episode("e", task, Outcome.finish(), reward=0.0)])
        said = [task, *(as_reward(one).reward for one in judged)]
        for options in ({}, {"task": task}, {"given": {(1, "a"): [(), {2: {"$tuple": [1]}}]}}):
            _, info = await env.reset(seed=0, options=options)
            _, reward, *_ = await env.step(Action("on"))
            said += [info, reward]
        await env.close()
        return said

    async def main() -> None:
        async with unruly() as (url, _, local), registry.spec(url) as remote:
            here, there = await played(local), await played(remote)
            assert here == there
            assert repr(here) == repr(there)
            assert [there[index] for index in (1, 3, 5, 7)] == [1.0] * 4

    asyncio.run(main())


@pytest.mark.parametrize(
    "mark",
    [
        {"$items": [[1]]},
        {"$items": [[1, 2, 3]]},
        {"$items": [1]},
        {"$items": ["ab"]},
        {"$items": [[[1], 2]]},
        {"$items": {"a": 1}},
        {"$tuple": 1},
        {"$tuple": {"0": 1}},
    ],
)
def test_what_nobody_writes_is_refused_in_words(unruly, mark):
    async def main() -> None:
        async with unruly() as (url, _, spec), aiohttp.ClientSession() as http:
            for more in (
                {"options": {"given": mark}},
                {"options": mark},
                {"task": {"id": "t", "answer": [mark]}},
                {"task": {"id": "t", "fields": mark}},
                {"options": {"$tuple": []}},  # where names and values are wanted
                {"task": {"id": "t", "fields": {"$tuple": [[1, 2]]}}},
            ):
                async with http.post(f"{url}/v1/sessions", json={"session_id": "s", "seed": 1, **more}) as response:
                    assert response.status == 422, more
                    assert (await response.json())["type"] == "urn:envgym:problem:invalid-request"
            assert spec.instances == 0

    asyncio.run(main())
