"""The external agent: a program that was not written for envgym plays the environment, and its policy is trained.

The program speaks OpenAI chat completions, or responses, to a base URL that it is given. Each of its requests is
sampled from the policy and recorded with the exact tokens of prompt and answer; what it prints is its answer to the
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
from envgym.types import Action, Episode, Message, Observation, Outcome, StopReason, Task

from .conversation import Conversation
from .endpoint import Endpoint, PolicyAddress

PASSED_VARIABLES = (
    "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
)  # fmt: skip
"""Environment variables of envgym's own that every program gets, besides `LC_*`. Others may hold secrets."""
MAX_OUTPUT = 2**20
"""Bytes a program may print; more fails the episode."""


class ExternalConfig(AgentConfig):
    """Settings of the external agent."""

    command: str | list[str] = Field(min_length=1)
    """The program: a command line, or its words. It finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY` and
    the first observation on standard input (`{"messages": [...], "tools": [...], "task": {...}}`); what it prints is
    its answer."""
    environ: tuple[str, ...] = ()
    """Names of environment variables that the program gets besides those that any program needs to run. Others of the
    trainer's, which may hold secrets, it does not see."""
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
            text = (await self._answer(observation, task, access)).rstrip("\n")
        conversation.check_turns(self._command[0])
        token_ids = conversation.token_ids_of(text)
        stop_reason = conversation.turns[-1].stop_reason if token_ids else StopReason.STOP
        last, reward, terminated, truncated, info = await env.step(Action(text, token_ids, (), stop_reason))
        messages = [*conversation.messages, *last.messages]
        return conversation.episode(task, Outcome.of(terminated, truncated), reward, info, messages)

    async def _answer(self, observation: Observation, task: Task, access: PolicyAddress) -> str:
        """The program's output. Raises `InvalidOutcome` where it cannot be run, fails or does not end."""
        messages = observation.messages or (Message.of("user", observation.text or ""),)
        given = {
            "messages": [message.as_dict() for message in messages],
            "tools": [tool.as_dict() for tool in observation.tools],
            "task": {"id": task.id, "fields": dict(task.fields)},  # without the answer
        }
        passed = {*PASSED_VARIABLES, *self.config.environ}
        environ = {name: value for name, value in os.environ.items() if name in passed or name.startswith("LC_")}
        base_url = access.base_url
        environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": access.key, "OPENAI_API_BASE": base_url}
        program, pipe = self._command[0], asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True
            )
        except OSError as error:
            raise InvalidOutcome("agent", f"{program} cannot be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(self.config.timeout):
                output, errors, _ = await asyncio.gather(
                    _read(process.stdout), _read(process.stderr), _write(process.stdin, json.dumps(given, default=str))
                )
                status = await process.wait()
        except TimeoutError:
            message = f"{program} took longer than {self.config.timeout:g} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the program, and what it started
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.CancelledError):
                await process.wait()
        if len(output) > MAX_OUTPUT:
            raise InvalidOutcome("agent", f"{program} printed more than {MAX_OUTPUT} bytes")
        if status != 0:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
            raise InvalidOutcome("agent", f"{program} ended with status {status}: {last[0]:.200}")
        return output.decode(errors="replace")


async def _write(stdin: asyncio.StreamWriter | None, text: str) -> None:
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program that does not read it
        stdin.write(text.encode())
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """All of a stream, so that its writer never blocks; kept are a little more than `MAX_OUTPUT` bytes."""
    assert stream is not None
    kept = bytearray()
    while chunk := await stream.read(2**16):
        if len(kept) <= MAX_OUTPUT:
            kept += chunk
    return bytes(kept)
