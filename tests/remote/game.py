"""A small game of many turns with state and chance, to be served; run as a script it serves itself.

python game.py CLASS [key=value …]    prints the URL, then a line for each environment closed

`CLASS` may also be `FILE.py:CLASS`, of another file beside this one.

A key `limit.NAME` is a limit of the server, `tokens` its file of tokens, `port` its port (any).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult, TaskList, TaskSet
from envgym.errors import DataError, InvalidOutcome
from envgym.registry import spec as make_spec
from envgym.types import Action, Episode, Message, Observation, Reward, Task


class Guess(Env):
    """Guess a number drawn from the instance's generator; some words make it misbehave."""

    spec: GuessSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        assert options is not None
        self.task: Task = options["task"]
        if options.get("refuse"):
            raise RuntimeError("the dice are gone")
        self.secret = self.rng.randrange(self.task.fields["range"])
        self.turns = 0
        observation = Observation(
            (Message("system", "Guess."), Message("user", f"0 to {self.task.fields['range']}?")),
            sampling={"max_tokens": 8},
        )
        return observation, {"seed": seed, "luck": self.rng.random()}

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        match action.text:
            case "hang":
                print("hanging", flush=True)
                await asyncio.Event().wait()
            case "doze":
                print("dozing", flush=True)
                await asyncio.sleep(0.5)
            case "meet":
                await self.spec.barrier.wait()
            case "raise":
                raise KeyError("no such card")
            case "bad reward":
                return "?", float("nan"), False, False, {}
            case "odd info":
                info = {"set": {1}, "metrics": {"ok": 1.0, "bad": float("inf")}, "pair": (1, "x"), 3: 4}
                return "odd", None, False, False, info
            case "set":
                return Observation(text="x", sampling={"stop": {1, 2}}), None, False, False, {}
        right = action.text == str(self.secret)
        info = {"turns": self.turns, "tokens": list(action.token_ids), "luck": self.rng.random(), "score": float(right)}
        said = f"turn {self.turns}: {'right' if right else 'wrong'} – {self.secret}"
        return [Message("user", said)], float(right), right, self.turns >= 4, info

    async def close(self) -> None:
        await asyncio.sleep(self.spec.config.close_seconds)
        print("closed", flush=True)


class GuessSpec(EnvSpec):
    env_class = Guess

    class Config(EnvConfig):
        n: int = 250
        meeting: int = 100
        close_seconds: float = 0.0

    config: Config

    async def setup(self) -> None:
        self.barrier = asyncio.Barrier(self.config.meeting)

    async def teardown(self) -> None:
        print("torn down", flush=True)

    def tasks(self, split: str) -> TaskSet:
        if split == "test":
            raise DataError("held_out.jsonl: no such file")
        prompt = (Message("user", "guess"),)
        return TaskList([Task(f"t{i}", prompt, i, {"range": 10 + i}, difficulty=i / 10) for i in range(self.config.n)])


class ShiftedSpec(GuessSpec):
    """As many tasks, and others."""

    def tasks(self, split: str) -> TaskSet:
        super().tasks(split)
        return TaskList([Task(f"t{i}", (Message("user", f"guess {i}"),)) for i in range(self.config.n)])


class RankedSpec(GuessSpec):
    """Episodes of a task are ranked by their reward; one without cannot be judged."""

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        print("judged", flush=True)
        if task.id == "raise":
            raise KeyError("no judge")
        ranked = sorted(episode.reward for episode in episodes if episode.reward is not None)
        return [
            InvalidOutcome("judge", "the judge is out", retryable=True)
            if episode.reward is None
            else Reward(ranked.index(episode.reward) / len(episodes), metrics={"turns": len(episode.rows)})
            for episode in episodes
        ]


class Dice(Env):
    """Makes its problem from the seed, and has no end of them."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        return f"seed {seed}, {self.rng.random()}", {}

    async def step(self, action: Action) -> StepResult:
        return None, self.rng.random(), True, False, {}


async def main() -> None:
    from envgym.remote.admission import ServerLimits
    from envgym.remote.server import serve

    settings = dict(word.split("=", 1) for word in sys.argv[2:])
    limits = {key.removeprefix("limit."): float(settings.pop(key)) for key in list(settings) if key[:6] == "limit."}
    tokens, port = settings.pop("tokens", None), int(settings.pop("port", "0"))
    file, _, name = sys.argv[1].rpartition(":")
    await serve(
        {"game": make_spec(f"{Path(__file__).with_name(file) if file else __file__}:{name}", **settings)},
        "127.0.0.1",
        port,
        on_ready=lambda url: print(url, flush=True),
        limits=ServerLimits(**{"drain_seconds": 0.5, **limits}),
        token_file=None if tokens is None else Path(tokens),
    )


if __name__ == "__main__":
    asyncio.run(main())
