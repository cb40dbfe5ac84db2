"""NeMo-Gym's rows: what a row asks of the policy, and which tools it offers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from envgym.errors import DataError
from envgym.responses import MalformedItem, messages_of, tools_of
from envgym.types import ToolSpec

PARAMS = "responses_create_params"
OWN_ROUTES = {"seed_session", "verify", "reset", "step", "close", "close_session", "aggregate_metrics"}
"""Routes of a server that are its own, never a tool's."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


def form(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row as tasks are read from it: its prompt is what the request's parameters say.

    Raises `DataError` for a row that is none of NeMo-Gym's, or that offers tools that cannot be called.
    """
    params = row.get(PARAMS)
    if not isinstance(params, Mapping) or "input" not in params:
        raise DataError(f"{where}: not a row of NeMo-Gym: {PARAMS}.input is missing")
    try:
        messages = messages_of(params["input"], params.get("instructions"))
        tools = tools_of(params.get("tools"))
    except MalformedItem as error:
        raise DataError(f"{where}: {PARAMS}: {error}") from None
    for tool in tools:
        if not _NAME.fullmatch(tool.name) or tool.name in OWN_ROUTES:
            raise DataError(f"{where}: {tool.name!r:.80} is no name of a tool: calls of it would go to another route")
    return {**row, "prompt": list(messages)}


def tools(row: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """The tools that a row, which `form` has found good, offers."""
    return tools_of(row[PARAMS].get("tools"))


def offered(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same as the row has them, with what a `Response` must say of each."""
    return [{"strict": None, "parameters": None, **tool} for tool in row[PARAMS].get("tools") or ()]
