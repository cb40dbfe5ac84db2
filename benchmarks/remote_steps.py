"""Env steps per second of a served environment, compared with a bare HTTP server and with OpenEnv's server.

    .venv/bin/python benchmarks/remote_steps.py [--seconds 10] [--repeats 3]

Every side runs 32 concurrent sessions of an environment that returns the client's text, with a server in one process
and the client in another. Each session has one call in flight, and sends the next one after the response.

- a bare server of aiohttp that sends back the request's body, called by aiohttp with the bodies that envgym sends;
- envgym's server over HTTP, called in the same way: one request per step;
- envgym as users run it: `env.step` of the remote environment;
- OpenEnv as users run it: `env.step` of its own client (`openenv_echo.py`, in the environment of
  `openenv_requirements.txt`), and its server alone, called over its WebSocket by a client that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from aiohttp import web
from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

from envgym.remote.client import RemoteEnvSpec
from envgym.remote.encoding import encode
from envgym.remote.wire import Opening, Step
from envgym.types import Action

OPENENV_PYTHON = ROOT / "benchmarks" / ".venv-openenv" / "bin" / "python"
ENVGYM = Path(sys.executable).with_name("envgym")
SESSIONS = 32
TEXT = "the quick brown fox jumps over the lazy dog. " * 4
START_SECONDS = 60
SIDES = {
    "echo": "a bare aiohttp server that sends the body back",
    "http": "envgym's server, a request for each step",
    "envgym": "envgym, `env.step`",
    "openenv": "OpenEnv, `env.step` of its own client",
    "openenv_server": "OpenEnv's server, a message for each step",
}
GOALS = (
    ("http", "echo", 0.5),
    ("envgym", "openenv", 1.0),
    ("envgym", "openenv_server", 1.0),
)
"""Goals: the least ratio of one side's rate to another's."""

Act = Callable[[], Awaitable[int]]
"""Runs some steps and returns their number."""


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[None]:
    """A server process that listens on `port`, for as long as the context lasts."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            give_up_at = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > give_up_at:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not serve:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def rate(acts: list[Act], options: argparse.Namespace) -> float:
    """Steps per second while every one of `acts` is repeated, after a warm-up."""
    steps = 0
    over = False

    async def again(act: Act) -> None:
        nonlocal steps
        while not over:
            taken = await act()  # `steps += await …` would add to what it was before
            steps += taken

    working = [asyncio.create_task(again(act)) for act in acts]
    await asyncio.sleep(options.warmup)
    before, began = steps, time.perf_counter()
    await asyncio.sleep(options.seconds)
    result = (steps - before) / (time.perf_counter() - began)
    over = True
    await asyncio.gather(*working)
    return result


async def echo_rate(url: str, options: argparse.Namespace) -> float:
    body = encode(Step(step_id=0, action=Action(TEXT)))
    kind = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=kind) as http:

        async def post() -> int:
            async with http.post(url, data=body) as response:
                assert await response.read() == body
            return 1

        return await rate([post] * options.sessions, options)


async def http_rate(url: str, options: argparse.Namespace) -> float:
    kind = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=kind) as http:

        async def ask(path: str, body: bytes) -> bytes:
            async with http.post(url + path, data=body) as response:
                assert response.status == 200
                return await response.read()

        def steps(name: str) -> Act:
            numbers = itertools.count()

            async def step() -> int:
                body = encode(Step(step_id=next(numbers), action=Action(TEXT)))
                assert TEXT.encode() in await ask(f"/v1/sessions/{name}/step", body)
                return 1

            return step

        names = [f"s{number}" for number in range(options.sessions)]
        for name in names:
            await ask("/v1/sessions", encode(Opening(session_id=name, seed=1)))
        return await rate([steps(name) for name in names], options)


async def envgym_rate(url: str, options: argparse.Namespace) -> float:
    async with RemoteEnvSpec(url) as spec:
        envs = [spec.make() for _ in range(options.sessions)]
        for env in envs:
            await env.reset(seed=1)

        def steps(env: Any) -> Act:
            async def step() -> int:
                observation, reward, *_ = await env.step(Action(TEXT))
                assert (observation.text, reward) == (TEXT, 0.5)
                return 1

            return step

        try:
            return await rate([steps(env) for env in envs], options)
        finally:
            for env in envs:
                await env.close()


