"""Components that recipes and suites name but that are not installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from envgym import registry
from envgym.errors import EnvgymError, NameNotFound
from envgym.loading import entry_points, is_file_target
from envgym.tasks.named_sets import is_task_set_file

from .recipes import load_recipe
from .words import AUTO, COMPONENTS, component_mapping

ComponentName = tuple[str, str]
"""Kind (`env`, `agent`, `learner`) and name of a component."""


def parts_of_recipe(settings: Mapping[str, Any]) -> Iterator[ComponentName]:
    """The components that a recipe names, in its stages and in the recipes that its stages name."""
    for stage in settings.get("stages") or [{}]:
        base = load_recipe(stage["recipe"]) if "recipe" in stage else {}
        merged = {**settings, **base, **stage}
        names = {kind: component_mapping(merged.get(kind) or {}).get("name") for kind in COMPONENTS}
        yield from ((kind, name) for kind, name in names.items() if name)


def describe_missing(parts: Iterable[ComponentName]) -> str:
    """`needs learner X, environment Y`: the parts that are not installed; empty if all are."""
    missing = [part for part in dict.fromkeys(parts) if _is_missing(*part)]
    words = [f"{'environment' if kind == 'env' else kind} {name}" for kind, name in missing]
    return f"needs {', '.join(words)}" if words else ""


def missing_part_error(name: str, parts: Iterable[ComponentName], error: NameNotFound) -> NameNotFound:
    """The error for a recipe or suite with a missing part; `error` itself if no part is missing."""
    return NameNotFound(f"{name} {lacks}: {error}") if (lacks := describe_missing(parts)) else error


def _is_missing(kind: str, name: str) -> bool:
    if name == AUTO or is_file_target(name) or ":" in name or (kind == "env" and is_task_set_file(name)):
        return False
    if kind != "env":
        return name not in entry_points(f"envgym.{kind}s")
    try:
        registry.find(name)
    except EnvgymError as error:
        return isinstance(error, NameNotFound)
    return False
