"""Any environment as a synchronous `gymnasium.Env` whose observations and actions are text."""

from __future__ import annotations

import asyncio
import string
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from . import registry
from .errors import needs
from .types import Action, Observation, observed_messages
from .types.messages import joined_text

with needs("gymnasium", "gymnasium", "the Gymnasium view of an environment"):
    import gymnasium
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

T = TypeVar("T")

MAX_OBSERVATION = 2**20
MAX_ACTION = 2**16


class AnyText(spaces.Text):  # type: ignore[misc]
    """All text up to a length in characters. Samples are of printable ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class GymnasiumView(gymnasium.Env[str, str]):  # type: ignore[misc]
    """The environment `env` (an id, file, import path or URL; see `registry.spec`) with `settings`, for Gymnasium.

    An observation is the texts of the environment's messages, joined by newlines; an action is the policy's text. A
    reward of None is 0. The first reset sets the environment up, and `close` releases it. The environment runs on an
    event loop in a separate thread, so the view also works inside a running loop.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, env: str, *, render_mode: str | None = None, **settings: Any) -> None:
        self.render_mode = render_mode
        self.observation_space = AnyText(MAX_OBSERVATION)
        self.action_space = AnyText(MAX_ACTION)
        self.spec = GymnasiumSpec(
            "envgym/GymnasiumView-v0", f"{__name__}:{type(self).__name__}", kwargs={"env": env, **settings}
        )
        self._conversation: list[str] = []
        self._env = registry.make(env, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"view of {env}", daemon=True)
        self._thread.start()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        # In Gymnasium a seeded reset determines later ones too, so their seeds are drawn from its generator.
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        observation, info = self._run(self._env.reset(seed=seed, options=options))
        self._conversation = [_render(observation)]
        return _text(observation), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._run(self._env.step(Action(action)))
        self._conversation += [f"assistant: {action}", _render(observation)]
        return _text(observation), reward or 0.0, terminated, truncated, info

    def render(self) -> Any:
        """The conversation so far with `render_mode="ansi"`, else None."""
        return "\n".join(line for line in self._conversation if line) if self.render_mode == "ansi" else None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._run(self._env.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _text(observation: Observation) -> str:
    return joined_text(observed_messages(observation))


def _render(observation: Observation) -> str:
    return "\n".join(f"{message.role}: {message.printed}" for message in observed_messages(observation))
