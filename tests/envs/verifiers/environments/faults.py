"""A chat in verifiers' own process, which goes wrong as its task says."""

import asyncio
import os
import subprocess
import tempfile

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Chat", "Faults"]

KINDS = ("none", "setup", "harness", "raise", "nan", "empty", "late", "exit", "hang", "stay")


class FaultData(vf.TaskData):
    fault: str


class Fault(vf.Task[FaultData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "setup":
            raise FileNotFoundError("no\nfile")
        if self.data.fault == "stay":
            subprocess.Popen(["setsid", "sleep", "4321"])  # noqa: ASYNC220
            tempfile.mkdtemp()

    @vf.reward
    async def right(self, trace: vf.Trace) -> float | dict[str, float]:
        match self.data.fault:
            case "raise":
                raise RuntimeError("a bug of the reward")
            case "nan":
                return float("nan")
            case "empty":
                return {}
            case "late" | "hang":
                await asyncio.sleep(1000)
            case "exit":
                os._exit(3)
        return 1.0


class Chat(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(4 if data.fault == "harness" else 0, "", "no more chat")


class Faults(vf.Taskset[Fault, vf.TasksetConfig]):
    def load(self) -> list[Fault]:
        timeouts = {"late": vf.TaskTimeout(scoring=0.2)}
        return [
            Fault(FaultData(name=kind, prompt=kind, fault=kind, timeout=timeouts.get(kind, vf.TaskTimeout())))
            for kind in KINDS
        ]
