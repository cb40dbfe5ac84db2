"""Resolution of a run's complete configuration from layers of settings.

Later layers win: the recipe, the model's settings, the recipe's stages, a config file, the caller's settings
(`key=value` words or Python).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from envgym.errors import ConfigError, DroppedSettings, UnknownKey, did_you_mean
from envgym.render import RenderConfig
from envgym.run_folder import run_of_checkpoint, stage_name
from envgym.settings import deep_merge, leaves, validate_settings
from envgym.yaml_files import read_yaml

from .checks import complete_stage
from .known_settings import config_class, with_suggestion
from .learning_rate import default_rate, size_of
from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE, OF_NEW_MODEL, load_recipe, makes_model, rates_of_recipe
from .schema import STAGE, RunConfig, StageConfig
from .words import AUTO, COMPONENTS, changes_name, component_mapping, expand_keys, merge, merge_stage, without_warmup

RUN_KEYS = set(RunConfig.model_fields) - {"stages"}


class Layer(NamedTuple):
    """Settings of a run; `of_model`: the defaults for its model."""

    settings: Mapping[str, Any]
    of_model: bool = False


def resolve(
    settings: Mapping[str, Any] | None = None,
    *,
    recipe: str | None = None,
    file: str | Path | None = None,
    samples_only: bool = False,
) -> RunConfig:
    """The complete configuration of a run, with every name looked up and every component's settings checked.

    The caller's `settings` (from `key=value` words or Python) win over `file`, which wins over the recipe. With
    `samples_only` they are for an evaluation or a rollout, which may be greedy, and of whose stages only the last runs.
    Raises `ConfigError`, `NameNotFound` or `DataError`.
    """
    overrides = expand_keys(settings or {})
    from_file = expand_keys(read_yaml(Path(file))) if file is not None else {}
    chosen_recipe = overrides.get("recipe") or recipe
    recipe = chosen_recipe or from_file.get("recipe") or DEFAULT_RECIPE
    if not isinstance(recipe, str):
        raise ConfigError(f"key 'recipe': must be text, got {recipe!r:.60}: a recipe's name, or the path of its file")
    if misplaced := [key for key in OF_NEW_MODEL if key in from_file or key in overrides]:
        raise ConfigError(f"{misplaced[0]} belongs in the file of a recipe, which makes the model of --model FILE.yaml")
    is_saved = isinstance(from_file.get("stages"), list)  # a saved config is complete: no layer lies below it
    if is_saved and chosen_recipe not in (None, from_file.get("recipe")):
        raise ConfigError(f"{file} holds all settings of its stages: leave out recipe {chosen_recipe}, or the file")
    layers = [] if is_saved else _recipe_layers(recipe, from_file, overrides)
    layers += [Layer(from_file), Layer(overrides)]
    run = {key: value for layer in layers for key, value in layer.settings.items() if key in RUN_KEYS}
    stages = _merge_layers(layers)
    try:
        config = _validate({**run, "recipe": recipe}, stages, samples_only)
    except UnknownKey as error:
        raise with_suggestion(error, stages[0].settings) from None
    if samples_only and (last := config.stages[-1]).model.startswith(STAGE):  # the earlier stages do not run
        last.model = overrides.get("model", last.model)
    return config


def _recipe_layers(recipe: str, from_file: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Layer]:
    """The layers below the caller's: the recipe, the model's settings, the recipe's stages."""
    recipe_settings = load_recipe(recipe)
    if "recipe" in recipe_settings and "stages" not in recipe_settings:
        raise ConfigError(f"recipe {recipe} names another recipe, as only a --config file may: give it as --config")
    if "model_settings" in recipe_settings and "new_model" not in recipe_settings:
        raise ConfigError(f"recipe {recipe}: model_settings belong to the model that new_model makes, and it has none")
    if "new_model" in recipe_settings:
        recipe_settings.setdefault("model", recipe)
    model = {"model": DEFAULT_MODEL, **recipe_settings, **from_file, **overrides}["model"]
    caller = merge(merge({}, from_file), overrides)  # which checks the components of both
    engine = component_mapping(caller.get("engine"), "kind")
    # An API's model is not the local model of that name.
    is_api = isinstance(engine, Mapping) and engine.get("kind") == "openai"
    model_settings, stages = {} if is_api else settings_of_model(model), {"stages": recipe_settings.pop("stages", [])}
    learner = component_mapping(caller.get("learner", {})).get("name")
    rates = rates_of_recipe(recipe, None if recipe == DEFAULT_RECIPE else learner)  # those serve all its relatives
    if rates and not is_api and (billions := size_of(model)):
        lora = caller.get("lora")
        is_lora = isinstance(lora, Mapping) and bool(lora.get("rank"))
        model_settings = {**model_settings, "learner": {"lr": default_rate(billions, lora=is_lora, kind=rates)}}
    return [Layer(recipe_settings), Layer(model_settings, of_model=True), Layer(stages)]


