"""Runs whose processes are killed at random, one after the other, and whose books must balance.

`python -m tests.kills [PART …] [--kills N] [--folder F]` kills until each part has had N kills, in `F/PART`, where it
continues after an interruption. Then the run ends, and: every step is there once; every task that was drawn is in one
group, each of whose episodes ended or failed with a kind; a deterministic run has the bytes of one that nobody killed;
no process is left. `tests/results/kills.json` has whom it killed, and the seconds until the next step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from envgym.config.resolve import resolve
from envgym.env import EnvSpec
from envgym.episodes.files import read_episodes
from tests.learned_tasks import drawn_tasks
from tests.running import is_running
from tests.weight_files import weights

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "results" / "kills.json"
ENVGYM = [sys.executable, "-c", "import sys; from envgym.cli import main; sys.exit(main())"]
TASKS, MEMBERS = 8, 2
LONGEST = 300.0
"""Seconds after which a run must have trained again."""
DIES_WITH = 20.0
"""Seconds after which no process of a run may live whose controller was killed."""
IN_A_SANDBOX = '''
import envgym
from envgym.sandbox import Limits, Sandbox

class Echo(envgym.Env):
    """Rewards an answer that a program in the sandbox prints again, by its length."""
    async def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    async def step(self, action):
        async with Sandbox(Limits(cpu_seconds=5)) as sandbox:
            program = "import time; time.sleep(0.3); print(len(input()))"
            printed = await sandbox.run(program, stdin=action.text[:20] + "\\n")
        return None, int(printed.stdout) / 20, True, False, {}
'''


@dataclass(frozen=True)
class Part:
    """A run and the processes to kill in turn. `server`: the words of `envgym serve`, whose address is URL in `env`."""

    env: str
    words: tuple[str, ...]
    victims: tuple[str, ...]
    server: tuple[str, ...] = ()
    staleness: int = 0
    is_deterministic: bool = False


GUESS = f"{ROOT / 'examples' / 'guess.py'}:Guess"
SHARDS = ("rollout.processes=2",)
PARTS = {
    "deterministic": Part(
        "math_verify", ("deterministic=true", *SHARDS),
        ("rollout-0", "controller", "rollout-1", "actor-0"), is_deterministic=True,
    ),
    "asynchronous": Part(
        "math_verify", SHARDS, ("rollout-0", "engine", "page", "rollout-1", "controller", "actor-0"), staleness=1
    ),
    "remote": Part(
        "http://URL/Guess", ("env.reconnect=60",), ("server", "server", "engine", "server", "controller"),
        server=(GUESS,), staleness=1,
    ),
    "bridged": Part(
        "openenv:http://URL", (), ("server", "server", "controller"), server=("--dialect", "openenv", GUESS)
    ),
    "sandbox": Part("echo.py:Echo", SHARDS, ("sandbox", "sandbox", "rollout-0", "controller"), staleness=1),
    "branching": Part(
        GUESS, ("deterministic=true", "rollout.branches=2", "learner.advantage=tree", *SHARDS),
        ("rollout-0", "controller", "rollout-1", "controller"), is_deterministic=True,
    ),
    "ray": Part(
        "math_verify", ("--runtime", "ray", *SHARDS), ("rollout-0", "engine", "rollout-1", "controller", "actor-0"),
        staleness=1,
    ),
}  # fmt: skip


class Soak:
    """One part in its folder."""

    def __init__(self, part: Part, folder: Path, name: str) -> None:
        self.part, self.folder, self.random = part, folder, random.Random(f"{name} {time.time()}")
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        (folder / "echo.py").write_text(IN_A_SANDBOX)
        self.log = folder / "kills.jsonl"
        self.port, self.page_port = self._port("port"), self._port("page_port")
        self.env = part.env.replace("URL", f"127.0.0.1:{self.port}")
        self.place = folder / "runs" / "killed"
        self.run: subprocess.Popen[bytes] | None = None
        self.aides: dict[str, subprocess.Popen[bytes]] = {}
        """The server and the page, which the soak starts again as an operator would."""

    def _port(self, name: str) -> int:
        """A free port that stays the same when the soak continues: the run's settings have it."""
        file = self.folder / name
        if not file.exists():
            with socket.create_server(("127.0.0.1", 0)) as listening:
                file.write_text(str(listening.getsockname()[1]))
        return int(file.read_text())

    @property
    def kills(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def step(self) -> int:
        """The last step that the run has recorded."""
        metrics = self.place / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else -1

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "output.log").open("ab") as output:
            return subprocess.Popen([*ENVGYM, *words], cwd=self.folder, stdout=output, stderr=output)

    def train_words(self, name: str) -> list[str]:
        return [
            "train", "--env", self.env, "--name", name, "steps=100000", f"rollout.tasks_per_step={TASKS}",
            f"rollout.group_size={MEMBERS}", f"rollout.max_staleness={self.part.staleness}", "eval.every=0",
            "checkpoint.every=1", "checkpoint.keep=1", "learner.warmup_steps=1", "rollout.max_tokens=16",
            *self.part.words,
        ]  # fmt: skip

    def ensure_running(self) -> subprocess.Popen[bytes]:
        """Start whatever of the run, the server and the page does not live, or resume it."""
        aides = {"server": ["serve", *self.part.server, "--port", str(self.port)]} if self.part.server else {}
        if "page" in self.part.victims:
            aides["page"] = ["view", "--port", str(self.page_port)]
        for name, words in aides.items():
            if name not in self.aides or self.aides[name].poll() is not None:
                self.aides[name] = self._start(words)
        for name in aides:
            port = self.port if name == "server" else self.page_port
            self.until(partial(listens, port), f"the {name} does not listen")
        if self.run is None or self.run.poll() is not None:
            is_new = not (self.place / "config.yaml").exists()
            self.run = self._start(self.train_words("killed") if is_new else ["train", "--resume", "killed"])
        return self.run

    def until(self, holds: Any, complaint: str, seconds: float = LONGEST) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"{complaint}; see {self.folder / 'output.log'}")
            time.sleep(0.05)

    def until_step_after(self, step: int) -> None:
        """Wait for a later step. A run that ends before, by the kill of a worker, is resumed."""
        n_resumed = 0

        def has_stepped() -> bool:
            nonlocal n_resumed
            if self.run is None or self.run.poll() is not None:
                n_resumed += 1
                assert n_resumed <= 3, f"the run ends by itself; see {self.folder / 'output.log'}"
                self.ensure_running()
            return self.step > step

        self.until(has_stepped, f"no step after {step}")

    def process(self, victim: str) -> psutil.Process | None:
        """The process of a name, if it lives."""
        assert self.run is not None
        if victim == "controller":
            return psutil.Process(self.run.pid)
        if victim in self.aides:
            return psutil.Process(self.aides[victim].pid)
        processes = psutil.Process(self.run.pid).children(recursive=True)
        if victim == "sandbox":
            processes = [each for each in processes if "jail.server" in " ".join(words_of(each))]
            return self.random.choice(processes) if processes else None
        return next((each for each in processes if output_of(each).endswith(f"/{victim}.log")), None)

    def kill(self, victim: str, *, waits: bool) -> None:
        """Kill a process, and wait for the run's next step, unless the next kill comes before."""
        run = self.ensure_running()
        if waits:
            self.until_step_after(self.step)
            time.sleep(self.random.uniform(0.0, 2.0))
        else:
            time.sleep(self.random.uniform(0.5, 6.0))
        run = self.ensure_running()
        process = self.process(victim)
        if process is None and victim == "sandbox":  # they live for a moment
            self.until(lambda: self.process(victim) is not None, "nothing runs in a sandbox")
            process = self.process(victim)
        if process is None:  # it starts again, or the run does
            victim, process = "controller", psutil.Process(run.pid)
        family = psutil.Process(run.pid).children(recursive=True)
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has ended by itself
            return self.kill(victim, waits=waits)
        began, step = time.monotonic(), self.step
        if victim == "controller" or victim.startswith("actor"):
            run.wait(60)
            self.until(lambda: not any(is_running(each.pid) for each in family), "processes are left", DIES_WITH)
        elif victim in self.aides:
            self.aides[victim].wait()
        self.ensure_running()
        if waits:
            self.until_step_after(step)
        seconds = round(time.monotonic() - began, 2) if waits else None
        with self.log.open("a") as file:
            file.write(json.dumps({"victim": victim, "step": step, "seconds": seconds}) + "\n")

    def until_killed(self, number: int) -> None:
        """Kill until there were this many kills. A fourth of them come before the run has recovered from the last."""
        try:
            while (n := len(self.kills)) < number:
                self.kill(self.part.victims[n % len(self.part.victims)], waits=n == 0 or self.random.random() < 0.75)
                print(f"{n + 1}/{number}: {self.kills[-1]}", flush=True)
        finally:
            self.end()

    def end(self) -> None:
        for process in (self.run, *self.aides.values()):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def balance(self) -> dict[str, Any]:
        """End the run, check its books, and return its figures."""
        steps = self.step + 3
        if self.part.server:
            self.aides["server"] = self._start(["serve", *self.part.server, "--port", str(self.port)])
            self.until(lambda: listens(self.port), "the server does not listen")
        try:
            ending = self._start(["train", "--resume", "killed", f"steps={steps}"])
            family = list[psutil.Process]()
            while ending.poll() is None:
                family = psutil.Process(ending.pid).children(recursive=True) or family
                time.sleep(0.2)
            assert ending.returncode == 0, f"see {self.folder / 'output.log'}"
            self.until(lambda: not any(is_running(each.pid) for each in family), "processes are left", DIES_WITH)
            books = check_books(self.place, self.env_spec(), steps=steps, staleness=self.part.staleness)
        finally:
            self.end()
        if self.part.is_deterministic:
            shutil.rmtree(self.folder / "runs" / "whole", ignore_errors=True)
            words = [*self.train_words("whole"), f"steps={steps}", "rollout.processes=0"]
            assert self._start(words).wait() == 0
            assert weights(self.place) == weights(self.folder / "runs" / "whole")
        seconds = sorted(kill["seconds"] for kill in self.kills if kill["seconds"] is not None)
        return {
            "kills": len(self.kills),
            "killed": Counter(kill["victim"] for kill in self.kills),
            "while_recovering": sum(kill["seconds"] is None for kill in self.kills),
            "seconds": {
                "median": median(seconds),
                "p90": quantiles(seconds, n=10, method="inclusive")[-1],
                "most": seconds[-1],
            },
            "same_bytes": self.part.is_deterministic,
            **books,
        }

    def env_spec(self) -> EnvSpec:
        env = str(self.folder / self.env) if self.env.startswith("echo.py") else self.env
        return resolve({"env": env}).stages[0].make_spec()


