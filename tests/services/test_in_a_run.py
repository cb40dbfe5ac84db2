"""Services where people meet them: in an evaluation, in training and behind `envgym serve`."""

import asyncio
import json

import pytest
from aiohttp import web

import envgym
from envgym import api, registry
from envgym.errors import InvalidOutcome
from envgym.services import Policy, RewardModel, start_services

SELF_PLAY = '''
import hashlib
import envgym
from envgym.services import Policy


class SelfPlay(envgym.EnvSpec):
    """Two moves of each side; the score is a number drawn from all that was said."""

    @property
    def services(self):
        return {"opponent": Policy()}


class Player(envgym.Env):
    spec_class = SelfPlay

    async def reset(self, *, seed=None, options=None):
        self.said = []
        return [{"role": "user", "content": f"what is {self.rng.randint(1, 99)} + 34?"}], {}

    async def step(self, action):
        self.said.append(action.text)
        reply = await self.spec.clients["opponent"].complete(
            [{"role": "user", "content": action.text}], max_tokens=6, seed=self.rng.getrandbits(31)
        )
        self.said.append(reply)
        score = hashlib.sha256("|".join(self.said).encode()).digest()[0] / 255
        over = len(self.said) == 4
        return [{"role": "user", "content": reply}], score if over else None, over, False, {"score": score}


SelfPlay.env_class = Player
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(model, **settings):
    small = {"engine.kind": "transformers", "debug": True, "eval.tasks": 6, "eval.greedy": False}
    return api.evaluate({"model": str(model), "rollout.max_tokens": 6, **small, **settings}, quiet=True)


def test_an_evaluation_is_paid_by_a_reward_model(tiny_model, tiny_reward_model, folder):
    rows = [{"prompt": f"what is {number} + 34?"} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {"name": "reward_model", "models": str(tiny_reward_model)}
    result = evaluate(tiny_model, env=env, data={"path": "prompts.jsonl", "test_fraction": 0.5})
    assert (result.n_tasks, result.failures) == (6, {})


def test_self_play_is_repeatable_in_a_deterministic_run(tiny_model, folder):
    (folder / "self_play.py").write_text(SELF_PLAY)
    settings = {"env": "self_play.py:SelfPlay", "deterministic": True, "eval.samples": 2, "eval.tasks": 3}
    try:
        first, again = (evaluate(tiny_model, **settings) for _ in range(2))
        other = evaluate(tiny_model, **settings, seed=1)
    finally:
        import torch

        torch.use_deterministic_algorithms(False)
    assert first.failures == {}
    assert first.score == again.score != other.score


def test_equal_services_of_several_parts_are_one(tiny_reward_model):
    class Part(envgym.EnvSpec):
        @property
        def services(self):
            return {"reward": RewardModel(model=str(tiny_reward_model)), "opponent": Policy()}

    class Whole(envgym.EnvSpec):
        def __init__(self, id, *members):
            super().__init__(id)
            self.members = members

        def parts(self):
            return self.members

    async def main():
        first, second = Part("a"), Part("b")
        whole = Whole("whole", first, Whole("inner", second))
        async with start_services(whole, eager=False) as services:
            assert sorted(services.names) == ["opponent", "reward"]
            assert first.clients == second.clients
            assert whole.clients == {}
            with pytest.raises(InvalidOutcome, match="no engine samples here"):
                await first.clients["opponent"].complete("?")

    asyncio.run(main())


def test_a_failed_judgement_is_a_failure_of_its_kind_and_no_zero(tiny_model, serving, folder):
    (folder / "prompts.jsonl").write_text('{"prompt": "what is 1 + 1?"}\n' * 2 + '{"prompt": "what is 1 + 2?"}\n')

    async def judge(request):
        return web.json_response({"choices": [{"message": {"content": "I cannot say."}}]})

    async def main():
        async with serving(judge) as url:
            env = {"name": "judge", "judge": {"base_url": url, "model": "m"}}
            data = {"path": "prompts.jsonl", "test_fraction": 0.5}
            return await asyncio.to_thread(evaluate, tiny_model, env=env, data=data)

    result = asyncio.run(main())
    assert result.failures == {"judge": result.n_episodes}
    assert result.score is None


JUDGED = """
import envgym
from envgym.services import Chat


class Judged(envgym.EnvSpec):
    @property
    def services(self):
        return {"judge": Chat(base_url="URL", model="m", tries=1)}


class Env(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return "?", {}

    async def step(self, action):
        return None, float(await self.spec.clients["judge"].complete(action.text)), True, False, {}


Judged.env_class = Env
"""


def test_a_served_environment_asks_its_services_itself(serving, folder):
    async def judge(request):
        content = (await request.json())["messages"][0]["content"]
        return web.json_response({"choices": [{"message": {"content": str(len(content))}}]})

    async def main():
        from envgym.remote.server import serve

        async with serving(judge) as url:
            (folder / "judged.py").write_text(JUDGED.replace("URL", url))
            ready = asyncio.get_running_loop().create_future()
            server = asyncio.create_task(
                serve({"judged": registry.spec("judged.py:Judged")}, "127.0.0.1", 0, on_ready=ready.set_result)
            )
            try:
                async with registry.spec(await asyncio.wait_for(ready, 20)).make() as env:
                    await env.reset(seed=0)
                    return (await env.step(envgym.Action("four")))[1]
            finally:
                server.cancel()
                await asyncio.gather(server, return_exceptions=True)

    assert asyncio.run(main()) == 4.0
