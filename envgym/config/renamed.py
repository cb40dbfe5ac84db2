"""Settings of earlier versions: names that changed, and what saved configurations without a newer setting mean."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from envgym.errors import ConfigError, RenamedSetting

RENAMED = {
    "do": "kind",
    "rollout.tasks": "rollout.tasks_per_step",
    "learner.epochs": "learner.update_epochs",
    "learner.kl.place": "learner.kl.applied_to",
}
"""New keys of a stage by their old keys, which differ in the last part only."""
BEFORE = {"seed_scope": "task"}
"""Settings of rollouts that earlier versions lacked and behaved otherwise than by the default, with that behaviour."""
SAVED_SINCE_EVER = {"group_size", "concurrency", "retries", "refills", "max_failed_share"}
"""Settings of rollouts that every saved configuration has."""
OLD_NAMES = {new: old for old, new in RENAMED.items()}


def rename_settings(
    settings: Mapping[str, Any], names: Mapping[str, str] = RENAMED, *, warn: bool = False
) -> dict[str, Any]:
    """The settings of a run, a recipe or a stage with keys renamed by `names`. With `warn`, a `RenamedSetting` warning
    per key. Raises `ConfigError` if a setting has both names."""
    renamed: Any = settings
    for old, new in names.items():
        for prefix in ("", "stages.*.", "model_settings."):
            renamed = _rename(renamed, f"{prefix}{old}", old, new, warn)
    return dict(renamed)


def _rename(settings: Any, path: str, old: str, new: str, warn: bool) -> Any:
    """The settings, with the key at the dotted `path` renamed from `old` to `new` in its place. A `*` in the path
    stands for every item of a list or mapping."""
    key, _, subpath = path.partition(".")
    if key == "*" and isinstance(settings, list):
        return [_rename(item, subpath, old, new, warn) for item in settings]
    if not isinstance(settings, Mapping) or key not in (*settings, "*"):
        return settings
    if subpath:
        keys = settings if key == "*" else [key]
        return {**settings, **{key: _rename(settings[key], subpath, old, new, warn) for key in keys}}
    name = new.rpartition(".")[2]
    if name in settings:
        raise ConfigError(f"{old} and {new} are the same setting: leave out {old}")
    if warn:
        warnings.warn(RenamedSetting(f"{old} is now {new}"), stacklevel=1)
    return {name if item == key else item: value for item, value in settings.items()}


def with_earlier_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that an earlier version saved, with `BEFORE` where a stage lacks it. Other settings stay
    unchanged: a stage that somebody wrote lacks most settings of rollouts."""
    stages = settings.get("stages")
    if not isinstance(stages, list):
        return dict(settings)
    filled = []
    for stage in stages:
        rollout = stage.get("rollout") if isinstance(stage, Mapping) else None
        if isinstance(rollout, Mapping) and "seed_scope" not in rollout and rollout.keys() >= SAVED_SINCE_EVER:
            stage = {**stage, "rollout": {**BEFORE, **rollout}}
        filled.append(stage)
    return {**settings, "stages": filled}
