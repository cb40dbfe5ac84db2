"""The external agent: runs a program that was not written for envgym, and trains the policy that it calls.

The program sends requests of OpenAI's chat completions or responses, or of Anthropic's messages, to its own base URL.
The policy answers each request, recorded with the exact tokens of prompt and answer; the program's output is the
action.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes import family
from envgym.render import Renderer
from envgym.render.renderer import sampling_of
from envgym.types import Action, Episode, Message, Observation, Outcome, StopReason, Task
from envgym.types.images import image_url

from .conversation import Conversation
from .endpoint import Endpoint, PolicyAddress

PASSED_VARIABLES = (
    "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
)  # fmt: skip
"""Environment variables that every program inherits, besides `LC_*`. Others may hold secrets."""
MAX_OUTPUT = 2**20
"""Maximum bytes of a program's output; more ends it and fails the episode."""
END_SECONDS = 10.0
"""Seconds a killed program may take to end."""


def passed_environment(names: Sequence[str]) -> dict[str, str]:
    """The environment of a program: `PASSED_VARIABLES`, and those that the user names."""
    passed = {*PASSED_VARIABLES, *names}
    return {name: value for name, value in os.environ.items() if name in passed or name.startswith("LC_")}


class ExternalConfig(AgentConfig):
    """Settings of the external agent."""

    command: str | list[str] = Field(min_length=1)
    """The program: a command line, or its words. It finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, in
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` or, with a key of its own, in `ENVGYM_SESSION_URL`, and the first
    observation on standard input, `{"messages": [...], "tools": [...], "task": {"id": ..., "fields": {...}}}` with data
    URIs for images; its output is the action."""
    task_fields: tuple[str, ...] = ()
    """Names of the task's fields to pass to the program, null if a task lacks one. It does not see the others, which
    may hold the tests or a solution."""
    environ: tuple[str, ...] = ()
    """Names of additional environment variables to pass to the program. It does not see the trainer's other variables,
    which may hold secrets."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample per episode; then the endpoint rejects requests, and the episode is truncated."""
    timeout: float = Field(240.0, gt=0)
    """Seconds the program may take for an episode; then it is killed and the episode fails (`agent`)."""


class External(Agent):
    """Runs the program once per episode. Training needs no change to the program but its base URL.

    The program's output is the action. The policy's answers are the episode's turns; the last turn gets the
    environment's reward. Sub-agents, rewritten histories and parallel calls form separate rows.
    """

    Config: ClassVar[type[AgentConfig]] = ExternalConfig
    steps_are_turns = False
    config: ExternalConfig

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        super().__init__(renderer, config)
        self._endpoint = Endpoint()
        command = self.config.command
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        if not self._command:
            raise ConfigError("agent.command is empty: set the program to run")
        for name in self.config.environ:
            if name not in os.environ:
                raise ConfigError(f"agent.environ names {name}, which is not set: export it, or remove it")

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        observation, _ = await env.reset(seed=seed, options={"task": task})
        sampling = sampling_of(observation, self.renderer)
        conversation = Conversation(self.renderer, sampler, sampling, self.config.max_tokens, env.spec)
        async with self._endpoint.session(conversation) as access:
            text = (await self._answer(observation, task, access)).rstrip("\n")
        conversation.check_turns(self._command[0])
        token_ids = conversation.token_ids_of(text)
        stop_reason = conversation.turns[-1].stop_reason if token_ids else StopReason.STOP
        last, reward, terminated, truncated, info = await env.step(Action(text, token_ids, (), stop_reason))
        messages = [*conversation.messages, *last.messages]
        return conversation.episode(task, Outcome.from_step(terminated, truncated), reward, info, messages)

    async def _answer(self, observation: Observation, task: Task, access: PolicyAddress) -> str:
        """The program's output. Raises `InvalidOutcome` if the program cannot be run, fails or does not end."""
        messages = observation.messages or (Message("user", observation.text or ""),)
        observed = {
            "messages": [message.as_dict(image=image_url) for message in messages],
            "tools": [tool.as_dict() for tool in observation.tools],
            "task": {"id": task.id, "fields": {name: task.fields.get(name) for name in self.config.task_fields}},
        }
        payload = json.dumps(observed, default=str)
        environ = passed_environment(self.config.environ)
        base_url = access.base_url
        environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": access.key, "OPENAI_API_BASE": base_url}
        environ |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": access.key}
        environ |= {"ENVGYM_SESSION": access.ticket, "ENVGYM_SESSION_URL": access.session_url}
        program, command, pipe = self._command[0], family.guard_command(self._command), asyncio.subprocess.PIPE
        if shutil.which(program) is None:
            raise InvalidOutcome("agent", f"{program} cannot be run: No such file or directory")
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True
            )
        except OSError as error:
            raise InvalidOutcome("agent", f"{program} cannot be run: {error.strerror}") from None
        reading = [asyncio.create_task(_read(process.stdout, process.pid)), asyncio.create_task(_read(process.stderr))]
        ending = [*reading, asyncio.create_task(process.wait())]
        try:
            async with asyncio.timeout(self.config.timeout):
                await _write(process.stdin, payload)
                await asyncio.wait(ending)
        except TimeoutError:
            message = f"{program} took longer than {self.config.timeout:g} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        finally:
            family.end_guarded(process.pid)
            # Its output is read meanwhile: a full pipe would keep asyncio from noticing the end.
            await asyncio.wait(ending, timeout=END_SECONDS)
        output, errors = (task.result() for task in reading)
        if len(output) > MAX_OUTPUT:
            raise InvalidOutcome("agent", f"{program} printed more than {MAX_OUTPUT} bytes")
        if status := process.returncode:
            text = errors.removeprefix(f"{process.pid}\n".encode()).decode(errors="replace")  # the guard's line
            text = text.replace(access.key, "…")  # of a URL that it was given
            last = text.strip().splitlines()[-1:] or ["no error output"]
            raise InvalidOutcome("agent", f"{program} ended with status {status}: {last[0]:.200}")
        return output.decode(errors="replace")


async def _write(stdin: asyncio.StreamWriter | None, text: str) -> None:
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program that does not read it
        stdin.write(text.encode())
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read(stream: asyncio.StreamReader | None, excess_ends: int | None = None) -> bytes:
    """Read a stream to its end, so that its writer never blocks; return little more than `MAX_OUTPUT` bytes of it. More
    ends the program of process id `excess_ends`, if given."""
    assert stream is not None
    data = bytearray()
    while chunk := await stream.read(2**16):
        if len(data) <= MAX_OUTPUT:
            data += chunk
        elif excess_ends is not None:
            family.end_guarded(excess_ends)
    return bytes(data)
