"""Components whose place others take as settings are laid layer on layer: which of their settings hold for the others
too, and which are left out, and said to be."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from envgym.settings import deep_merge

from .known_settings import config_class
from .words import component_mapping


@dataclass
class Replaced:
    """The settings that a stage's components left behind when others took their places."""

    _left_out: list[tuple[str, str, str]] = field(default_factory=list)
    """Component (or `roles`), the name of the one it was for, key."""
    _roles: dict[str, str | None] = field(default_factory=dict)
    """Roles that the learner need not have, and the learner that they were set for; None: for whichever has them."""

    def replace(
        self, kind: str, old: Mapping[str, Any], new: Mapping[str, Any], roles: Collection[str]
    ) -> dict[str, Any]:
        """The settings of the component `new`, over those of `old` that hold for it too. `kind` is `env`, `agent` or
        `learner`; `roles` are those that the old learner was given.

        A setting that both have from a common base class (the learning rate of every learner) means the same to both.
        One that only has the same name may mean anything, and nothing of an environment holds for another one.
        """
        settings = {key: value for key, value in old.items() if key != "name"}
        common: Collection[str] = ()
        if kind != "env":
            before, after = config_class(kind, old["name"]), config_class(kind, new["name"])
            if settings.keys() >= before.model_fields.keys() - {"name"}:
                # A saved config, where every default is written out: those of the old one say nothing about the new.
                defaults = before.model_construct().model_dump(mode="json", warnings=False)
                settings = dict(_other_than(defaults, settings))
            common = next(c for c in before.__mro__ if issubclass(c, BaseModel) and issubclass(after, c)).model_fields
        if kind == "learner":
            self._roles = dict.fromkeys(roles, old["name"]) | self._roles
        self._left_out += [(kind, old["name"], key) for key in settings if key not in common]
        return deep_merge({key: value for key, value in settings.items() if key in common}, new)

    def give_roles(self, roles: Collection[str], *, of_model: bool) -> None:
        """Take in roles of a new layer, which are the learner's own; those `of_model` are for learners that have
        them."""
        self._roles = {role: learner for role, learner in self._roles.items() if role not in roles}
        self._roles |= dict.fromkeys(roles) if of_model else {}

    def foreign_roles(self, roles: Collection[str], known: Collection[str]) -> list[str]:
        """Those of the `roles` that were set for another learner and that the learner, with those `known`, lacks. They
        are left out."""
        foreign = [role for role in roles if role in self._roles and role not in known]
        self._left_out += [("roles", learner, role) for role in foreign if (learner := self._roles[role]) is not None]
        return foreign

    def lines(self, stage: Mapping[str, Any]) -> list[str]:
        """A line for each component that left settings behind which nothing in the `stage` has set since."""
        lost: dict[tuple[str, str], list[str]] = {}
        for kind, old, key in self._left_out:
            if key not in component_mapping(stage.get(kind, {})):
                lost.setdefault(("learner" if kind == "roles" else kind, old), []).append(f"{kind}.{key}")
        return [
            f"{kind} {component_mapping(stage[kind])['name']} does not have these settings of {old}, which are left "
            f"out: {', '.join(dict.fromkeys(keys))}"
            for (kind, old), keys in lost.items()
        ]


def _other_than(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that are not the defaults."""
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := dict(_other_than(default, value)):
                yield key, inner
        elif key not in defaults or value != default:
            yield key, value
