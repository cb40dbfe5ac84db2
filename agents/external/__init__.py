"""The outside agent: a program we did not write plays the environment, and the policy behind it is trained.

The program speaks OpenAI chat completions, or responses, to a base URL that it is given. What it asks for is sampled
from the policy and recorded as it came, with the exact tokens it was asked with; what it prints is its answer to the
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome
from envgym.render import Renderer
from envgym.types import Action, Episode, Limit, Message, Observation, Outcome, StopReason, Task

from .conversation import Conversation
from .endpoint import Access, Endpoint

PASSED = (
    "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
)  # fmt: skip
"""Environment variables of envgym's own that every program gets, besides `LC_*`. Others may hold secrets."""
MAX_OUTPUT = 2**20
"""Bytes of a program's output that are read; more fails the episode."""


class ExternalConfig(AgentConfig):
    """Settings of the outside agent."""

    command: str | list[str] = Field(min_length=1)
    """The program: a command line, or its words. It finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY` and
    the first observation on standard input (`{"messages": [...], "tools": [...], "task": {...}}`); what it prints is
    its answer."""
    environ: tuple[str, ...] = ()
    """Names of environment variables that the program gets besides those it needs to run at all (`PASSED`): others of
    the trainer's, which may hold secrets, it does not see."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample in a whole episode; then the endpoint refuses, and the episode is truncated."""
    timeout: float = Field(240.0, gt=0)
    """Seconds the program may take for an episode; then it is killed and the episode fails (`agent`)."""


class External(Agent):
    """Runs the program once for each episode. It needs no change to be trained: only its base URL is ours.

    What it prints is the action. The policy's own calls are the episode's turns; the environment's reward is the last
    one's. Sub-agents, rewritten histories and parallel calls make rows of their own.
    """

    Config: ClassVar[type[AgentConfig]] = ExternalConfig
    config: ExternalConfig

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        super().__init__(renderer, config)
        self._endpoint = Endpoint()
        command = self.config.command
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        if not self._command:
            raise ConfigError("agent.command is empty: give the program that plays")
        for name in self.config.environ:
            if name not in os.environ:
                raise ConfigError(f"agent.environ names {name}, which is not set: export it, or leave it out")

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        observation, _ = await env.reset(seed=seed, options={"task": task})
        conversation = Conversation(self.renderer, engine, observation.sampling, self.config.max_tokens)
        async with self._endpoint.session(conversation) as access:
            try:
                answer = await self._answer(observation, task, access)
            except InvalidOutcome:
                if conversation.error is not None:  # the program failed because it was not answered
                    raise conversation.error from None
                raise
        if conversation.error is not None:  # the program answered all the same
            raise conversation.error
        if not conversation.turns:
            raise InvalidOutcome("agent", f"{self._command[0]} made no call to the policy")
        said = answer.rstrip("\n")
        token_ids = conversation.said(said)
        stop_reason = conversation.turns[-1].stop_reason if token_ids else StopReason.STOP
        closing, reward, terminated, truncated, info = await env.step(Action(said, token_ids, (), stop_reason))
        messages = [*conversation.messages, *closing.messages]
        if terminated and conversation.limit is None:
            outcome = Outcome.completed()
        else:
            outcome = Outcome.truncated(conversation.limit or (Limit.ENVIRONMENT if truncated else Limit.TURNS))
        return conversation.episode(task, outcome, reward, info, messages)

    async def _answer(self, observation: Observation, task: Task, access: Access) -> str:
        """What the program prints. Raises `InvalidOutcome` where it cannot be run, fails or does not end."""
        messages = observation.messages or (Message.of("user", observation.text or ""),)
        told = {
            "messages": [message.as_dict() for message in messages],
            "tools": [tool.as_dict() for tool in observation.tools],
            "task": {"id": task.id, "fields": dict(task.fields)},  # without the answer
        }
        given = {*PASSED, *self.config.environ}
        environ = {name: value for name, value in os.environ.items() if name in given or name.startswith("LC_")}
        base_url = access.base_url
        environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": access.key, "OPENAI_API_BASE": base_url}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True
            )
        except OSError as error:
            raise InvalidOutcome("agent", f"{self._command[0]} cannot be run: {error.strerror}") from None
        self._endpoint.bind(access, process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self.config.timeout):
                told_it = asyncio.ensure_future(_tell(process.stdin, json.dumps(told, default=str).encode()))
                output, complaint, _ = await asyncio.gather(_read(process.stdout), _read(process.stderr), told_it)
                status = await process.wait()
        except TimeoutError:
            message = f"{self._command[0]} took longer than {self.config.timeout:g} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the program, and what it started
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.CancelledError):
                await process.wait()
        if len(output) > MAX_OUTPUT:
            raise InvalidOutcome("agent", f"{self._command[0]} printed more than {MAX_OUTPUT} bytes")
        if status != 0:
            last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
            raise InvalidOutcome("agent", f"{self._command[0]} ended with status {status}: {last[0]:.200}")
        return output.decode(errors="replace")


async def _tell(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program that does not listen
        stdin.write(text)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of a stream, so that its writer never blocks; kept are a little more than `MAX_OUTPUT` bytes."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        if len(kept) <= MAX_OUTPUT:
            kept += chunk
    return bytes(kept)