def _merge_layers(layers: Sequence[Layer]) -> list[LayeredStage]:
    """The stages of a run: for every layer first its settings for all stages, then those for each stage."""
    stages = [LayeredStage()]
    for layer in layers:
        common = {k: v for k, v in layer.settings.items() if k not in {*RunConfig.model_fields, *OF_NEW_MODEL}}
        value = layer.settings.get("stages")
        separate = stages_of(value, stages) or [{}] * len(stages)
        stages += [copy.deepcopy(stages[0]) for _ in range(len(separate) - len(stages))]
        del stages[len(separate) :]
        for stage, settings in zip(stages, separate, strict=True):
            stage.add_layer(common, of_model=layer.of_model)
            stage.add_layer(settings)
            stage.pinned_model = settings.get("model", stage.pinned_model)
    if len(stages) > 1:
        _name_stages(stages)
    return stages


def _validate(run: Mapping[str, Any], stages: Sequence[LayeredStage], samples_only: bool) -> RunConfig:
    """The configuration. Stages are validated one by one first, so that errors name keys as users write them."""
    stage_keys = set(StageConfig.model_fields)
    for number, stage in enumerate(stages, 1):
        if unknown := [key for key in stage.settings if key not in stage_keys]:
            hint = did_you_mean(unknown[0], stage_keys | RUN_KEYS)
            raise UnknownKey(f"unknown key {unknown[0]!r}", str(unknown[0]), hint, stage_keys | RUN_KEYS)
        if "env" not in stage.settings:
            raise ConfigError("which environment? Give one with --env (see: envgym envs list)")
        stage.drop_model_settings()
        checked = validate_settings(StageConfig, stage.settings, f"stage {number}" if len(stages) > 1 else "")
        learner_class, learner_config = checked.learner_config()
        stage.drop_roles(learner_class(learner_config).roles)
    config = validate_settings(RunConfig, {**run, "stages": [stage.settings for stage in stages]})
    for stage_config in config.stages:
        complete_stage(stage_config, samples_only=samples_only)
        if config.deterministic and stage_config.rollout.max_staleness:
            raise ConfigError("a deterministic run has no episodes in flight during training: set max_staleness=0")
    return config


