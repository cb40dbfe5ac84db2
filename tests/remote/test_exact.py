"""Tasks and options are on the server what they are here."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envgym.registry as registry
from envgym.env import EnvSpec
from envgym.episodes.scores import as_reward
from envgym.errors import InvalidStep
from envgym.remote.encoding import encode
from envgym.remote.wire import Opening, TaskPage
from envgym.types import Action, Episode, Outcome, Task

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.sampled_from(["$ref", "$", "$$tuple", ""]) | st.text()
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)


@given(
    answer=values, fields=st.dictionaries(names, values, max_size=3), options=st.dictionaries(names, values, max_size=3)
)
def test_whatever_json_has_arrives_as_it_was(answer, fields, options):
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
        for options in ({}, {"task": task}, {"given": {"a": [[], {"2": {"$": [1]}}]}}):
            _, info = await env.reset(seed=0, options=options)
            _, reward, *_ = await env.step(Action("on"))
            said += [info, reward]
            assert env.tally.rewards == reward  # without it, laws would call the episode's reward wrong
        await env.close()
        return said

    async def main() -> None:
        async with unruly() as (url, _, local), registry.spec(url) as remote:
            here, there = await played(local), await played(remote)
            assert here == there
            assert repr(here) == repr(there)
            assert [there[index] for index in (1, 3, 5, 7)] == [1.0] * 4

    asyncio.run(main())


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}])
def test_options_that_json_would_change_are_not_sent(value):
    with pytest.raises(InvalidStep, match=r"^Opening cannot be sent as JSON: options holds "):
        encode(Opening(session_id="s", seed=1, options={"given": [value]}))


@pytest.mark.parametrize("name", ["$tuple", "$items"])
def test_what_only_an_earlier_version_writes_is_refused_in_words(unruly, name):
    async def main() -> None:
        async with unruly() as (url, _, spec), aiohttp.ClientSession() as http:
            task = {"id": "t", "answer": [{name: [1]}]}
            body = {"session_id": "s", "seed": 1, "task": task}
            async with http.post(f"{url}/v1/sessions", json=body) as response:
                assert response.status == 422
                assert f"holds a {name}, which only earlier versions" in (await response.json())["detail"]
            assert spec.instances == 0

    asyncio.run(main())
