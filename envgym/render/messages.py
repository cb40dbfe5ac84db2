"""For engines that take messages as they are."""

from __future__ import annotations

from typing import NoReturn

from envgym.errors import ConfigError
from envgym.types import Observation

from .renderer import Renderer


class NoRenderer(Renderer):
    """Stands where an agent has its renderer: there are no tokens, and nothing to render them with."""

    def __init__(self) -> None:
        self.stop_token_ids = ()

    def dialogue(self) -> NoReturn:
        raise ConfigError("this agent renders tokens, which an API as the engine (engine.kind=openai) does not take")

    def _open(self, observation: Observation) -> NoReturn:
        self.dialogue()