@dataclass
class LayeredStage:
    """The settings of one stage, merged layer by layer."""

    settings: dict[str, Any] = field(default_factory=lambda: {"agent": AUTO})
    pinned_model: Any = None
    """The model given for this stage alone: a model for all stages does not replace it."""
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    """The model's settings for learners, which may be dropped without a note."""
    optional_roles: set[str] = field(default_factory=set)
    """Roles that the learner may lack: those of a model's settings, or of a learner that was replaced."""

    @property
    def name(self) -> str:
        learner = component_mapping(self.settings.get("learner", {})).get("name", "")
        return stage_name(self.settings.get("name"), str(learner))

    def add_layer(self, layer: Mapping[str, Any], *, of_model: bool = False) -> None:
        """Merge one more layer. `of_model`: a model's settings; the learner may lack its roles and settings, and its
        steps do not replace epochs."""
        if of_model:
            self.model_settings = component_mapping(layer.get("learner", {}))
        if of_model and self.settings.get("epochs") is not None:
            layer = {key: value for key, value in layer.items() if key != "steps"}
        settings = without_warmup(self.settings, layer)
        rollout = layer.get("rollout")
        if not of_model and isinstance(rollout, Mapping) and "tasks_per_step" in rollout:
            settings = merge(settings, {"rollout": {"min_steps_per_epoch": 0}})
        merged = merge_stage(settings, layer)
        for kind in COMPONENTS:
            old, new = component_mapping(settings.get(kind, {})), component_mapping(layer.get(kind, {}))
            if changes_name(old, new):
                shared, dropped = split_settings(kind, old, new["name"])
                merged[kind] = deep_merge(shared, new)
                self._note_dropped(kind, old["name"], new, dropped)
                if kind == "learner":
                    self.optional_roles.update(settings.get("roles", {}))
        if isinstance(roles := layer.get("roles"), Mapping):
            self.optional_roles.difference_update(roles)
            self.optional_roles.update(roles if of_model else ())
        self.settings = merged

    def _note_dropped(self, kind: str, old: str, new: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Warn of `settings` of the component `old` that `new` does not get, unless they are the model's."""
        model = self.model_settings if kind == "learner" else {}
        if keys := [f"{kind}.{key}" for key in settings if key not in new and settings[key] != model.get(key, ...)]:
            note = f"{kind} {new['name']} does not have these settings of {old}, which are dropped: {', '.join(keys)}"
            warnings.warn(DroppedSettings(note), stacklevel=2)

    def drop_model_settings(self) -> None:
        """Drop the model's settings for learners that this stage's learner does not have."""
        learner = component_mapping(self.settings.get("learner", {}))
        if self.model_settings and (name := learner.get("name")):
            fields = config_class("learner", name).model_fields
            self.settings["learner"] = {
                key: value
                for key, value in learner.items()
                if key in fields or value != self.model_settings.get(key, ...)
            }

    def drop_roles(self, learner_roles: Collection[str]) -> None:
        """Drop the optional roles that are not among the `learner_roles`."""
        if dropped := self.optional_roles.difference(learner_roles):
            roles = self.settings["roles"].items()
            self.settings["roles"] = {role: settings for role, settings in roles if role not in dropped}


def split_settings(kind: str, old: Mapping[str, Any], name: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the component `old` that the one called `name` shares, and the others. `kind` is `env`, `agent`
    or `learner`.

    Two components share the settings of their common base class, such as every learner's learning rate. Settings that
    only have the same name may differ in meaning. Environments share nothing.
    """
    settings = {key: value for key, value in old.items() if key != "name"}
    if kind == "env":
        return {}, settings
    old_class, new_class = config_class(kind, old["name"]), config_class(kind, name)
    if settings.keys() >= old_class.model_fields.keys() - {"name"}:
        # A saved config holds every default; the old component's defaults are not meant for the new one.
        defaults = old_class.model_construct().model_dump(mode="json", warnings=False)
        settings = {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}
    bases = (base for base in old_class.__mro__ if issubclass(base, BaseModel) and issubclass(new_class, base))
    shared = {key: settings.pop(key) for key in next(bases).model_fields if key in settings}
    return shared, settings


def stages_of(value: Any, lower_stages: Sequence[LayeredStage]) -> list[dict[str, Any]]:
    """A layer's settings of each stage. A list of stages: each `repeat` times, merged over its `recipe`. A mapping: the
    settings of the `lower_stages`, by name."""
    if isinstance(value, Mapping):
        names = [stage.name for stage in lower_stages]
        if unknown := [name for name in value if name not in names]:
            raise ConfigError(f"stages.{unknown[0]}: there is no such stage.{did_you_mean(str(unknown[0]), names)}")
        if invalid := [name for name, settings in value.items() if not isinstance(settings, Mapping)]:
            raise ConfigError(f"key 'stages.{invalid[0]}' holds nested keys (stages.{invalid[0]}.…)")
        return [dict(value.get(name, {})) for name in names]
    if value is not None and not (isinstance(value, list) and all(isinstance(stage, Mapping) for stage in value)):
        raise ConfigError("key 'stages' is a list of settings, one for each stage")
    stages = []
    for stage in value or ():
        settings = {key: item for key, item in stage.items() if key not in ("recipe", "repeat")}
        if "recipe" in stage:
            recipe = load_recipe(str(stage["recipe"]))
            if "stages" in recipe or "new_model" in recipe:
                raise ConfigError(f"stages: recipe {stage['recipe']} is a whole run, and cannot be a stage")
            settings = merge_stage(recipe, settings)
        repeat = stage.get("repeat", 1)
        if type(repeat) is not int or repeat < 1:
            raise ConfigError(f"stages: repeat is a number of times, 1 or more, not {repeat!r:.60}")
        for number in range(1, repeat + 1):
            stages.append(copy.deepcopy(settings))
            if repeat > 1 and "name" in settings:
                stages[-1]["name"] = f"{settings['name']}-{number}"
    return stages


def _name_stages(stages: Sequence[LayeredStage]) -> None:
    """Check the names of stages and their references to earlier stages. Each stage starts from the model of the last
    training stage before it, unless it has a model of its own."""
    names: list[str] = []
    trained: str | None = None
    for number, stage in enumerate(stages, 1):
        settings = stage.settings
        if stage.pinned_model is not None:
            settings["model"] = stage.pinned_model
        elif trained is not None:
            settings["model"] = f"{STAGE}{trained}"
        references = [leaf for leaf in leaves(settings) if isinstance(leaf, str) and leaf.startswith(STAGE)]
        for name in (reference.removeprefix(STAGE) for reference in references):
            if name not in names:
                raise ConfigError(f"stage {number}: there is no stage {name!r} before it.{did_you_mean(name, names)}")
        name = stage.name
        if name in names:
            name = settings["name"] = f"{name}-{number}"
        names.append(name)
        trained = name if settings.get("kind", "train") == "train" else trained


def settings_of_model(model: Any) -> dict[str, Any]:
    """The default settings of runs on `model`: the `model_settings` of the recipe that makes it, or the rendering and
    sampling settings of the run that left the model or checkpoint. Empty if its folder has no run's saved config."""
    if isinstance(model, str) and makes_model(model):
        settings: dict[str, Any] = load_recipe(model).get("model_settings", {})
        return settings
    run, index = run_of_checkpoint(Path(str(model))) or (Path(str(model)), -1)
    saved = run / "config.yaml"
    stages = read_yaml(saved).get("stages") if saved.is_file() else None
    if not stages or not isinstance(stages, list):
        return {}
    stage = stages[index if index < len(stages) else -1]
    try:
        render = validate_settings(RenderConfig, component_mapping(stage["render"], "kind"), f"{saved}: render")
        return {
            "render": {"kind": render.kind, "keep_thoughts": render.keep_thoughts},  # the tokenizer has the template
            "engine": {"max_model_len": stage["engine"]["max_model_len"]},
            "rollout": {"max_tokens": stage["rollout"]["max_tokens"]},
        }
    except (KeyError, TypeError):  # written by hand: a saved config has them all
        return {}
