"""The tool-calling agent: a multi-turn agent that offers the environment's tools and reads the calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from envgym.types import Observation

from .multi_turn import MultiTurn


class ToolCalling(MultiTurn):
    """Tools are written into the prompt, and calls read from the answers, in the chat template's own format.

    The environment gets the calls in `action.tool_calls`, malformed ones with their `error`, and answers with the
    results. An environment without tools is played as the multi-turn agent plays it.
    """

    by_messages: ClassVar[Mapping[str, Any] | None] = {"name": "chat", "tools": True}

    def offered(self, observation: Observation) -> Observation:
        return observation
