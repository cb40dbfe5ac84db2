"""Components that recipes and suites name, and that are not installed: what was taken out, or came with a package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from envgym import registry
from envgym.errors import EnvgymError, NameNotFound
from envgym.loading import names_file, offered

from .recipes import load_recipe
from .words import AUTO, COMPONENTS, component_mapping

ComponentName = tuple[str, str]
"""Kind (`env`, `agent`, `learner`) and name of a component."""


def parts_of_recipe(settings: Mapping[str, Any]) -> Iterator[ComponentName]:
    """The components that a recipe names, in its stages and in the recipes that those begin with."""
    for stage in settings.get("stages") or [{}]:
        below = load_recipe(stage["recipe"]) if "recipe" in stage else {}
        names = {
            kind: component_mapping({**settings, **below, **stage}.get(kind) or {}).get("name") for kind in COMPONENTS
        }
        yield from ((kind, name) for kind, name in names.items() if name)


def needs(parts: Iterable[ComponentName]) -> str:
    """`needs learner X, environment Y`: the parts that nothing is registered under; empty where there is none."""
    missing = [part for part in dict.fromkeys(parts) if _is_missing(*part)]
    words = [f"{'environment' if kind == 'env' else kind} {name}" for kind, name in missing]
    return f"needs {', '.join(words)}" if words else ""


def missing_part_error(name: str, parts: Iterable[ComponentName], error: NameNotFound) -> NameNotFound:
    """The error for a recipe or suite one of whose parts is missing; `error` itself where that is not why."""
    return NameNotFound(f"{name} {lacks}: {error}") if (lacks := needs(parts)) else error


def _is_missing(kind: str, name: str) -> bool:
    if name == AUTO or names_file(name) or ":" in name:
        return False
    if kind != "env":
        return name not in offered(f"envgym.{kind}s")
    try:
        registry.find(name)
    except EnvgymError as error:
        return isinstance(error, NameNotFound)
    return False
