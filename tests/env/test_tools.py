"""The base class of environments with tools."""

import asyncio
import sys
from pathlib import Path

import pytest

import envgym
from envgym.env import EnvConfig
from envgym.env.tools import ToolEnvSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.tools import McpServer
from envgym.types import Message, Task, ToolCall

PROGRAM = str(Path(__file__).parents[1] / "tools" / "mcp_program.py")


class Shop(envgym.ToolEnv):
    """Buy what the task names; the price is not in the prompt."""

    def begin(self):
        self.bought = []
        return f"Buy {self.task.prompt}."

    def tools(self):
        return [self.buy, wait]

    def buy(self, item: str) -> str:
        """Buy an item."""
        if item == "moon":
            raise LookupError("not for sale")
        self.bought.append(item)
        return f"{len(item)} dollars"

    def grade(self, action):
        return envgym.Reward(float(self.task.prompt in self.bought), metrics={"bought": len(self.bought)})


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def shop(**settings):
    envgym.registry._registered.pop("Shop-v0", None)
    envgym.register("Shop-v0", Shop)
    return envgym.spec("Shop-v0", **settings)


def call(*calls):
    return envgym.Action("", tool_calls=tuple(ToolCall(str(i), *call) for i, call in enumerate(calls)))


def play(spec, *actions, prompt="tea"):
    """The first observation, and what the environment says of each action."""

    async def main():
        async with spec, spec.make() as env:
            observation, _ = await env.reset(options={"task": Task("t", prompt)})
            return observation, [await env.step(action) for action in actions]

    return asyncio.run(main())


def test_an_episode():
    observation, steps = play(
        shop(), call(("buy", {"item": "tea"}), ("buy", {"item": "moon"})), envgym.Action("I have bought tea.")
    )
    assert observation.messages == (Message("user", "Buy tea."),)
    assert [spec.name for spec in observation.tools] == ["buy", "wait"]
    (results, reward, terminated, truncated, info), (_, final, ended, _, last) = steps
    assert [(message.role, message.tool_call_id, message.name, message.text) for message in results.messages] == [
        ("tool", "0", "buy", "3 dollars"),
        ("tool", "1", "buy", "Error: LookupError: not for sale"),
    ]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["metrics"] == {"tool_calls": 2, "tool_errors": 1, "tool_malformed": 0, "tool_timeouts": 0}
    assert (final, ended) == (1.0, True)
    assert last["metrics"] == {**info["metrics"], "bought": 1}


def test_it_is_played_by_the_tool_calling_agent():
    assert shop().agent == "tool_calling"
    assert shop(max_calls=3).config.max_calls == 3


def test_an_answer_without_calls_is_graded_at_once():
    _, [(_, reward, terminated, _, info)] = play(shop(), envgym.Action("No."))
    assert (reward, terminated, info["metrics"]["tool_calls"]) == (0.0, True, 0)


def test_malformed_calls_are_told_and_count():
    broken = envgym.Action("", tool_calls=(ToolCall("0", "", error="The call is not JSON."),))
    _, [(results, _, terminated, _, info)] = play(shop(), broken)
    assert results.messages[0].text == "Error: The call is not JSON."
    assert not terminated
    assert info["metrics"]["tool_malformed"] == 1


def test_more_calls_than_allowed_end_the_episode_truncated():
    tea = ("buy", {"item": "tea"})
    _, steps = play(shop(max_calls=3), call(tea), call(tea, tea), call(tea))
    assert [step[1:4] for step in steps] == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]
    assert "score" not in steps[-1][4]  # the reward stands in, where the others' do
    assert steps[-1][4]["metrics"]["tool_calls"] == 3, "the last one was not made"
    _, [step] = play(shop(max_calls=3), call(tea, tea, tea, tea))
    assert step[1:4] == (0.0, False, True)


def test_settings_reach_the_tools():
    spec = shop(tool_timeout=0.1, max_result_chars=4)
    _, [(results, *_)] = play(spec, call(("wait", {"seconds": 5}), ("buy", {"item": "tea"})))
    assert results.messages[0].text == "Error: wait took longer than 0.1 s"
    assert results.messages[1].text == "3 \n[truncated: 9 characters in all]\nrs"


def test_episodes_do_not_share_state():
    async def main():
        async with shop() as spec:
            envs = [spec.make() for _ in range(2)]
            for env in envs:
                await env.reset(options={"task": Task("t", "tea")})
            await envs[0].step(call(("buy", {"item": "tea"})))
            return [(await env.step(envgym.Action("")))[1] for env in envs]

    assert asyncio.run(main()) == [1.0, 0.0]


class Asynchronous(Shop):
    async def begin(self):
        return [{"role": "system", "content": "A shop."}, {"role": "user", "content": "Hello."}]

    async def tools(self):
        return []

    async def grade(self, action):
        return 0.5


def test_its_methods_may_be_asynchronous():
    observation, [(_, reward, *_)] = play(Asynchronous.spec_class("shop", Asynchronous), envgym.Action(""))
    assert reward == 0.5
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert observation.tools == ()


class OtherConfig(Shop):
    class Config(EnvConfig):
        pass


def test_settings_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="its Config must be a subclass of ToolEnvConfig"):
        play(envgym.EnvSpec("shop", OtherConfig), envgym.Action(""))


class Served(envgym.ToolEnv):
    command = (sys.executable, PROGRAM)

    def tools(self):
        return [wait, McpServer(command=list(self.command))]

    def grade(self, action):
        return float(action.text == "2")


class Unserved(Served):
    command = (sys.executable, PROGRAM, "--die")


def served(cls=Served):
    return Served.spec_class("served", cls)


def test_each_episode_has_a_session_of_its_own_with_a_server():
    async def main():
        async with served() as spec:
            env = spec.make()
            observation, _ = await env.reset(options={"task": Task("t", "1 + 1?")})
            assert {"wait", "add", "pid"} <= {tool.name for tool in observation.tools}
            first = (await env.step(call(("pid", {}), ("add", {"a": 1, "b": 1}))))[0].messages
            await env.reset(options={"task": Task("t", "1 + 1?")})
            second = (await env.step(call(("pid", {}))))[0].messages
            assert (await env.step(envgym.Action("2")))[1] == 1.0
            await env.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return first[1].text, first[0].text, second[0].text

    total, first, second = asyncio.run(main())
    assert total == "2"
    assert first != second
    assert not Path("/proc", first).exists()
    assert not Path("/proc", second).exists()


def test_a_server_that_dies_in_mid_episode_fails_the_episode():
    with pytest.raises(InvalidOutcome, match="out of paper") as error:
        play(served(), call(("die", {}), ("wait", {"seconds": 60})))
    assert (error.value.kind, error.value.retryable) == ("tool_server", True)


def test_a_server_that_does_not_start_fails_the_episode():
    with pytest.raises(InvalidOutcome, match="no licence found"):
        play(served(Unserved))


class PricedSpec(ToolEnvSpec):
    """A shop whose author writes a spec."""

    env_class = Shop


class Rows(envgym.Env):
    """Reads rows."""

    spec_class = envgym.DataEnvSpec

    async def reset(self, *, seed=None, options=None): ...

    async def step(self, action): ...


def test_a_description_is_of_the_class_that_was_named(tmp_path):
    assert shop().docstring == Shop.__doc__
    assert PricedSpec("priced").docstring == PricedSpec.env_class.__doc__
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    rows = envgym.spec(Rows, data=str(tmp_path / "rows.jsonl"))
    assert rows.docstring == "Reads rows."
