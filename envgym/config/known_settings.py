"""Every setting by its key, and suggestions for unknown keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from envgym.agent import Agent, AgentConfig
from envgym.errors import EnvgymError, UnknownKey
from envgym.learner import Learner, LearnerConfig
from envgym.registry import load_component
from envgym.tasks import DataConfig
from envgym.yaml_files import read_yaml

from .schema import RoleConfig, RunConfig, StageConfig
from .words import AUTO, COMPONENTS, component_mapping, merge, parse_overrides


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted key, the class that defines it, and its pydantic field."""

    key: str
    owner: type[BaseModel]
    field: FieldInfo


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """The settings of a class and of the classes nested in it, in order. In the keys, NAME stands for any key of a
    mapping of such classes."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, is_mapping = _model_within(field.annotation)
        if inner is None:
            yield Setting(key, model, field)
        else:
            yield from settings_of(inner, f"{key}.NAME." if is_mapping else f"{key}.")


def _model_within(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The settings class that a field holds (or None), and whether the field is a mapping of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (None if annotation.model_config.get("extra") == "allow" else annotation), False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is dict:
        return _model_within(parts[1])[0], True
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 1:
        return _model_within(parts[0])
    return None, False


def parse_words(words: Sequence[str], components: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `key=value` words, of which those that are text take it as it is. `components` are the names of
    the run's environment and learner that options give."""
    stage = merge(components, parse_overrides(words))
    if not any(word.startswith("env.") for word in words):
        stage.pop("env", None)  # it need not be loaded
    settings = [setting for prefix, model in _models_of(stage) for setting in settings_of(model, prefix)]

    def takes_text(key: str, value: Any) -> bool:
        key = re.sub(r"^stages\.[^.]+\.", "", key)
        for setting in settings:
            if re.fullmatch(re.escape(setting.key).replace("NAME", "[^.]+"), key):
                annotation = setting.field.annotation
                kinds = {*get_args(annotation)} if get_origin(annotation) in (Union, UnionType) else {annotation}
                is_rows = isinstance(value, list) and key in ("data.path", "data.test_path")
                return kinds - {NoneType} == {str} and not is_rows and (value is not None or NoneType not in kinds)
        return False

    return parse_overrides(words, takes_text)


@cache
def other_names() -> dict[str, list[str]]:
    """Other programs' names for a setting, by its key."""
    return read_yaml(Path(__file__).with_name("other_names.yaml"))


def similar_keys(key: str, known_keys: Sequence[str], *, has_neighbor: bool = False) -> list[str]:
    """The `known_keys` that an unknown key most likely stands for, 3 at most: settings with this name in other
    programs, then keys with the same last part, unless it is spelled like a neighbor in its own group."""
    group, _, last_part = key.replace("-", "_").lower().rpartition(".")
    groups = {name.rpartition(".")[0] for name in known_keys}
    choices = groups.union(known_keys, StageConfig.model_fields)
    synonyms = [name for name, aliases in other_names().items() if last_part in aliases and name in choices]
    namesakes = [name for name in known_keys if name.rpartition(".")[2] == last_part and name != key]
    if group.startswith("roles."):  # a role overrides settings of these groups
        namesakes = [f"{group}.{name}" for name in namesakes if name.partition(".")[0] in RoleConfig.model_fields]
    elif has_neighbor:
        namesakes = []
    if group in groups - {""}:  # the same word in another group's subgroup, or for a kind of thing, means another thing
        namesakes = [name for name in namesakes if name.startswith(f"{group}.") or name.count(".") < 2]
        namesakes = [] if last_part in ("kind", "name") else namesakes
    return list(dict.fromkeys([*synonyms, *namesakes]))[:3]


def with_suggestion(error: UnknownKey, stage: Mapping[str, Any]) -> UnknownKey:
    """The error for an unknown key, with suggestions from the settings of a run with this stage: first keys with the
    same last part elsewhere, then similarly spelled siblings."""
    if error.key == "data":  # known to every environment that takes data
        hint = " It takes no data (an Env class does with spec_class = envgym.DataEnvSpec)."
        return UnknownKey(error.message, error.key, hint, error.names)
    keys = known_keys(stage)
    scope = error.message.partition(" ")[0].replace("environment", "env")  # within a component the key is its own
    group, dot, name = (f"{scope}.{error.key}" if scope in COMPONENTS else error.key).rpartition(".")
    suggestions = similar_keys(f"{group}{dot}{name}", keys, has_neighbor=bool(error.hint))
    if not suggestions and not error.hint:
        for match in get_close_matches(name, [key.rpartition(".")[2] for key in keys], 1, 0.7):
            suggestions = similar_keys(f"{group}{dot}{match}", keys)
    hint = f" Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else error.hint
    return UnknownKey(error.message, error.key, hint, error.names)


def known_keys(stage: Mapping[str, Any]) -> list[str]:
    """The keys of every setting of a run with this stage, as users write them, without those below a NAME."""
    keys = (setting.key for prefix, model in _models_of(stage) for setting in settings_of(model, prefix))
    return [key for key in keys if ".NAME." not in key and not key.startswith("env.data.")]  # written data.…


def _models_of(stage: Mapping[str, Any]) -> list[tuple[str, type[BaseModel]]]:
    """The settings classes of a run with this stage, with the prefixes of their keys."""
    names = {kind: component_mapping(stage.get(kind) or {}).get("name") for kind in COMPONENTS}
    data: dict[str, Any] = {"data": stage["data"]} if stage.get("data") else {}
    try:  # a remote environment would have to be asked, so it is skipped
        spec = None if "://" in str(names["env"]) else StageConfig(env=names["env"], learner="", **data).make_spec()
    except (EnvgymError, ValidationError):  # reported when the environment is created
        spec = None
    agent = spec.agent if spec and names["agent"] == AUTO else names["agent"] or ""
    return [
        ("", RunConfig),
        ("learner.", config_class("learner", names["learner"] or "")),
        ("", StageConfig),
        ("data.", DataConfig),
        ("agent.", config_class("agent", agent)),
        *([] if spec is None else [("env.", type(spec.config))]),
    ]


def config_class(kind: str, name: Any) -> type[BaseModel]:
    """The settings class of a learner or an agent; the base class if nothing has that name, or it is not text."""
    base = LearnerConfig if kind == "learner" else AgentConfig
    if not isinstance(name, str):  # reported when the stage is validated
        return base
    try:
        component: type[Learner] | type[Agent] = load_component("learner" if kind == "learner" else "agent", name)
    except EnvgymError:  # removed since, or replaced by a later layer
        return base
    return component.Config
