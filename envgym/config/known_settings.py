"""Every setting by its key; an unknown key is refused with a suggestion of those it was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from envgym.agent import Agent, AgentConfig
from envgym.errors import EnvgymError, UnknownKey
from envgym.learner import Learner, LearnerConfig
from envgym.registry import load_component
from envgym.tasks import DataConfig
from envgym.yaml_files import read_yaml

from .schema import RunConfig, StageConfig
from .words import AUTO, COMPONENTS, component_mapping


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted key, the model that has it, and what pydantic knows of it."""

    key: str
    owner: type[BaseModel]
    field: FieldInfo


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """The settings of a model and of the models within it, in order. What a mapping holds has a name in capitals."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, named = _model_within(field.annotation)
        if inner is None:
            yield Setting(key, model, field)
        else:
            yield from settings_of(inner, f"{key}.NAME." if named else f"{key}.")


def _model_within(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, if it does, and whether it holds several by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (None if annotation.model_config.get("extra") == "allow" else annotation), False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is dict:
        return _model_within(parts[1])[0], True
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 1:
        return _model_within(parts[0])
    return None, False


@cache
def other_names() -> dict[str, list[str]]:
    """Names that other programs have for a setting, by its key."""
    return read_yaml(Path(__file__).with_name("other_names.yaml"))


def similar_keys(key: str, known: Sequence[str]) -> list[str]:
    """Those of the `known` keys that an unknown one was probably meant to be: other programs' names for them, then
    those that end alike."""
    last = key.rpartition(".")[2].replace("-", "_").lower()
    others = [name for name, other in other_names().items() if last in other and name in known]
    return list(dict.fromkeys([*others, *(name for name in known if name.rpartition(".")[2] == last)]))[:3]


def with_suggestion(error: UnknownKey, stage: Mapping[str, Any]) -> UnknownKey:
    """The refusal of an unknown key, with the settings of a run with this stage that it was probably meant to be; those
    of the same name elsewhere go before those of nearly that name beside it."""
    if error.key == "data":  # which every environment that takes data knows
        return UnknownKey(error.message, error.key, " It takes no data.", error.known)
    known = known_keys(stage)
    names = similar_keys(error.key, known)
    if not names and not error.near:
        near = get_close_matches(error.key.rpartition(".")[2], [key.rpartition(".")[2] for key in known], 1, 0.7)
        names = [key for key in known if key.rpartition(".")[2] in near][:3]
    hint = f" Did you mean {' or '.join(map(repr, names))}?" if names else error.near
    return UnknownKey(error.message, error.key, hint, error.known)


def known_keys(stage: Mapping[str, Any]) -> list[str]:
    """The keys of every setting of a run with this stage, as users write them. Those of things that have names of
    their own are left out."""
    names = {kind: component_mapping(stage.get(kind) or {}).get("name") for kind in COMPONENTS}
    data: dict[str, Any] = {"data": stage["data"]} if stage.get("data") else {}
    try:  # not of one that is elsewhere, which would have to be asked
        spec = None if "://" in str(names["env"]) else StageConfig(env=names["env"], learner="", **data).make_spec()
    except (EnvgymError, ValidationError):  # what it lacks is said where it is needed
        spec = None
    agent = spec.agent if spec and names["agent"] == AUTO else names["agent"] or ""
    models: list[tuple[str, type[BaseModel]]] = [
        ("", RunConfig),
        ("learner.", config_class("learner", names["learner"] or "")),
        ("", StageConfig),
        ("data.", DataConfig),
        ("agent.", config_class("agent", agent)),
        *([] if spec is None else [("env.", type(spec.config))]),
    ]
    keys = (setting.key for prefix, model in models for setting in settings_of(model, prefix))
    return [key for key in keys if ".NAME." not in key and not key.startswith("env.data.")]  # which is written data.…


def config_class(kind: str, name: Any) -> type[BaseModel]:
    """The settings of a learner or an agent; those that all have, where there is none of that name."""
    try:
        component: type[Learner] | type[Agent] = load_component("learner" if kind == "learner" else "agent", name)
    except EnvgymError:  # a name that is not there any more, or that a later layer replaces
        return LearnerConfig if kind == "learner" else AgentConfig
    return component.Config
