"""OpenEnv's actions and observations as the policy writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envgym.errors import ConfigError
from envgym.tools.schema import without_titles
from envgym.types import ToolSpec

ACT = "act"
"""Name of the tool whose arguments are the fields of an action."""
FINAL = "final_answer"
"""Name of the tool that takes a final text, at our servers of environments with tools."""
HIDDEN = ("done", "reward", "metadata")
"""Fields of every observation that the policy does not read."""


@dataclass(frozen=True, slots=True)
class ActionForm:
    """The form of a server's actions: a text in `field`, calls of one tool (`act`) whose arguments are the action, or
    calls of the server's own tools (MCP)."""

    field: str = ""
    is_text: bool = True
    """False if the field takes another type, as JSON."""
    act: ToolSpec | None = None

    def of_text(self, text: str) -> dict[str, Any]:
        """The action for a policy's text. A text that is no JSON is sent as it is: the server's complaint tells the
        policy."""
        try:
            return {self.field: text if self.is_text else json.loads(text)}
        except (ValueError, RecursionError):
            return {self.field: text}

    def of_call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The action for a call of a tool."""
        return dict(arguments) if self.act else {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def form_of(schema: Any, url: str) -> ActionForm:
    """The form of the actions with this JSON schema: text if one field is required, or there is only one. Raises
    `ConfigError` if the schema has no fields."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{url}/schema does not describe actions; is it an OpenEnv server?")
    fields = [name for name in properties if name != "metadata"]
    required = [name for name in schema.get("required") or fields if name != "metadata"]
    if "tool_name" in required:
        return ActionForm()
    if len(required) == 1:
        return ActionForm(required[0], dict(properties[required[0]]).get("type", "string") == "string")
    parameters = {**schema, "properties": {name: properties[name] for name in fields}}
    description = str(parameters.pop("description", "") or "Take an action.")
    return ActionForm(act=ToolSpec(ACT, description, without_titles(parameters)))


def text_of(observation: Mapping[str, Any], show: str | None) -> str:
    """An observation as the policy reads it: the part of it that `show` names (`field` or `field.key`), else the result
    of a tool, else its only field if that is a text, else its fields as JSON; without fields its metadata."""
    part: Any = observation
    if show:
        for key in show.split("."):
            part = part.get(key, "") if isinstance(part, Mapping) else ""
    elif "tool_name" in observation:
        part = observation.get("error") or observation.get("result")
        if isinstance(part, Mapping):
            texts = [str(block["text"]) for block in part.get("content") or () if "text" in block]
            part = part.get("message") or "\n".join(texts) or part.get("data")
    else:
        part = {name: value for name, value in observation.items() if name not in HIDDEN}
        part = part or observation.get("metadata") or ""
        if len(part) == 1 and isinstance(text := next(iter(part.values())), str):
            part = text
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
