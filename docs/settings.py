"""Write `reference/settings.md`: every setting with its type, its default and its meaning, from the code.

python docs/settings.py
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from envgym.agent import AgentConfig
from envgym.config.known_settings import Setting, other_names, settings_of
from envgym.config.schema import Component, RunConfig, StageConfig
from envgym.env import EnvConfig
from envgym.env.rewards import RewardConfig
from envgym.learner import LearnerConfig
from envgym.registry import load_component, load_env_class
from envgym.remote.client import RemoteConfig
from envgym.tasks import DataConfig

PAGE = Path(__file__).parent / "reference" / "settings.md"
HEAD = """# Settings

Every setting by its key: a word of the command line (`learner.lr=1e-4`), a nested key of a YAML file, or a key in
Python. `envgym config` prints what a run would have. Names in brackets are what other programs call a setting: envgym
does not take them, but suggests the setting. Written by `python docs/settings.py` from the code.
"""


def page() -> str:
    """The text of the page."""
    parts = [
        HEAD,
        section("The run", RunConfig),
        section("A stage", StageConfig),
        section("Data", DataConfig, "data.", "Of environments that take their tasks from data."),
        section("Every learner", LearnerConfig, "learner."),
    ]
    parts += [
        additions("learner", f"`{name}`", load_component("learner", name).Config, LearnerConfig)
        for name in names("learners")
    ]
    parts += [section("Every environment", EnvConfig, "env.")]
    for name in names("envs"):
        cls = load_env_class(next(iter(entry_points(group="envgym.envs", name=name))).value)
        parts.append(
            additions(
                "env", f"`{name}`", getattr(getattr(cls, "env_class", None), "Config", None) or cls.Config, EnvConfig
            )
        )
    parts += [
        additions("env", "of a reward function", RewardConfig, EnvConfig),
        additions("env", "at a URL", RemoteConfig, EnvConfig),
    ]
    for scheme in sorted({*names("schemes")} - {"http", "https"}):
        [entry] = entry_points(group="envgym.schemes", name=scheme)
        cls = load_env_class(entry.value)
        parts.append(additions("env", f"at `{scheme}:{cls.address}`", cls.Config, EnvConfig))
    parts += [
        additions("agent", f"`{name}`", load_component("agent", name).Config, AgentConfig) for name in names("agents")
    ]
    return "\n".join(part for part in parts if part)


def names(group: str) -> list[str]:
    """The names of the parts that ship with envgym."""
    entries = entry_points(group=f"envgym.{group}")
    return sorted(entry.name for entry in entries if entry.value.startswith("envgym."))


def additions(kind: str, name: str, config: type[BaseModel], base: type[BaseModel]) -> str:
    """The settings that one component has in addition to those of all its kind, or with other defaults."""
    common = {setting.key: described(setting) for setting in settings_of(base, f"{kind}.")}
    rows = [setting for setting in settings_of(config, f"{kind}.") if not setting.key.startswith("env.data.")]
    rows = [setting for setting in rows if common.get(setting.key) != described(setting)]
    kinds = {"env": "Environment", "agent": "Agent", "learner": "Learner"}
    return table(f"{kinds[kind]} {name}", rows) if rows else ""


def section(title: str, model: type[BaseModel], prefix: str = "", about: str = "") -> str:
    """A model's settings under a heading."""
    return table(title, [setting for setting in settings_of(model, prefix) if setting.key != "stages"], about)


def table(title: str, rows: list[Setting], about: str = "") -> str:
    lines = [
        f"## {title}\n",
        *([f"{about}\n"] if about else []),
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in described(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def described(setting: Setting) -> tuple[str, str, str, str]:
    """Key, type, default and meaning."""
    field = setting.field
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        default = getattr(default, "name", None) or default.model_dump(mode="json", exclude_defaults=True)
    shown = "required" if default is PydanticUndefined else f"`{written(default)}`"
    names = ", ".join(f"`{name}`" for name in other_names().get(setting.key, []))
    return (
        f"`{setting.key}`",
        f"`{type_of(field.annotation)}`",
        shown,
        meaning(setting) + (f" ({names})" if names else ""),
    )


def written(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", r"\n") or '""'


def type_of(annotation: Any) -> str:
    """A type as readers know it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Component:
        return "name and settings"
    if origin is Annotated:
        return type_of(inner[0])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " | ".join(type_of(part) for part in inner)
    if inner:
        return f"{origin.__name__}[{', '.join('…' if part is ... else type_of(part) for part in inner)}]"
    return "none" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))


def meaning(setting: Setting) -> str:
    """The docstring under the setting, of the nearest class that has one."""
    name = setting.key.rpartition(".")[2]
    for cls in setting.owner.__mro__:
        if issubclass(cls, BaseModel) and cls is not BaseModel and name in (texts := docstrings(cls)):
            return " ".join(texts[name].split())
    return ""


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Names and docstrings of the fields that a class defines."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if documented and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            texts[statement.target.id] = str(following.value.value)
    return texts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
