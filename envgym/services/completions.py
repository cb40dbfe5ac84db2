"""What every user of an OpenAI-compatible API needs: its form of messages and answers, and its key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from envgym.errors import ConfigError
from envgym.types import Message


def api_key(variable: str, api: str) -> str:
    """The key that the environment variable holds; empty where none is named. Raises `ConfigError` where it is not
    set; `api` says in the message whose key it is."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{api}: the environment variable {variable}, which should hold its API key, is not set")
    return key


def api_form(message: Message) -> dict[str, Any]:
    """A message as the API takes it, which wants the arguments of tool calls as text."""
    result = message.as_dict()
    for call in result.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return result


def with_extra(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A request's body with fields added or replaced; null takes one out."""
    return {name: value for name, value in {**body, **extra}.items() if value is not None}


def first_choice(answer: Any) -> Mapping[str, Any] | None:
    """The first choice of an answer, which then has a `message`; None where there is none."""
    try:
        choice = answer["choices"][0]
        return choice if isinstance(choice["message"], dict) else None
    except (KeyError, IndexError, TypeError):
        return None


def usage_of(answer: Mapping[str, Any]) -> dict[str, int | None]:
    """`prompt_tokens` and `completion_tokens`; None for what the API does not say, or is no number of tokens."""
    usage = answer.get("usage")
    counts = {
        name: usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
    }
    return {name: count if type(count) is int and 0 <= count < 2**31 else None for name, count in counts.items()}
