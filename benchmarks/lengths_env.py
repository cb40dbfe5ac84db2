"""An environment with completions of the lengths in a file: envgym's side of the second job of `against_trl.py`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.types import Action, Observation, as_messages


class LengthsConfig(DataEnvConfig):
    """Settings of the environment with set lengths."""

    lengths: Path
    """JSON list: the token limit of each completion, in the order in which episodes begin."""


class Lengths(Env):
    """One turn with the next length of the list; the reward is a number from 0 to 1 derived from the text."""

    spec: LengthsSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        messages = as_messages(self.task.prompt)
        return Observation(messages, sampling={"max_tokens": next(self.spec.lengths)}), {}

    async def step(self, action: Action) -> StepResult:
        return (), zlib.crc32(action.text.encode()) / 2**32, True, False, {}


class LengthsSpec(DataEnvSpec):
    """The tasks, and the lengths not used yet."""

    env_class = Lengths
    Config = LengthsConfig
    config: LengthsConfig

    async def setup(self) -> None:
        await super().setup()
        self.lengths = iter(json.loads(self.config.lengths.read_text()))
