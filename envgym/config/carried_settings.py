"""What stays of a component's settings where another one takes its place.

A setting that both have from a common base class (the learning rate of every learner, the clip range of every policy
gradient) means the same to both, and stays. One that only happens to have the same name may mean anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from envgym.agent import Agent, AgentConfig
from envgym.errors import EnvgymError
from envgym.learner import Learner, LearnerConfig


def carried(kind: str, old: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of the component `old` (its name and its settings) that hold for `name` too, and the keys of the
    others. `kind` is `env`, `agent` or `learner`. Nothing of an environment holds for another one."""
    settings = {key: value for key, value in old.items() if key != "name"}
    if kind == "env":
        return {}, list(settings)
    before, after = config_class(kind, old["name"]), config_class(kind, name)
    if settings.keys() >= before.model_fields.keys() - {"name"}:
        # A saved config, where every default is written out: those of the old one say nothing about the new one.
        settings = dict(_beyond(settings, before.model_construct().model_dump(mode="json", warnings=False)))
    bases = (base for base in before.__mro__ if issubclass(base, BaseModel) and issubclass(after, base))
    common = next(bases).model_fields
    return {k: v for k, v in settings.items() if k in common}, [key for key in settings if key not in common]


def config_class(kind: str, name: Any) -> type[BaseModel]:
    """The settings of a learner or an agent; those that all have, where there is none of that name."""
    from envgym.registry import load_component

    try:
        component: type[Learner] | type[Agent] = load_component("learner" if kind == "learner" else "agent", name)
    except EnvgymError:  # a name that is not there any more, or that a later layer replaces
        return LearnerConfig if kind == "learner" else AgentConfig
    return component.Config


def _beyond(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that are not the defaults."""
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := dict(_beyond(value, default)):
                yield key, inner
        elif key not in defaults or value != default:
            yield key, value
