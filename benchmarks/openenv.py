"""Whole episodes per second over OpenEnv's protocol: envgym's server and player against OpenEnv's own.

    .venv/bin/python benchmarks/openenv.py --openenv PYTHON [--episodes 960] [--concurrency 16] [--repeats 5]

PYTHON is the interpreter of an environment with OpenEnv, such as the one that the tests make in ~/.cache/envgym. An
episode is a reset and four steps of an environment that costs nothing. Servers and clients have a process each; all
pairs run one after the other in each turn, after a warm-up. OpenEnv's client has one connection for each concurrent
episode; envgym's player makes a new instance for each episode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from record import ROOT, conditions, conditions_in_words, publish, table

TURNS = 4
PAIRS = {
    "theirs": ("OpenEnv's server", "OpenEnv's client"),
    "our_server": ("envgym's server", "OpenEnv's client"),
    "our_player": ("OpenEnv's server", "envgym's player"),
    "both_ours": ("envgym's server", "envgym's player"),
}
GOALS = {"our_server": 1.5, "our_player": 1.0}
SIDE = ROOT / "benchmarks" / "openenv_side.py"
GAME = ROOT / "benchmarks" / "echo_game.py"
PAGE = ROOT / "docs" / "reference" / "openenv.md"


async def play(url: str, n_episodes: int, concurrency: int) -> tuple[float, float]:
    """Episodes per second of envgym's player, and its CPU milliseconds per episode."""
    import envgym
    from envgym.types import Action

    async with envgym.spec(f"openenv:{url}") as spec:
        task = await spec.tasks("train").get(0)

        async def episodes(count: int) -> None:
            for _ in range(count):
                async with spec.make() as env:
                    await env.reset(options={"task": task})
                    for turn in range(TURNS):
                        _, reward, terminated, _, _ = await env.step(Action(f"turn {turn}"))
                    assert (reward, terminated) == (1.0, True)

        await episodes(concurrency)
        start, cpu_start = time.perf_counter(), time.process_time()
        await asyncio.gather(*(episodes(n_episodes // concurrency) for _ in range(concurrency)))
        return n_episodes / (time.perf_counter() - start), 1000 * (time.process_time() - cpu_start) / n_episodes


@contextlib.contextmanager
def running(server: str, python: Path) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its URL and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = [sys.executable, "-c", "import sys; from envgym.cli import main; sys.exit(main())", "serve", GAME]
    theirs = [python, "-P", SIDE, "serve"]
    command = [*ours, "--dialect", "openenv", "--port", port] if server.startswith("envgym") else [*theirs, port]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, env=environment(server))
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, f"{server} ended"
            assert time.monotonic() < deadline, f"{server} did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def environment(side: str) -> dict[str, str]:
    """The variables of a side's process: OpenEnv's sees none of envgym's packages."""
    return {key: value for key, value in os.environ.items() if side.startswith("envgym") or key != "PYTHONPATH"}


def cpu_seconds(process: int) -> float:
    """The CPU time that a process has had."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(client: str, url: str, server: int, options: argparse.Namespace) -> dict[str, float]:
    """Episodes per second of a client at a server, and the CPU milliseconds per episode of both."""
    numbers = [str(options.episodes), str(options.concurrency)]
    ours, theirs = [sys.executable, __file__, "--play", url], [options.openenv, "-P", SIDE, "play", url]
    command = [*ours, *numbers] if client.startswith("envgym") else [*theirs, *numbers, str(TURNS)]
    start = cpu_seconds(server)
    printed = subprocess.check_output(list(map(str, command)), text=True, env=environment(client), timeout=600)
    rate, cpu = map(float, printed.split())
    n_episodes = options.episodes + options.concurrency  # with the warm-up
    return {"rate": rate, "client": cpu, "server": 1000 * (cpu_seconds(server) - start) / n_episodes}


def main() -> None:
    if sys.argv[1:2] == ["--play"]:
        print(*asyncio.run(play(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--openenv", type=Path, required=True, help="Python with OpenEnv")
    parser.add_argument("--episodes", type=int, default=960)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    where = conditions(["envgym", "aiohttp", "pydantic"])
    measured: dict[str, list[dict[str, float]]] = {pair: [] for pair in PAIRS}
    code = "from importlib.metadata import version; print([*map(version, ('openenv', 'uvicorn', 'websockets'))])"
    theirs = subprocess.check_output([options.openenv, "-c", code], text=True, env=environment("OpenEnv"))
    for turn in range(options.repeats):
        for pair, (server, client) in PAIRS.items():
            with running(server, options.openenv) as (url, process):
                measured[pair].append(measure(client, url, process, options))
            print(f"{turn + 1}: {client} at {server}: {measured[pair][-1]}", flush=True)

    versions = dict(zip(("openenv", "uvicorn", "websockets"), re.findall(r"[\d.]+", theirs), strict=True))
    job = {**vars(options), "openenv": versions, "turns": TURNS}
    result = {"conditions": where, "job": job, "measured": measured}
    publish("openenv", json.loads(json.dumps(result, default=str)), markdown(result), PAGE)


def markdown(result: dict) -> str:
    """The stored result as the text of the docs."""
    measured, job = result["measured"], result["job"]
    rows = []
    for pair, (server, client) in PAIRS.items():
        ratios = [a["rate"] / b["rate"] for a, b in zip(measured[pair], measured["theirs"], strict=True)]
        against = "1" if pair == "theirs" else f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        goal = f"{GOALS[pair]:g}" if pair in GOALS else ""
        medians = {key: median(each[key] for each in measured[pair]) for key in ("rate", "server", "client")}
        cpu = (f"{medians[key]:.2f}" for key in ("server", "client"))
        rows.append([f"{server}, {client}", f"{medians['rate']:,.0f}", against, goal, *cpu])
    header = [
        "server, client", "episodes per second", "to OpenEnv's own pair (min to max)", "goal",
        "server's CPU ms per episode", "client's",
    ]  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in job["openenv"].items())
    what = f"{job['repeats']} turns of {job['episodes']} episodes of {TURNS} steps, {job['concurrency']} at once"
    return f"{table(header, rows)}\n\n{what}. {conditions_in_words(result['conditions'])} OpenEnv's side: {versions}."


if __name__ == "__main__":
    main()
