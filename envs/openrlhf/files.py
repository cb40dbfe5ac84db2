"""Recognition of files written for OpenRLHF, by their definitions and without importing them.

Such files import torch and may load a model when they are imported. They run in processes of their own, so this one
need not import them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from envgym.env import EnvSpec

from . import AgentFile, RewardFile

EXECUTOR, INSTANCE, FUNCTION = "AgentExecutor", "AgentInstance", "reward_func"
PARAMETERS = ("queries", "prompts", "labels")


def environment_of(path: Path, name: str) -> type[EnvSpec] | None:
    """The environment of the file at `path`; None where it is no such file, or one that knows envgym.

    `name` is the reward function or executor that the user wrote behind the file, if any.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # importing it will name the problem
    if any(_imports_envgym(node) for node in ast.walk(tree)):
        return None
    defined = {defined: node for node in _top_level(tree.body) for defined in _names(node)}
    if name:
        is_function = isinstance(defined.get(name), ast.FunctionDef | ast.AsyncFunctionDef)
        is_agent = isinstance(defined.get(name), ast.ClassDef) and name != INSTANCE and INSTANCE in defined
        is_reward = (name == FUNCTION and name in defined) or (
            is_function and _parameters(defined[name])[:3] == PARAMETERS
        )
    else:
        is_agent = EXECUTOR in defined or INSTANCE in defined
        is_reward = FUNCTION in defined
        name = EXECUTOR if is_agent else FUNCTION
    if is_agent:
        return AgentFile.for_file(path, name, ast.get_docstring(tree))
    return RewardFile.for_file(path, name, ast.get_docstring(tree)) if is_reward else None


def _imports_envgym(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "envgym" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "envgym"


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import, those in `if` and `try` included."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
