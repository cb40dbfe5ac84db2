"""Settings resolved: from their layers to the complete configuration of a run.

Later layers win: the recipe, the model's own settings, what the recipe says of one stage in particular, a config file,
the caller's own settings (`key=value` words or Python).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from envgym.errors import ConfigError, DroppedSettings, NameNotFound, UnknownKey, did_you_mean
from envgym.run_folder import run_of_checkpoint, stage_name
from envgym.settings import leaves, validated
from envgym.yaml_files import read_yaml

from .checks import complete_stage
from .known_settings import with_suggestion
from .missing import missing_part_error, parts_of_recipe
from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE, OF_NEW_MODEL, load_recipe, makes_model
from .replaced import Replaced
from .schema import STAGE, RunConfig, StageConfig
from .words import AUTO, COMPONENTS, changes_name, component_mapping, merge, merge_stage

RUN_KEYS = set(RunConfig.model_fields) - {"stages"}


class Layer(NamedTuple):
    """Settings of a run, and who gives them."""

    settings: Mapping[str, Any]
    giver: Literal["recipe", "model", "caller"]


def resolve(
    settings: Mapping[str, Any] | None = None, *, recipe: str | None = None, file: str | Path | None = None
) -> RunConfig:
    """The complete configuration of a run, every name in it looked up and every component's settings checked.

    `settings` are the caller's own (from `key=value` words or Python) and win over `file`, which wins over the
    recipe. Raises `ConfigError`, `NameNotFound` or `DataError` in one line.
    """
    given = dict(settings or {})
    from_file = read_yaml(Path(file)) if file is not None else {}
    named = given.get("recipe") or recipe
    recipe = named or from_file.get("recipe") or DEFAULT_RECIPE
    if misplaced := [key for key in OF_NEW_MODEL if key in from_file or key in given]:
        raise ConfigError(f"{misplaced[0]} belongs in the file of a recipe, which makes the model of --model FILE.yaml")
    is_saved = isinstance(from_file.get("stages"), list)  # a saved config holds everything: nothing may add to it
    if is_saved and named not in (None, from_file.get("recipe")):
        raise ConfigError(f"{file} holds all settings of its stages: leave out recipe {named}, or the file")
    layers = [] if is_saved else _layers_below(recipe, from_file, given)
    layers += [Layer(from_file, "caller"), Layer(given, "caller")]
    run = {key: value for layer in layers for key, value in layer.settings.items() if key in RUN_KEYS}
    stages = _lay_stages(layers)
    try:
        config = _validate({**run, "recipe": recipe}, stages)
    except UnknownKey as error:
        raise with_suggestion(error, stages[0].settings) from None
    except NameNotFound as error:
        parts = set() if is_saved else set(parts_of_recipe(load_recipe(recipe)))
        used = parts_of_recipe({"stages": [stage.settings for stage in stages]})
        raise missing_part_error(f"recipe {recipe}", parts.intersection(used), error) from None
    for line in dict.fromkeys(line for stage in stages for line in stage.replaced.lines(stage.settings)):
        warnings.warn(DroppedSettings(line), stacklevel=2)
    return config


def set_sampled_model(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Let a command that samples and trains nothing use the model in the caller's `settings`, where the last stage of a
    pipeline begins with the model of an earlier stage: no stage runs before it."""
    stage = config.stages[-1]
    if stage.model.startswith(STAGE):
        stage.model = settings.get("model", stage.model)


def _layers_below(recipe: str, from_file: Mapping[str, Any], given: Mapping[str, Any]) -> list[Layer]:
    """The layers below the caller's: the recipe, the model's own settings, the recipe's stages."""
    of_recipe = load_recipe(recipe)
    if "recipe" in of_recipe and "stages" not in of_recipe:
        raise ConfigError(f"recipe {recipe} names another recipe, below which its settings lie only as a --config file")
    if "model_settings" in of_recipe and "new_model" not in of_recipe:
        raise ConfigError(f"recipe {recipe}: model_settings are of the model that new_model makes, and it has none")
    if "new_model" in of_recipe:
        of_recipe.setdefault("model", recipe)
    model = next((layer["model"] for layer in (given, from_file, of_recipe) if "model" in layer), DEFAULT_MODEL)
    engine = merge(from_file, given).get("engine")
    # An API's name for its model says nothing of a model of that name here.
    is_api = isinstance(engine, Mapping) and engine.get("kind") == "openai"
    of_model, of_stages = {} if is_api else settings_of_model(model), {"stages": of_recipe.pop("stages", [])}
    return [Layer(of_recipe, "recipe"), Layer(of_model, "model"), Layer(of_stages, "recipe")]


