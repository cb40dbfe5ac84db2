"""Small environments on OpenEnv's own SDK, served by it: `python peers.py NAME PORT CAPACITY [NAME PORT CAPACITY …]`.

Run by the interpreter of a virtual environment with the packages of requirements.txt, never by the tests' own. Each
instance, reset, step and close appends a line to the file `PEER_LOG`, so that tests count the steps that were taken.
"""

import asyncio
import json
import os
import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    Observation,
    State,
    create_app,
)
from openenv.core.env_server.mcp_environment import MCPEnvironment


def log(kind: str, episode: str, value: Any) -> None:
    with open(os.environ["PEER_LOG"], "a") as file:
        file.write(json.dumps([kind, episode, value]) + "\n")


class Peer(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

        log("open", "", type(self).__name__)

    def close(self) -> None:
        log("close", self._state.episode_id or "", type(self).__name__)

    def begin(self, seed: int | None, episode_id: str | None, **extras: Any) -> random.Random:
        self._state = State(episode_id=episode_id or "", step_count=0)
        log("reset", episode_id or "", [seed, extras])
        return random.Random(seed)

    def count(self, value: Any) -> int:
        self._state.step_count += 1
        log("step", self._state.episode_id or "", value)
        return self._state.step_count

    @property
    def state(self) -> State:
        return self._state


class TextAction(Action):
    message: str


class TextObservation(Observation):
    reply: str = ""


class Text(Peer):
    """Say the word that the observation names; three turns, a reward each. `fail` raises."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **extras: Any) -> TextObservation:
        self._rng = self.begin(seed, episode_id, **extras)
        return TextObservation(reply=self._ask(), reward=0.5, done=False)

    def _ask(self) -> str:
        self._word = self._rng.choice(["alder", "birch", "cedar", "dogwood"])
        return f"Say {self._word}."

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        turn = self.count(action.message)
        if "fail" in action.message:
            raise RuntimeError("the environment failed")
        reward = float(self._word in action.message) - 0.25 * turn
        metadata = {"turn": turn, "word": self._word}
        return TextObservation(reply=self._ask(), reward=reward, done=turn == 3, metadata=metadata)


class IntegerAction(Action):
    move: int


class Grid(Observation):
    row: int = 0
    walls: tuple[int, ...] = ()


class Integer(Peer):
    """Reach 3 from 0 by moves; the policy sees two fields, and the reward comes at the end."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **extras: Any) -> Grid:
        self.begin(seed, episode_id, **extras)
        self._row = 0
        return Grid(row=0, walls=(4,), metadata={"size": 4})

    def step(self, action: IntegerAction, timeout_s: float | None = None, **_: Any) -> Grid:
        turn = self.count(action.move)
        self._row += action.move
        done = self._row == 3 or turn == 4
        return Grid(row=self._row, walls=(4,), reward=float(self._row == 3) if done else None, done=done)


class Silent(Text):
    """Ends without a reward."""

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        self.count(action.message)
        return TextObservation(reply="over", reward=None, done=True)


class PairAction(Action):
    side: str
    amount: int


class Pair(Peer):
    """An action of two fields, which a policy gives as a call."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **extras: Any) -> TextObservation:
        self.begin(seed, episode_id, **extras)
        return TextObservation(reply="Put 2 on the left.")

    def step(self, action: PairAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        self.count([action.side, action.amount])
        return TextObservation(reply="done", reward=float((action.side, action.amount) == ("left", 2)), done=True)


class Tools(MCPEnvironment):
    """Tools; `answer` ends the episode with its reward, which only `step` returns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tools")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        def answer(value: int) -> str:
            """Give the answer."""
            return "thank you"

        super().__init__(mcp)
        self._state = State(episode_id="", step_count=0)
        log("open", "", "Tools")

    def close(self) -> None:
        super().close()
        log("close", self._state.episode_id or "", "Tools")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **extras: Any) -> Observation:
        rng = random.Random(seed)
        self._sum = rng.randrange(10) + 10
        self._state = State(episode_id=episode_id or "", step_count=0)
        log("reset", episode_id or "", [seed, extras])
        return Observation(done=False, reward=0.0, metadata={"question": f"Add 10 and {self._sum - 10}."})

    async def step_async(self, action: Action, timeout_s: float | None = None, **extras: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **extras)
        if isinstance(action, CallToolAction):
            self._state.step_count += 1
            log("step", self._state.episode_id or "", [action.tool_name, action.arguments])
            if action.tool_name == "answer" and isinstance(observation, CallToolObservation):
                observation.reward = float(action.arguments.get("value") == self._sum)
                observation.done = True
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return self._state


PEERS = {
    "text": (Text, TextAction, TextObservation),
    "integer": (Integer, IntegerAction, Grid),
    "silent": (Silent, TextAction, TextObservation),
    "pair": (Pair, PairAction, TextObservation),
    "tools": (Tools, CallToolAction, CallToolObservation),
}


async def main(words: list[str]) -> None:
    servers = []
    for name, port, capacity in zip(words[::3], words[1::3], words[2::3], strict=True):
        app = create_app(*PEERS[name], env_name=name, max_concurrent_envs=int(capacity))
        servers.append(uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=int(port), log_level="warning")))
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
