"""reward_model: the weighted sum of what real models and servers say, and nothing where one says nothing."""

import asyncio
import json
import math

import pytest
from aiohttp import web

import envgym
from envgym.envs.reward_model import RewardModelEnvSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.net import client as http
from envgym.processes.runtime import InlineRuntime
from envgym.services import RewardModel, start_services
from envgym.types import Task, as_messages

TASK = Task("t", "what is 12 + 34?", "46")


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": f"what is {n} + 34?"} for n in range(19)] + [{"prompt": "what is 12 + 34?", "answer": "46"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(tmp_path / "prompts.jsonl")}


async def played(spec, text="the answer is 46.", task=TASK):
    """What an environment pays for an answer."""
    async with spec.make() as env:
        observation, _ = await env.reset(seed=0, options={"task": task})
        assert observation.messages == as_messages(task.prompt)
        _, reward, terminated, truncated, info = await env.step(envgym.Action(text))
        assert (terminated, truncated) == (True, False)
        return reward, info


def test_the_reward_is_the_weighted_sum_of_models_and_endpoints(tiny_reward_model, prompts, serving):
    asked = []

    async def handler(request):
        body = await request.json()
        asked.append(body)
        return web.json_response({"rewards": [2.0] * len(body["query"]), "scores": [0.5] * len(body["query"])})

    async def main():
        async with serving(handler) as url:
            models = [
                {"model": str(tiny_reward_model), "weight": 0.5, "name": "helpful", "too_long": "cut"},
                {"model": str(tiny_reward_model), "weight": -1.0, "normalise": True},
            ]
            spec = RewardModelEnvSpec(
                "rm", data=prompts, models=models, endpoints={"urls": url, "weight": 0.25, "name": "remote"}
            )
            direct = RewardModelEnvSpec("direct", data=prompts, models=str(tiny_reward_model))
            remote = RewardModelEnvSpec("remote", data=prompts, endpoints=url)
            async with (
                start_services(spec, InlineRuntime()),
                start_services(direct, InlineRuntime()),
                start_services(remote),
            ):
                assert spec.tasks("train").size + spec.tasks("test").size == 20
                [own] = direct.clients.values()
                conversation = [*as_messages(TASK.prompt), envgym.Message("assistant", "the answer is 46.")]
                return await own.score_one(conversation), await played(spec), await played(direct), await played(remote)

    expected, (reward, info), (alone, alone_info), (far, far_info) = asyncio.run(main())
    [_, normalised_name, _] = [name for name in info["metrics"] if "/" not in name]
    normalised = (expected - 0.5) / 2.0
    assert info["metrics"] == pytest.approx(
        {"helpful": expected, "helpful/cut": 0.0, normalised_name: normalised, "remote": 2.0}, abs=1e-5
    )
    assert normalised_name == tiny_reward_model.name
    assert reward == pytest.approx(0.5 * expected - normalised + 0.25 * 2.0, abs=1e-5)
    assert info["score"] == pytest.approx(1 / (1 + math.exp(-reward)))
    assert alone == pytest.approx(expected, abs=1e-5)
    assert alone_info["score"] == pytest.approx(1 / (1 + math.exp(-expected)), abs=1e-5)
    assert (far, far_info["score"]) == (2.0, 0.5)
    assert asked[0] == {
        "query": ["what is 12 + 34?the answer is 46."],
        "prompts": ["what is 12 + 34?"],
        "labels": ["46"],
    }


def test_scores_that_repeat_the_reward_are_none_of_the_servers_own(prompts, serving):
    """Of rewards 1 and -1 the wins alone would have a score."""

    async def main(said):
        async def handler(request):
            return web.json_response(said)

        async with serving(handler) as url:
            spec = RewardModelEnvSpec("remote", data=prompts, endpoints=url)
            async with start_services(spec):
                return (await played(spec))[1].get("score")

    assert asyncio.run(main({"rewards": [1.0], "scores": [1.0]})) is None
    assert asyncio.run(main({"rewards": [1.0], "scores": [0.75]})) == 0.75


def test_a_model_that_says_nothing_is_no_reward(tiny_reward_model, prompts, serving, monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)

    async def handler(request):
        return web.Response(status=500)

    async def main():
        async with serving(handler) as url:
            spec = RewardModelEnvSpec("rm", data=prompts, endpoints=[{"urls": [url], "tries": 2}])
            async with start_services(spec):
                with pytest.raises(InvalidOutcome, match="answers 500"):
                    await played(spec)
            spec = RewardModelEnvSpec("rm", data=prompts, models={"model": str(tiny_reward_model), "max_length": 10})
            async with start_services(spec, InlineRuntime()):
                with pytest.raises(InvalidOutcome, match="raise max_length") as failure:
                    await played(spec)
                assert failure.value.kind == "too_long"

    asyncio.run(main())


def test_settings(prompts, tiny_reward_model):
    async def start(**settings):
        async with start_services(RewardModelEnvSpec("rm", **settings)):
            pass

    with pytest.raises(ConfigError, match=r"which reward model\? Give env.models=FOLDER"):
        asyncio.run(start(data=prompts))
    with pytest.raises(ConfigError, match=r"unknown key 'models.0.wieght'"):
        RewardModelEnvSpec("rm", models=[{"model": "a", "wieght": 1}])
    two = RewardModelEnvSpec("rm", models=["org/a", {"model": "org/a", "weight": 2.0}], endpoints="http://h:5000/x")
    assert list(two.services) == ["a", "a-2", "h"]
    # Equal models are one service, whatever they count.
    assert two.services["a"].key == two.services["a-2"].key == RewardModel(model="org/a").key
    assert RewardModelEnvSpec("rm", **json.loads(two.to_json())["kwargs"]) == two
    assert two.demonstrations(TASK, 0) == ["46"]
    with pytest.raises(ConfigError, match="no demonstrations"):
        two.demonstrations(Task("u", "?"), 0)
