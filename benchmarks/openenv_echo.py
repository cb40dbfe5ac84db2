"""An environment of OpenEnv that returns the client's text, its real server, and a client for that server's protocol.

    benchmarks/.venv-openenv/bin/python benchmarks/openenv_echo.py serve PORT
    benchmarks/.venv-openenv/bin/python benchmarks/openenv_echo.py messages PORT SESSIONS SECONDS TEXT
    benchmarks/.venv-openenv/bin/python benchmarks/openenv_echo.py client PORT SESSIONS SECONDS TEXT

This is the peer's side of `remote_steps.py`. It runs in the peer's Python environment (`openenv_requirements.txt`) and
imports nothing of envgym. `client` steps as OpenEnv's users do, with its own client; `messages` sends the messages of
OpenEnv's `/ws` over `websockets` and does nothing else, so that it measures the server. Both print one JSON line: the
number of steps and their seconds.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

SESSIONS = 512


def serve(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        text: str

    class Heard(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            return Heard(text="say something", done=False, reward=None)

        def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            return Heard(text=action.text, done=False, reward=0.5)

        async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            return self.reset(seed, episode_id)

        async def step_async(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            return self.step(action)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


Step = Callable[[], Awaitable[str]]
"""Takes a step and returns the text of its observation."""


@contextlib.asynccontextmanager
async def by_messages(port: int, text: str) -> AsyncIterator[Step]:
    from websockets.asyncio.client import connect

    async with connect(f"ws://127.0.0.1:{port}/ws", compression=None) as socket:
        await socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
        assert json.loads(await socket.recv())["type"] == "observation"

        async def step() -> str:
            await socket.send(json.dumps({"type": "step", "data": {"text": text}}))
            return str(json.loads(await socket.recv())["data"]["observation"]["text"])

        yield step


@contextlib.asynccontextmanager
async def by_client(port: int, text: str) -> AsyncIterator[Step]:
    from openenv.core import GenericEnvClient

    async with GenericEnvClient(base_url=f"http://127.0.0.1:{port}") as env:
        await env.reset(seed=1)

        async def step() -> str:
            return str((await env.step({"text": text})).observation["text"])

        yield step


async def measure(
    session: Callable[[int, str], contextlib.AbstractAsyncContextManager[Step]],
    port: int,
    sessions: int,
    seconds: float,
    text: str,
) -> None:
    steps = 0
    begun = asyncio.Barrier(sessions + 1)
    over = asyncio.Event()

    async def play() -> None:
        nonlocal steps
        async with session(port, text) as step:
            await begun.wait()
            while not over.is_set():
                assert await step() == text
                steps += 1

    playing = [asyncio.create_task(play()) for _ in range(sessions)]
    await begun.wait()
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    taken, spent = steps, time.perf_counter() - began
    over.set()
    await asyncio.gather(*playing)
    print(json.dumps({"steps": taken, "seconds": spent}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        way = {"messages": by_messages, "client": by_client}[sys.argv[1]]
        asyncio.run(measure(way, int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))