def openenv_rate(way: str, port: int, options: argparse.Namespace) -> float:
    def run(seconds: float) -> float:
        words = [way, str(port), str(options.sessions), str(seconds), TEXT]
        command = [str(OPENENV_PYTHON), str(ROOT / "benchmarks" / "openenv_echo.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=True)
        said = json.loads(done.stdout)
        return float(said["steps"] / said["seconds"])

    run(options.warmup)
    return run(options.seconds)


def measure(side: str, options: argparse.Namespace) -> float:
    """The rate of one side, with a fresh server."""
    options = argparse.Namespace(**{**vars(options), "sessions": SESSIONS})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ours = [str(ENVGYM), "serve", f"{ROOT / 'benchmarks' / 'echo_env.py'}:Echo", "--port", str(port)]
    theirs = [str(OPENENV_PYTHON), str(ROOT / "benchmarks" / "openenv_echo.py"), "serve", str(port)]
    bare = [sys.executable, __file__, "--echo", str(port)]
    with server({"echo": bare, "openenv": theirs, "openenv_server": theirs}.get(side, ours), port):
        if side in ("openenv", "openenv_server"):
            return openenv_rate("client" if side == "openenv" else "messages", port, options)
        work = {"echo": echo_rate, "http": http_rate, "envgym": envgym_rate}[side]
        return asyncio.run(work(url, options))


def serve_echo(port: int) -> None:
    async def echo(request: web.BaseRequest) -> web.Response:
        return web.Response(body=await request.read(), content_type="application/json")

    async def main() -> None:
        runner = web.ServerRunner(web.Server(echo))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()

    asyncio.run(main())


def openenv_versions() -> dict[str, str]:
    if not OPENENV_PYTHON.exists():
        head = "the head of benchmarks/openenv_requirements.txt says how to make it"
        raise SystemExit(f"{OPENENV_PYTHON} is missing: {head}")
    names = ["openenv", "fastapi", "uvicorn", "websockets"]
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([OPENENV_PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs: the rates, their ratios and the conditions."""
    turns = result["turns"]
    rates = [[what, f"{median(turn[side] for turn in turns):,.0f}"] for side, what in SIDES.items()]
    ratios = []
    for one, other, goal in GOALS:
        found = [turn[one] / turn[other] for turn in turns]
        spread = f"{min(found):.2f} to {max(found):.2f}"
        ratios.append([f"{SIDES[one]} / {SIDES[other]}", f"{median(found):.2f}", spread, f"{goal:g}"])
    job = result["job"]
    peer = ", ".join(f"{name} {number}" for name, number in result["openenv_versions"].items())
    return "\n\n".join(
        [
            table(["side", "steps per second"], rates),
            table(["ratio", "median", "min to max", "goal"], ratios),
            f"{job['repeats']} turns of {job['seconds']:g} s. "
            f"{conditions_in_words(result['conditions'])} OpenEnv's side: {peer}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each side is measured")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before that")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all sides")
    parser.add_argument("--echo", type=int, metavar="PORT", help=argparse.SUPPRESS)  # the bare server's process
    options = parser.parse_args()
    if options.echo is not None:
        return serve_echo(options.echo)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server in progress is ended too
    peer_versions = openenv_versions()
    where = conditions(["envgym", "aiohttp", "pydantic"])
    turns = []
    for _ in range(options.repeats):
        turns.append({side: measure(side, options) for side in SIDES})
        print(", ".join(f"{side} {found:,.0f}/s" for side, found in turns[-1].items()), flush=True)
    job = {"text_characters": len(TEXT), **vars(options)}
    result = {"conditions": where, "openenv_versions": peer_versions, "job": job, "turns": turns}
    path = store("remote_steps", result)
    text = markdown(result)
    fill_docs("remote_steps", text)
    print(f"\n{text}\n\nstored in {path}")


if __name__ == "__main__":
    main()
