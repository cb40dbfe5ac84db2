"""Settings resolved: from their layers to the complete configuration of a run.

Later layers win: the recipe, the model's own settings, what the recipe says of one stage in particular, a config file,
the caller's own settings (`key=value` words or Python).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from envgym.errors import ConfigError, DroppedSettings, NameNotFound, UnknownKey, did_you_mean
from envgym.learner import RoleSpec
from envgym.run_folder import run_of_checkpoint, stage_name
from envgym.settings import validated
from envgym.yaml_files import read_yaml

from .checks import complete_stage
from .known_settings import config_class, with_suggestion
from .missing import parts_of_recipe, refusal
from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE, OF_NEW_MODEL, load_recipe, makes_model
from .schema import STAGE, RunConfig, StageConfig
from .words import AUTO, COMPONENTS, changes_name, lay, merge, merge_stage, name_alone


def resolve(
    settings: Mapping[str, Any] | None = None, *, recipe: str | None = None, file: str | Path | None = None
) -> RunConfig:
    """The complete configuration of a run, every name in it looked up and every component's settings checked.

    `settings` are the caller's own (from `key=value` words or Python) and win over `file`, which wins over the
    recipe. Raises `ConfigError`, `NameNotFound` or `DataError` in one line.
    """
    own = dict(settings or {})
    from_file = read_yaml(Path(file)) if file is not None else {}
    given = own.get("recipe") or recipe
    recipe = given or from_file.get("recipe") or DEFAULT_RECIPE
    layers, of_model = [from_file, own], None
    if misplaced := [key for key in OF_NEW_MODEL if key in from_file or key in own]:
        raise ConfigError(f"{misplaced[0]} belongs in the file of a recipe, which makes the model of --model FILE.yaml")
    if isinstance(from_file.get("stages"), list):  # a saved config holds everything: nothing may add to it
        if given not in (None, from_file.get("recipe")):
            raise ConfigError(f"{file} holds all settings of its stages: leave out recipe {given}, or the file")
    else:
        of_recipe = load_recipe(recipe)
        _check_recipe(of_recipe, recipe)
        if "new_model" in of_recipe:
            of_recipe.setdefault("model", recipe)
        model = next((layer["model"] for layer in (own, from_file, of_recipe) if "model" in layer), DEFAULT_MODEL)
        of_stages = {"stages": of_recipe.pop("stages", [])}
        engine = merge(from_file, own).get("engine")
        # What an API calls its model says nothing of a model of that name here.
        is_api = isinstance(engine, Mapping) and engine.get("kind") == "openai"
        of_model = {} if is_api else settings_of_model(model)
        layers = [of_recipe, of_model, of_stages, *layers]

    run_keys = set(RunConfig.model_fields) - {"stages"}
    run: dict[str, Any] = {"recipe": recipe}
    layered = [_Layered()]
    for layer in layers:
        run |= {key: value for key, value in layer.items() if key in run_keys and key != "recipe"}
        common = {k: v for k, v in layer.items() if k not in run_keys | {"stages", *OF_NEW_MODEL}}
        may_be_saved = (layer is from_file or layer is own) and isinstance(layer.get("stages"), list)
        each = stages_of(layer.get("stages"), layered) or [{}] * len(layered)
        layered += [copy.deepcopy(layered[0]) for _ in range(len(each) - len(layered))]
        del layered[len(each) :]
        for stage_layers, of in zip(layered, each, strict=True):
            stage_layers.lay(common, of_model=layer is of_model)
            if may_be_saved and of.get("epochs") is not None:
                of = {**of, "steps": None}  # which an earlier version wrote down beside it
            stage_layers.lay(of)
            stage_layers.own_model = of.get("model", stage_layers.own_model)
    stages = [stage_layers.settings for stage_layers in layered]
    if len(stages) > 1:
        _name_stages(layered)
    known = set(StageConfig.model_fields)
    try:
        for number, stage in enumerate(stages, 1):  # one by one, so that messages name the keys as users write them
            if unknown := [key for key in stage if key not in known]:
                near = did_you_mean(unknown[0], known | run_keys)
                raise UnknownKey(f"unknown key {unknown[0]!r}", str(unknown[0]), near, known | run_keys)
            if "env" not in stage:
                raise ConfigError("which environment? Give one with --env (see: envgym envs list)")
            checked = validated(StageConfig, stage, f"stage {number}" if len(stages) > 1 else "")
            learner_class, learner_config = checked.learner_config()
            layered[number - 1].drop_roles(learner_class(learner_config).roles)
        config = validated(RunConfig, {**run, "stages": stages})
        for stage_config in config.stages:
            complete_stage(stage_config)
            if config.deterministic and stage_config.rollout.max_staleness:
                raise ConfigError("a deterministic run has no episodes in play while it learns: max_staleness=0")
    except UnknownKey as error:
        raise with_suggestion(error, stages[0]) from None
    except NameNotFound as error:
        named = set() if isinstance(from_file.get("stages"), list) else set(parts_of_recipe(load_recipe(recipe)))
        raise refusal(f"recipe {recipe}", named.intersection(parts_of_recipe({"stages": stages})), error) from None
    for line in dict.fromkeys(line for stage_layers in layered for line in stage_layers.left_out()):
        warnings.warn(DroppedSettings(line), stacklevel=2)
    return config


def _check_recipe(of_recipe: Mapping[str, Any], recipe: str) -> None:
    """Refuse keys of a recipe that nothing would use."""
    if "recipe" in of_recipe and "stages" not in of_recipe:
        raise ConfigError(f"recipe {recipe} names another recipe, below which its settings lie only as a --config file")
    if "model_settings" in of_recipe and "new_model" not in of_recipe:
        raise ConfigError(f"recipe {recipe}: model_settings are of the model that new_model makes, and it has none")


@dataclass
class _Layered:
    """The settings of one stage, laid layer on layer, and what of them is left out: settings of a component whose place
    another one took."""

    settings: dict[str, Any] = field(default_factory=lambda: {"agent": AUTO})
    _left_out: list[tuple[str, str, str]] = field(default_factory=list)
    """Component, the name of the one it was for, key."""
    own_model: Any = None
    """The model that was given for this stage in particular, which what holds for all stages does not change."""
    _roles: dict[str, str | None] = field(default_factory=dict)
    """Roles that the learner need not have, and the learner that they were set for; None: for whichever has them."""

    @property
    def name(self) -> str:
        learner = name_alone(self.settings.get("learner", {})).get("name", "")
        return stage_name(self.settings.get("name"), str(learner))

    def lay(self, over: Mapping[str, Any], *, of_model: bool = False) -> None:
        """Lay one more layer on. `of_model`: its roles are for learners that have them, and its steps for runs that
        are counted in steps."""
        if of_model and self.settings.get("epochs") is not None:
            over = {key: value for key, value in over.items() if key != "steps"}
        merged = merge_stage(self.settings, over)
        for kind in COMPONENTS:
            old, new = name_alone(self.settings.get(kind, {})), name_alone(over.get(kind, {}))
            if changes_name(old, new):
                kept, left_out = carried(kind, old, new["name"])
                merged[kind] = lay(kept, new)
                self._left_out += [(kind, old["name"], key) for key in left_out]
                if kind == "learner":
                    self._roles = dict.fromkeys(self.settings.get("roles", {}), old["name"]) | self._roles
        given = over.get("roles", {})
        if isinstance(given, Mapping):
            self._roles = {role: whose for role, whose in self._roles.items() if role not in given}
            self._roles |= dict.fromkeys(given) if of_model else {}
        self.settings = merged

    def drop_roles(self, known: Mapping[str, RoleSpec]) -> None:
        """Leave out the roles that were set for another learner and that the learner, with those `known`, lacks."""
        foreign = [role for role in self.settings.get("roles", {}) if role in self._roles and role not in known]
        if foreign:
            roles = self.settings["roles"].items()
            self.settings["roles"] = {role: settings for role, settings in roles if role not in foreign}
        self._left_out += [("roles", whose, role) for role in foreign if (whose := self._roles[role]) is not None]

    def left_out(self) -> list[str]:
        """A line for each component that left settings behind which nothing has set since."""
        lost: dict[tuple[str, str], list[str]] = {}
        for kind, old, key in self._left_out:
            if key not in name_alone(self.settings.get(kind, {})):
                lost.setdefault(("learner" if kind == "roles" else kind, old), []).append(f"{kind}.{key}")
        return [
            f"{kind} {name_alone(self.settings[kind])['name']} does not have these settings of {old}, which are left "
            f"out: {', '.join(dict.fromkeys(keys))}"
            for (kind, old), keys in lost.items()
        ]


def stages_of(value: Any, layered: Sequence[_Layered]) -> list[dict[str, Any]]:
    """The stages of a layer, each as often as it says (`repeat`), with the settings of its `recipe` below its own; or
    settings of stages that the layers before name."""
    if isinstance(value, Mapping):
        names = [stage_layers.name for stage_layers in layered]
        if unknown := [name for name in value if name not in names]:
            raise ConfigError(f"stages.{unknown[0]}: there is no such stage.{did_you_mean(str(unknown[0]), names)}")
        if wrong := [name for name, own in value.items() if not isinstance(own, Mapping)]:
            raise ConfigError(f"key 'stages.{wrong[0]}' holds keys of its own (stages.{wrong[0]}.…)")
        return [dict(value.get(name, {})) for name in names]
    if value is not None and not (isinstance(value, list) and all(isinstance(stage, Mapping) for stage in value)):
        raise ConfigError("key 'stages' is a list of settings, one for each stage")
    stages = []
    for stage in value or ():
        own = {key: item for key, item in stage.items() if key not in ("recipe", "repeat")}
        if "recipe" in stage:
            recipe = load_recipe(str(stage["recipe"]))
            if "stages" in recipe or "new_model" in recipe:
                raise ConfigError(f"stages: recipe {stage['recipe']} is a run by itself, and no stage of another")
            own = merge_stage(recipe, own)
        repeat = stage.get("repeat", 1)
        if type(repeat) is not int or repeat < 1:
            raise ConfigError(f"stages: repeat is a number of times, 1 or more, not {repeat!r:.60}")
        for number in range(1, repeat + 1):
            stages.append(copy.deepcopy(own))
            if repeat > 1 and "name" in own:
                stages[-1]["name"] = f"{own['name']}-{number}"
    return stages


def _name_stages(layered: Sequence[_Layered]) -> None:
    """Check what stages are called and refer to, and let each begin with the model that the last one before it left,
    unless it has one of its own."""
    known: list[str] = []
    trained: str | None = None
    for number, stage_layers in enumerate(layered, 1):
        stage = stage_layers.settings
        if stage_layers.own_model is not None:
            stage["model"] = stage_layers.own_model
        elif trained is not None:
            stage["model"] = f"{STAGE}{trained}"
        for name in _references(stage):
            if name not in known:
                raise ConfigError(f"stage {number}: there is no stage {name!r} before it.{did_you_mean(name, known)}")
        name = stage_layers.name
        if name in known:
            name = stage["name"] = f"{name}-{number}"
        known.append(name)
        trained = name if stage.get("do", "train") == "train" else trained


def _references(value: Any) -> Iterator[str]:
    """The stages whose results a value uses."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, str) and value.startswith(STAGE):
        yield value.removeprefix(STAGE)


