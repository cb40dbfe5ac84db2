"""Settings of components that a later layer replaces: some are shared with the new component, the others are dropped
with a note."""

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
    """The dropped settings of a stage's replaced components."""

    _dropped: list[tuple[str, str, str]] = field(default_factory=list)
    """(kind of component or `roles`, name of the replaced component, key)."""
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    """The model's settings for learners, which may be dropped without a note."""
    _roles: dict[str, str | None] = field(default_factory=dict)
    """Roles that the final learner may lack, by the learner that they were set for; None: for any that has them."""

    def replace(
        self, kind: str, old: Mapping[str, Any], new: Mapping[str, Any], roles: Collection[str]
    ) -> dict[str, Any]:
        """The settings of the component `new`, and those of `old` that it shares. `kind` is `env`, `agent` or
        `learner`; `roles` are the old learner's role settings.

        Two components share the settings of their common base class, such as every learner's learning rate. Settings
        that only have the same name may differ in meaning. Environments share nothing.
        """
        settings = {key: value for key, value in old.items() if key != "name"}
        common: Collection[str] = ()
        if kind != "env":
            old_class, new_class = config_class(kind, old["name"]), config_class(kind, new["name"])
            if settings.keys() >= old_class.model_fields.keys() - {"name"}:
                # A saved config holds every default; the old component's defaults are not meant for the new one.
                defaults = old_class.model_construct().model_dump(mode="json", warnings=False)
                settings = dict(_without_defaults(defaults, settings))
            bases = (base for base in old_class.__mro__ if issubclass(base, BaseModel) and issubclass(new_class, base))
            common = next(bases).model_fields
        if kind == "learner":
            self._roles = dict.fromkeys(roles, old["name"]) | self._roles
        remaining = self.without_model_settings(settings, common) if kind == "learner" else settings
        self._dropped += [(kind, old["name"], key) for key in remaining if key not in common]
        return deep_merge({key: value for key, value in settings.items() if key in common}, new)

    def without_model_settings(self, settings: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
        """A learner's settings without those that only the model sets, and the learner has no fields for."""
        return {
            key: value for key, value in settings.items() if key in fields or value != self.model_settings.get(key, ...)
        }

    def add_roles(self, roles: Collection[str], *, of_model: bool) -> None:
        """Record the roles of a new layer, which the learner must have unless they are a model's (`of_model`)."""
        self._roles = {role: learner for role, learner in self._roles.items() if role not in roles}
        self._roles |= dict.fromkeys(roles) if of_model else {}

    def drop_roles(self, roles: Collection[str], learner_roles: Collection[str]) -> list[str]:
        """Drop the `roles` that were set for another learner and are not among the `learner_roles`, and return them."""
        dropped = [role for role in roles if role in self._roles and role not in learner_roles]
        self._dropped += [("roles", learner, role) for role in dropped if (learner := self._roles[role]) is not None]
        return dropped

    def notes(self, stage: Mapping[str, Any]) -> list[str]:
        """A note for each replaced component with dropped settings that the `stage` does not set otherwise."""
        dropped: dict[tuple[str, str], list[str]] = {}
        for kind, old, key in self._dropped:
            if key not in component_mapping(stage.get(kind, {})):
                dropped.setdefault(("learner" if kind == "roles" else kind, old), []).append(f"{kind}.{key}")
        return [
            f"{kind} {component_mapping(stage[kind])['name']} does not have these settings of {old}, which are "
            f"dropped: {', '.join(dict.fromkeys(keys))}"
            for (kind, old), keys in dropped.items()
        ]


def _without_defaults(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that differ from the defaults."""
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := dict(_without_defaults(default, value)):
                yield key, inner
        elif key not in defaults or value != default:
            yield key, value
