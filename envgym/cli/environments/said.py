"""What environments say, written for people."""

from __future__ import annotations

import json

from envgym.types import Message, Observation, ToolSpec


def as_lines(observation: Observation) -> list[tuple[str, str]]:
    """Who says what: role and text."""
    said = [(_who(message), message.text) for message in observation.messages]
    return [*said, *([("text", observation.text)] if observation.text is not None else [])]


def signature(tool: ToolSpec) -> str:
    """A tool as one would declare it: `search(query: string, limit: integer = 5)`."""
    required = tool.parameters.get("required", ())
    return f"{tool.name}({', '.join(_parameter(n, s, n in required) for n, s in _properties(tool).items())})"


def example_call(tool: ToolSpec) -> str:
    """How it is called by hand, with the types of its arguments in place of values."""
    required = tool.parameters.get("required", ())
    arguments = {name: f"<{_type(schema)}>" for name, schema in _properties(tool).items() if name in required}
    return f"/call {tool.name} {json.dumps(arguments)}"


def about(tool: ToolSpec) -> str:
    """The first line of its description."""
    return tool.description.strip().partition("\n")[0]


def _who(message: Message) -> str:
    return f"{message.role} {message.name}".strip() if message.role == "tool" else message.role


def _properties(tool: ToolSpec) -> dict[str, dict[str, object]]:
    return dict(tool.parameters.get("properties", {}))


def _parameter(name: str, schema: dict[str, object], is_required: bool) -> str:
    default = f" = {json.dumps(schema['default'])}" if "default" in schema else "" if is_required else " = …"
    return f"{name}: {_type(schema)}{default}"


def _type(schema: dict[str, object]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in list(schema["enum"])[:4])  # type: ignore[call-overload]
    kind = schema.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