def carried(kind: str, old: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of the component `old` (its name and its settings) that hold for the component `name` too, and the
    keys of the others. `kind` is `env`, `agent` or `learner`.

    A setting that both have from a common base class (the learning rate of every learner) means the same to both. One
    that only has the same name may mean anything, and nothing of an environment holds for another one.
    """
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


def _beyond(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that are not the defaults."""
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := dict(_beyond(value, default)):
                yield key, inner
        elif key not in defaults or value != default:
            yield key, value


def settings_of_model(model: Any) -> dict[str, Any]:
    """Settings that a run on `model` starts from: those of the recipe that makes it, or, for the folder of a run or of
    one of its checkpoints, how that run rendered and sampled."""
    if isinstance(model, str) and makes_model(model):
        settings: dict[str, Any] = load_recipe(model).get("model_settings", {})
        return settings
    run, index = run_of_checkpoint(Path(str(model))) or (Path(str(model)), -1)
    saved = run / "config.yaml"
    if not saved.is_file() or not (stages := read_yaml(saved).get("stages")):
        return {}
    stage = stages[index if index < len(stages) else -1]
    return {
        "render": stage["render"],
        "engine": {"max_model_len": stage["engine"]["max_model_len"]},
        "rollout": {"max_tokens": stage["rollout"]["max_tokens"]},
    }
