"""What every environment is kept to, whoever wrote it."""

import asyncio

import pytest

import envgym
from envgym.errors import ResetNeeded
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
