"""NAME, an environment of envgym, for verifiers: its tasks, its episodes, and an agent that only calls the model."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI, omit
from verifiers.v1.dialects.chat import message_to_wire

from envgym.env import EnvSpec
from envgym.registry import spec_from_json
from envgym.render.tool_calls import parse_api_call
from envgym.services import start_services
from envgym.types import Action, StopReason, observed_messages

__all__ = ["EnvgymEnv", "EnvgymHarness", "EnvgymTaskset"]
FOLDER = Path(__file__).parent


def make_spec() -> EnvSpec:
    """The environment by its description. If it is in a file, that is in this folder."""
    description = (FOLDER / "environment.json").read_text(encoding="utf-8")
    return spec_from_json(description.replace("@FOLDER@", FOLDER.as_posix()))


class EnvgymData(vf.TaskData):
    index: int
    split: str


class EnvgymState(vf.State):
    tools: tuple[dict[str, Any], ...] = ()


class EnvgymTask(vf.Task[EnvgymData, EnvgymState]):
    """A task without a prompt: the environment opens the conversation."""


class EnvgymTasksetConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    max_tasks: int = 1000


class EnvgymTaskset(vf.Taskset[EnvgymTask, EnvgymTasksetConfig]):
    def load(self) -> list[EnvgymTask]:
        with ThreadPoolExecutor(1) as thread:  # vf-eval loads within an event loop
            return thread.submit(asyncio.run, self._read()).result()

    async def _read(self) -> list[EnvgymTask]:
        spec, split, number = make_spec(), self.config.split, self.config.max_tasks
        async with start_services(spec, eager=False):
            tasks = spec.tasks(split)
            indices = range(number if tasks.size is None else min(number, tasks.size))
            datas = [EnvgymData(index=index, split=split, id=(await tasks.get(index)).id) for index in indices]
        return [EnvgymTask(data, self.config.task) for data in datas]


class EnvgymConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class EnvgymEnv(vf.Env[EnvgymConfig]):
    async def start(self) -> None:
        self.resources = AsyncExitStack()  # which `stop` closes, also after an error
        self.spec = make_spec()
        await self.resources.enter_async_context(start_services(self.spec))

    async def stop(self) -> None:
        await self.resources.aclose()

    async def run(self, task: EnvgymTask, agents: vf.Agents) -> None:
        """Play an episode. Its reward is the sum over the steps; a failure of the environment is the episode's."""
        tools, rewards, ends = (), [], False
        envgym_task = await self.spec.tasks(task.data.split).get(task.data.index)
        async with self.spec.make() as env, agents.agent.interaction(task) as interaction:
            observation, _ = await env.reset(seed=task.data.index, options={"task": envgym_task})
            trace = interaction.trace
            while not ends:
                tools = observation.tools or tools
                trace.state.tools = tuple(tool.as_dict() for tool in tools)
                messages = [message.as_dict(arguments_as_text=True) for message in observed_messages(observation)]
                segment = await interaction.turn(messages)
                if segment.terminated:  # by a limit of verifiers'
                    break
                reply = segment.messages[-1]
                parsed = ((call.id, call.name, call.arguments) for call in reply.tool_calls or ())
                calls = tuple(replace(parse_api_call(*call, tools), id=id) for id, *call in parsed)
                stop_reason = StopReason.LENGTH if trace.calls[-1].finish_reason == "length" else StopReason.STOP
                action = Action(reply.content or "", tool_calls=calls, stop_reason=stop_reason)
                observation, reward, terminated, truncated, info = await env.step(action)
                rewards += [] if reward is None else [reward]
                trace.record_metrics(info.get("metrics") or {})
                ends = terminated or truncated or self.spec.agent == "single_turn"
                if ends and not terminated:
                    trace.stop("max_turns")  # which they count as truncated
            if ends and not rewards:
                raise ValueError(f"{self.spec.id} has given no reward")
            trace.record_reward("reward", sum(rewards))


class EnvgymHarness(vf.Harness[vf.HarnessConfig]):
    """A request for each turn, by this process."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any):
        messages, tools = [message_to_wire(message) for message in data.prompt], trace.state.tools or omit
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
        return vf.ProgramResult(0, "", "")
