"""An environment that returns the policy's text immediately: envgym's side of `remote_steps.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envgym.env import Env, Info, StepResult
from envgym.types import Action


class Echo(Env):
    """Never ends."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        return "say something", {}

    async def step(self, action: Action) -> StepResult:
        return action.text, 0.5, False, False, {}