def _lay_stages(layers: Sequence[Layer]) -> list[LayeredStage]:
    """The stages of a run: of every layer what holds for all of them, and then what it says of each."""
    stages = [LayeredStage()]
    for layer in layers:
        of_every_stage = {k: v for k, v in layer.settings.items() if k not in {*RunConfig.model_fields, *OF_NEW_MODEL}}
        listed = layer.settings.get("stages")
        of_each = stages_of(listed, stages) or [{}] * len(stages)
        stages += [copy.deepcopy(stages[0]) for _ in range(len(of_each) - len(stages))]
        del stages[len(of_each) :]
        for stage, of_stage in zip(stages, of_each, strict=True):
            stage.lay(of_every_stage, of_model=layer.giver == "model")
            if layer.giver == "caller" and isinstance(listed, list) and of_stage.get("epochs") is not None:
                of_stage = {**of_stage, "steps": None}  # in saved settings of an earlier version they stand beside it
            stage.lay(of_stage)
            stage.own_model = of_stage.get("model", stage.own_model)
    if len(stages) > 1:
        _name_stages(stages)
    return stages


def _validate(run: Mapping[str, Any], stages: Sequence[LayeredStage]) -> RunConfig:
    """The configuration. Stages are validated one by one first, so that messages name the keys as users write them."""
    known = set(StageConfig.model_fields)
    for number, stage in enumerate(stages, 1):
        if unknown := [key for key in stage.settings if key not in known]:
            near = did_you_mean(unknown[0], known | RUN_KEYS)
            raise UnknownKey(f"unknown key {unknown[0]!r}", str(unknown[0]), near, known | RUN_KEYS)
        if "env" not in stage.settings:
            raise ConfigError("which environment? Give one with --env (see: envgym envs list)")
        checked = validated(StageConfig, stage.settings, f"stage {number}" if len(stages) > 1 else "")
        learner_class, learner_config = checked.learner_config()
        stage.drop_roles(learner_class(learner_config).roles)
    config = validated(RunConfig, {**run, "stages": [stage.settings for stage in stages]})
    for stage_config in config.stages:
        complete_stage(stage_config)
        if config.deterministic and stage_config.rollout.max_staleness:
            raise ConfigError("a deterministic run has no episodes in play while it learns: max_staleness=0")
    return config


@dataclass
class LayeredStage:
    """The settings of one stage, laid layer on layer, and what of them is left out."""

    settings: dict[str, Any] = field(default_factory=lambda: {"agent": AUTO})
    own_model: Any = None
    """The model that was given for this stage in particular, which what holds for all stages does not change."""
    replaced: Replaced = field(default_factory=Replaced)

    @property
    def name(self) -> str:
        learner = component_mapping(self.settings.get("learner", {})).get("name", "")
        return stage_name(self.settings.get("name"), str(learner))

    def lay(self, over: Mapping[str, Any], *, of_model: bool = False) -> None:
        """Lay one more layer on. `of_model`: its roles are for learners that have them, and its steps for runs that
        are counted in steps."""
        if of_model and self.settings.get("epochs") is not None:
            over = {key: value for key, value in over.items() if key != "steps"}
        merged = merge_stage(self.settings, over)
        for kind in COMPONENTS:
            old, new = component_mapping(self.settings.get(kind, {})), component_mapping(over.get(kind, {}))
            if changes_name(old, new):
                merged[kind] = self.replaced.replace(kind, old, new, self.settings.get("roles", {}))
        if isinstance(roles := over.get("roles", {}), Mapping):
            self.replaced.give_roles(roles, of_model=of_model)
        self.settings = merged

    def drop_roles(self, known: Collection[str]) -> None:
        """Leave out the roles that were set for another learner and that the learner, with those `known`, lacks."""
        if foreign := self.replaced.foreign_roles(self.settings.get("roles", {}), known):
            roles = self.settings["roles"].items()
            self.settings["roles"] = {role: settings for role, settings in roles if role not in foreign}


def stages_of(value: Any, stages_before: Sequence[LayeredStage]) -> list[dict[str, Any]]:
    """The stages of a layer, each as often as it says (`repeat`), with the settings of its `recipe` below its own; or
    settings of stages that the layers before name."""
    if isinstance(value, Mapping):
        names = [stage.name for stage in stages_before]
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


def _name_stages(stages: Sequence[LayeredStage]) -> None:
    """Check what stages are called and refer to, and let each begin with the model that the last one before it left,
    unless it has one of its own."""
    known: list[str] = []
    trained: str | None = None
    for number, stage in enumerate(stages, 1):
        settings = stage.settings
        if stage.own_model is not None:
            settings["model"] = stage.own_model
        elif trained is not None:
            settings["model"] = f"{STAGE}{trained}"
        references = [leaf for leaf in leaves(settings) if isinstance(leaf, str) and leaf.startswith(STAGE)]
        for name in (reference.removeprefix(STAGE) for reference in references):
            if name not in known:
                raise ConfigError(f"stage {number}: there is no stage {name!r} before it.{did_you_mean(name, known)}")
        name = stage.name
        if name in known:
            name = settings["name"] = f"{name}-{number}"
        known.append(name)
        trained = name if settings.get("do", "train") == "train" else trained


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