def check_books(run: Path, spec: EnvSpec, *, steps: int, staleness: int) -> dict[str, int]:
    """Check that a run of seed 0 has each of its steps once, and each task that it drew in one group, whose episodes
    ended or failed: so none is lost, and none learned twice. Returns how many."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps + 1))
    assert max(record.get("staleness/max", 0) for record in records) <= staleness
    groups: dict[str, dict[str, list[bool]]] = {}
    episodes = read_episodes(run)
    for episode in (episode for episode in episodes if not episode.parent):
        groups.setdefault(episode.task.id, {}).setdefault(episode.group_id, []).append(episode.failed)
    assert [task for task, of_task in groups.items() if len(of_task) != 1] == []
    ends = [ends for of_task in groups.values() for ends in of_task.values()]
    for failures in ends:
        n_finished = failures.count(False)
        assert n_finished == MEMBERS or (n_finished < MEMBERS and any(failures))
    order = asyncio.run(drawn_tasks(spec, TASKS * (steps + staleness + 1)))
    assert set(groups) <= set(order)
    assert set(order[: TASKS * (steps - staleness)]) <= set(groups)
    return {
        "steps": steps,
        "tasks": len(groups),
        "learned_episodes": sum(failures.count(False) for failures in ends),
        "failed_episodes": sum(failures.count(True) for failures in ends),
        "branches": sum(bool(episode.parent) for episode in episodes),
    }


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def output_of(process: psutil.Process) -> str:
    """The file that a process writes its output to; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def soak(name: str, folder: Path, number: int) -> dict[str, Any]:
    """Kill `number` times, and balance the books."""
    part = Soak(PARTS[name], folder, name)
    part.until_killed(number)
    return part.balance()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--kills", type=int, default=50, help="kills of each part")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "envgym-kills")
    options = parser.parse_args(words)
    for name in options.parts:
        print(f"## {name}", flush=True)
        figures = soak(name, options.folder.resolve() / name, options.kills)
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        STORED.write_text(json.dumps(stored | {name: figures}, indent=1) + "\n")
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
