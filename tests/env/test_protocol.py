"""What every environment is kept to, whoever wrote it."""

import asyncio

import pytest

import envgym
from envgym.errors import InvalidStep, ResetNeeded
from envgym.types import Action, Task

OPTIONS = {"task": Task("t")}


class Ends(envgym.Env):
    """Ends at the first step: by itself, or at a limit."""

    ending = "terminated"

    async def reset(self, *, seed=None, options=None):
        return "say", {}

    async def step(self, action):
        return "", 1.0, self.ending == "terminated", self.ending == "truncated", {}


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_an_episode_that_has_ended_takes_no_step(ending):
    async def main():
        async with envgym.EnvSpec("Ends-v0", type("Own", (Ends,), {"ending": ending})).make() as env:
            for _ in range(2):
                with pytest.raises(ResetNeeded):
                    await env.step(Action("too early"))
                await env.reset(options=OPTIONS)
                await env.step(Action("x"))
                with pytest.raises(ResetNeeded):
                    await env.step(Action("too late"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ((None, 1.0, True, {}), r"\(observation, reward, terminated, truncated, info\), not \(None, 1.0, True"),
        ((None, 1.0, True, False, None), r"\(observation, reward, terminated, truncated, info\), not"),
        ((None, float("nan"), True, False, {}), "a reward must be finite, not nan"),
        ((None, 1.0, True, False, {"score": 1.5}), "a score lies in .0, 1., not at 1.5"),
        ((None, 1.0, True, False, {"metrics": [1]}), "names to numbers, not .1."),
    ],
)
def test_a_step_that_is_none_is_refused_with_what_is_wrong(returned, says):
    class Returns(Ends):
        async def step(self, action):
            return returned

    async def main():
        async with envgym.EnvSpec("Returns-v0", Returns).make() as env:
            await env.reset(options=OPTIONS)
            await env.step(Action("x"))

    with pytest.raises(InvalidStep, match=says):
        asyncio.run(main())


def test_metrics_that_are_no_numbers_are_counted():
    class Returns(Ends):
        async def step(self, action):
            return None, 1.0, True, False, {"metrics": {"tries": True, "time": float("inf"), "note": "x"}}

    async def main():
        async with envgym.EnvSpec("Returns-v0", Returns).make() as env:
            await env.reset(options=OPTIONS)
            return await env.step(Action("x"))

    assert asyncio.run(main())[4]["metrics"] == {"tries": 1.0, "invalid_metrics": 2.0}


def test_a_place_is_given_back_once_however_often_an_instance_is_closed():
    async def main():
        limited = envgym.EnvSpec("Ends-v0", Ends)
        limited.config.concurrency = 1
        first = limited.make()
        await first.reset(options=OPTIONS)
        await first.close()
        await first.close()
        second, third = limited.make(), limited.make()
        await second.acquire()
        waiting = asyncio.create_task(third.acquire())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        await second.close()
        await waiting

    asyncio.run(main())
