"""A run's settings: typed, validated without heavy imports, the same from YAML, the command line and Python.

Settings come in layers, later ones win: the recipe, the model's own settings, what the recipe says of one stage in
particular, a config file, `key=value` words.
A key outside `stages` holds for every stage. What results is saved in the run folder as `config.yaml` and,
given back with `--config`, makes the same run.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from envgym.agent import Agent, AgentConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError, DataError, DroppedSettings, EnvgymError, UnknownKey, did_you_mean
from envgym.learner import Learner, LearnerConfig, RoleSpec
from envgym.models.lora import LoraConfig
from envgym.render import RenderKind
from envgym.services.declarations import Url, VariableName
from envgym.settings import Settings, settings_error
from envgym.tasks import DataConfig
from envgym.training.best_checkpoint import HELD_OUT, metric_of
from envgym.training.run_folder import run_of_checkpoint
from envgym.workers.config import WorkersConfig

from .carried_settings import carried, config_class
from .known_settings import keys_of, meant, nearly, question
from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE, DuplicateKey, load_recipe, load_yaml, makes_model, read_yaml

AUTO = "auto"
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?e[-+]?\d+", re.IGNORECASE)
"""What YAML takes for text, though people mean a number."""


class Component(BaseModel):
    """An environment, agent or learner: its `name`, and settings of its own beside it."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _name_alone(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


ComponentField = Annotated[Component, BeforeValidator(_name_alone)]


def _as_list(value: Any) -> Any:
    return [] if value in (None, "none") else [value] if isinstance(value, str) else value


Trackers = Annotated[list[Literal["tensorboard", "wandb", "swanlab"]], BeforeValidator(_as_list)]


class FilterConfig(Settings):
    """Dynamic filtering: groups that teach nothing are dropped, and other tasks are played in their place. What a
    replay plays is never dropped."""

    zero_variance: bool = False
    """Drop groups whose episodes all have one score."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Drop groups whose mean score is not above this."""
    max_score: float | None = Field(None, ge=0, le=1)
    """Drop groups whose mean score is not below this."""
    max_rounds: int = Field(10, ge=1)
    """Times a step plays tasks to get its groups. Then it learns from those it has, which is said."""

    @property
    def on(self) -> bool:
        return self.zero_variance or self.min_score is not None or self.max_score is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"no score is above min_score={self.min_score:g} and below max_score={self.max_score:g}")
        return self


class RolloutConfig(Settings):
    """How episodes are played."""

    tasks: int = Field(64, ge=1)
    """Tasks (groups) a step learns from."""
    group_size: int = Field(8, ge=1)
    """Episodes of each task."""
    max_tokens: int = Field(512, ge=1)
    """Token budget of one turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the support is cut and importance ratios are biased."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 is all of them."""
    concurrency: int = Field(1024, ge=1)
    """Episodes in play at once."""
    episode_timeout: float = Field(300.0, gt=0)
    """Seconds an episode may take before it counts as failed (`timeout`)."""
    retries: int = Field(2, ge=0)
    """Times a failed episode is played again where its failure may pass (a timeout, a lost connection)."""
    refills: int = Field(1, ge=0)
    """Times a group plays another episode in place of one that failed for good. Then it is learned from without."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """A step in which more than this share of episodes failed stops the run."""
    filter: FilterConfig = FilterConfig()


class PretrainConfig(Settings):
    """Text that is taught as it stands beside what the policy samples; `learner.pretrain_coef` weighs it."""

    path: str | None = None
    """JSONL, Parquet, a folder of them, one that `datasets` saved, or a text file with a document a line. Unset: no
    text is mixed in."""
    split: str | None = None
    """The split of a folder that has several. Unset: `train`."""
    text: str = "text"
    """Field of the text."""
    rows: int = Field(8, ge=1)
    """Documents a step, dealt out to its optimizer steps."""
    max_tokens: int = Field(512, ge=2)
    """Tokens a document is cut to; what it holds beyond them is not taught."""


class EngineConfig(Settings):
    """What samples."""

    kind: Literal["auto", "vllm", "transformers", "openai"] = "auto"
    """`auto` is vLLM where it is installed, else the transformers fallback, and says so. `openai` is any API of that
    form, for evaluation; `model` is then the name that the API knows."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the workers' (`workers.dtype`): float32 on a CPU and bfloat16 on an accelerator by default."""
    max_model_len: int | None = Field(None, ge=2)
    """Context length in tokens; by default the model's own, at most 32768."""
    args: dict[str, Any] = Field({})
    """Any vLLM engine argument, passed through."""
    base_url: Url | None = None
    """With `openai`: the address up to and without `/chat/completions`, for example `http://127.0.0.1:8000/v1`."""
    api_key_env: VariableName = ""
    """With `openai`: name of the environment variable that holds the API key; empty for none."""
    timeout: float = Field(120.0, gt=0)
    """With `openai`: seconds one try of a request may take."""
    tries: int = Field(5, ge=1)
    """With `openai`: tries of a request that the network or the server fails."""
    requests_per_minute: float | None = Field(None, gt=0)
    """With `openai`: requests begun in a minute at most, evenly spaced."""
    extra: dict[str, Any] = Field({})
    """With `openai`: merged over every request's body; null removes a key (`{"max_tokens": null,
    "max_completion_tokens": 900}`)."""

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        own: tuple[str, ...] = ("dtype", "max_model_len", "args")
        if self.kind != "openai":
            own = ("base_url", "api_key_env", "timeout", "tries", "requests_per_minute", "extra")
        elif self.base_url is None:
            raise ConfigError(
                "engine.kind=openai needs engine.base_url, the API's address up to and without /chat/completions "
                "(http://127.0.0.1:8000/v1)"
            )
        for name in own:
            if getattr(self, name) != type(self).model_fields[name].default:
                whose = "is for engine.kind=openai" if self.kind != "openai" else "is the server's to decide"
                raise ConfigError(f"engine.{name} {whose}: leave it out with engine.kind={self.kind}")


class EvalConfig(Settings):
    """Evaluation on held-out tasks during training."""

    every: int = Field(20, ge=0)
    """Steps between evaluations; one is made before the first step and after the last. 0: none at all."""
    tasks: int = Field(512, ge=1)
    """Held-out tasks, always the same ones."""
    samples: int = Field(1, ge=1)
    """Episodes of each, sampled at the training temperature."""
    greedy: bool = True
    """Also evaluate greedily before the first step and after the last."""


class CurriculumConfig(Settings):
    """Tasks that are always or never solved are drawn less: they teach nothing."""

    skip: float = Field(0.0, ge=0, lt=1)
    """How often a task is passed over whose last group had one score throughout; 0: never."""
    memory: int = Field(32, ge=1)
    """Groups by which a difficulty is judged, for tasks that have not been played yet."""


class CheckpointConfig(Settings):
    """What a run can be resumed from."""

    every: int = Field(20, ge=0)
    """Steps between checkpoints; one is made after the last step and at Ctrl-C. 0: only those."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    best: str | None = Field(None, pattern=r"^-?\w\S*$")
    """Metric by which the best checkpoint is kept as well, as `checkpoints/best`: `eval/score`, or any number of
    `metrics.jsonl`. The greatest value is the best; the least where the name ends in `loss` or has a minus before
    it."""


class SyncConfig(Settings):
    """New weights to the engine after every step, and the check that they arrived."""

    tolerance: float | None = Field(None, gt=0)
    """Largest difference in log-probability, in nats, that sampler and trainer may have on the probe after a
    sync, and on average over a step's rows. Beyond it the run stops: it would learn from another policy's
    samples. By default 1e-3 for float32 weights and 0.5 for 16-bit ones, whose kernels differ by more."""


class RoleConfig(Settings):
    """What one of the learner's models (`critic`, `reference`) has to itself."""

    model: str | None = None
    """Folder or hub id of its weights; by default the stage's model. A critic may start from a reward model."""
    lr: float | None = Field(None, ge=0)
    """Its peak learning rate; by default the learner's."""
    save: bool = False
    """Keep its weights in the run folder, under the role's name, when the stage ends. The policy's always are."""
    workers: dict[str, Any] = Field({})
    """Settings of its workers that differ from the stage's `workers`."""
    lora: dict[str, Any] = Field({})
    """Settings of its adapter that differ from the stage's `lora`; `{rank: 0}` trains it in full."""


class StageConfig(Settings):
    """One run of the one loop."""

    env: ComponentField
    """Environment: id, `file.py[:Name]`, import path or URL, and its own settings."""
    agent: ComponentField = Component(name=AUTO)
    """Agent, and its own settings; `auto` is the one the environment names."""
    learner: ComponentField
    """Learner, and its own settings (`learner.lr`)."""
    model: str = DEFAULT_MODEL
    """Hugging Face folder or hub id, or the name of a recipe that makes a model."""
    data: dict[str, Any] = Field({})
    """What gives the environment its tasks: `path`, field names (`prompt`, `answer`, …), a template, splits: see
    `envgym/tasks/config.py`."""
    render: RenderKind = "auto"
    """`chat`: the tokenizer's chat template; `text`: plain text; `auto`: the template where there is one."""
    steps: int = Field(100, ge=1)
    """Loop steps to stop after."""
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pretrain: PretrainConfig = PretrainConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    lora: LoraConfig = LoraConfig()
    """Train adapters instead of weights, in every model that is trained."""
    roles: dict[str, RoleConfig] = Field({})
    """Settings of single models, by role."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sync: SyncConfig = SyncConfig()

    def make_spec(self) -> EnvSpec:
        """The environment's spec. Raises `EnvgymError` for an unknown name or setting."""
        from envgym.registry import spec

        settings = self.env.settings
        if self.data:
            settings["data"] = self.data
        return spec(self.env.name, **settings)

    def learner_config(self) -> tuple[type[Learner], LearnerConfig]:
        """The learner's class and its validated settings."""
        from envgym.registry import load_component

        learner_class: type[Learner] = load_component("learner", self.learner.name)
        return learner_class, validated(learner_class.Config, self.learner.model_dump(), f"learner {self.learner.name}")

    def workers_of(self, role: str) -> WorkersConfig:
        """The settings of a role's workers."""
        own = self.roles.get(role, RoleConfig()).workers
        return validated(WorkersConfig, merge(self.workers.model_dump(), own), f"roles.{role}.workers")

    def lora_of(self, role: str, spec: RoleSpec) -> LoraConfig:
        """The adapter of a role's model. Models that only score have none."""
        own = self.roles.get(role, RoleConfig()).lora
        if not spec.trained or own == {"rank": 0}:
            return LoraConfig()
        return validated(LoraConfig, merge(self.lora.model_dump(), own), f"roles.{role}.lora")

    def is_base(self, role: str, roles: Mapping[str, RoleSpec]) -> bool:
        """Whether a role is the policy as the stage found it, and the policy's own model without its adapter is that:
        then no other is loaded."""
        spec, own = roles[role], self.roles.get(role, RoleConfig())
        scores_alike = not spec.trained and spec.head == roles["actor"].head and own.model is None
        return scores_alike and self.lora_of("actor", roles["actor"]).rank > 0

    def agent_config(self) -> tuple[type[Agent], AgentConfig]:
        """The agent's class and its validated settings."""
        from envgym.registry import load_component

        agent_class: type[Agent] = load_component("agent", self.agent.name)
        return agent_class, validated(agent_class.Config, self.agent.settings, f"agent {self.agent.name}")


class RunConfig(Settings):
    """A run: its name and place, what holds for all of it, and its stages."""

    recipe: str = DEFAULT_RECIPE
    """Shipped recipe or YAML file the settings start from."""
    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    """Run folder within `runs_dir`; by default made from the environment, the learner and the time."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    evals_dir: str = "evals"
    """Where the folders of evaluations are made."""
    runtime: Literal["local", "ray"] = "local"
    """Where workers run: processes on this machine, or actors on Ray."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random in a run."""
    deterministic: bool = False
    """Same seed, same bits: waves of sorted requests, seeded sampling, no caches across them. Slower."""
    report_to: Trackers = Field([])
    """Where else metrics go, beside `metrics.jsonl`: any of `tensorboard`, `wandb`, `swanlab`."""
    project: str = "envgym"
    """Project that W&B and SwanLab file the run under, unless their own variables (`WANDB_PROJECT`) name one."""
    debug: bool = False
    """Workers run inside the controller, where a breakpoint works, and errors show their traceback."""
    stages: list[StageConfig] = Field(min_length=1)
    """What is run, in order; a stage trains the model that the one before it left."""

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build a settings model, turning pydantic's complaint into one line."""
    try:
        return model(**values)
    except ValidationError as error:
        raise settings_error(error, model, where) from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, key by key; a component given by another name drops the settings of the old one."""
    components = {}
    for key in ("env", "agent", "learner"):
        if key in over:
            value, old = _name_alone(over[key]), _name_alone(base.get(key) or {})
            if not isinstance(value, Mapping):
                raise ConfigError(f"key {key!r} is a name, or a name and settings, not {value!r:.60}")
            components[key] = value if _changes_name(old, value) else _lay(old, value)
    return {**_lay(base, over), **components}


def _changes_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether `new` is another component than `old`. Settings beside `auto` are for whichever it will be."""
    return "name" in new and "name" in old and new["name"] != old["name"] and AUTO not in (new["name"], old["name"])


def _lay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _lay(result[key], value) if both else value
    return result


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words, dotted for nested keys, as a nested mapping; later words win. Values are read as YAML."""
    result: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"{word!r} is not a key=value setting")
        try:
            value = load_yaml(text)
        except DuplicateKey as error:
            raise ConfigError(f"{word}: {error.problem}") from None
        except yaml.YAMLError:
            value = text
        if isinstance(value, Mapping | list) and not text.lstrip().startswith(("{", "[")):
            value = text  # a template has colons and lines of its own
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merge(result, value)
    return result


def resolve(
    settings: Mapping[str, Any] | None = None, *, recipe: str | None = None, file: str | Path | None = None
) -> RunConfig:
    """The complete configuration of a run, every name in it looked up and every component's settings checked.

    `settings` are the caller's own (from `key=value` words or Python) and win over `file`, which wins over the
    recipe. Raises `ConfigError`, `NameNotFound` or `DataError` in one line.
    """
    own = dict(settings or {})
    from_file = read_yaml(Path(file)) if file is not None else {}
    recipe = recipe or own.get("recipe") or from_file.get("recipe") or DEFAULT_RECIPE
    layers, of_model = [from_file, own], None
    if "stages" not in from_file:  # a saved config holds everything: neither recipe nor model may add to it
        of_recipe = load_recipe(recipe)
        model = next((layer["model"] for layer in (own, from_file, of_recipe) if "model" in layer), DEFAULT_MODEL)
        of_stages = {"stages": of_recipe.pop("stages", [])}
        engine = merge(from_file, own).get("engine")
        # What an API calls its model says nothing of a model of that name here.
        is_api = isinstance(engine, Mapping) and engine.get("kind") == "openai"
        of_model = {} if is_api else _model_settings(model)
        layers = [of_recipe, of_model, of_stages, *layers]

    run_keys = set(RunConfig.model_fields) - {"stages"}
    run: dict[str, Any] = {"recipe": recipe}
    layered = [_Layered()]
    for layer in layers:
        run |= {key: value for key, value in layer.items() if key in run_keys and key != "recipe"}
        common = {k: v for k, v in layer.items() if k not in run_keys | {"stages", "new_model", "model_settings"}}
        each = layer.get("stages") or [{}] * len(layered)
        if not isinstance(each, list) or not all(isinstance(stage, Mapping) for stage in each):
            raise ConfigError("key 'stages' is a list of settings, one for each stage")
        layered += [copy.deepcopy(layered[0]) for _ in range(len(each) - len(layered))]
        del layered[len(each) :]
        for stage_layers, of in zip(layered, each, strict=True):
            stage_layers.lay(common, for_any_learner=layer is of_model)
            stage_layers.lay(of)
    stages = [stage_layers.settings for stage_layers in layered]
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
            _complete_stage(stage_config)
    except UnknownKey as error:
        keys = known_keys(stages[0])
        hint = question(meant(error.key, keys)) or error.near or question(nearly(error.key, keys))
        raise UnknownKey(error.said, error.key, hint, error.known) from None
    for line in dict.fromkeys(line for stage_layers in layered for line in stage_layers.left_out()):
        warnings.warn(DroppedSettings(line), stacklevel=2)
    return config


def known_keys(stage: Mapping[str, Any]) -> list[str]:
    """The keys of every setting of a run with this stage, as users write them."""
    names = {kind: _name_alone(stage.get(kind) or {}).get("name") for kind in ("env", "agent", "learner")}
    data: dict[str, Any] = {"data": stage["data"]} if stage.get("data") else {}
    try:  # not of one that is elsewhere, which would have to be asked
        spec = None if "://" in str(names["env"]) else StageConfig(env=names["env"], learner="", **data).make_spec()
    except (EnvgymError, ValidationError):  # what it lacks is said where it is needed
        spec = None
    return keys_of(
        ("", RunConfig),
        ("learner.", config_class("learner", names["learner"] or "")),
        ("", StageConfig),
        ("data.", DataConfig),
        ("agent.", config_class("agent", spec.agent if spec and names["agent"] == AUTO else names["agent"] or "")),
        *([] if spec is None else [("env.", type(spec.config))]),
    )


@dataclass
class _Layered:
    """The settings of one stage, laid layer on layer, and what of them is left out: settings of a component whose place
    another one took."""

    settings: dict[str, Any] = field(default_factory=lambda: {"agent": AUTO})
    _left_out: list[tuple[str, str, str]] = field(default_factory=list)
    """Component, the name of the one it was for, key."""
    _roles: dict[str, str | None] = field(default_factory=dict)
    """Roles that the learner need not have, and the learner that they were set for; None: for whichever has them."""

    def lay(self, over: Mapping[str, Any], *, for_any_learner: bool = False) -> None:
        """Lay one more layer on. `for_any_learner`: its roles are for learners that have them."""
        merged = merge(self.settings, over)
        for kind in ("env", "agent", "learner"):
            old, new = _name_alone(self.settings.get(kind, {})), _name_alone(over.get(kind, {}))
            if _changes_name(old, new):
                kept, left_out = carried(kind, old, new["name"])
                merged[kind] = _lay(kept, new)
                self._left_out += [(kind, old["name"], key) for key in left_out]
                if kind == "learner":
                    self._roles = dict.fromkeys(self.settings.get("roles", {}), old["name"]) | self._roles
        given = over.get("roles", {})
        if isinstance(given, Mapping):
            self._roles = {role: whose for role, whose in self._roles.items() if role not in given}
            self._roles |= dict.fromkeys(given) if for_any_learner else {}
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
            if key not in _name_alone(self.settings.get(kind, {})):
                lost.setdefault(("learner" if kind == "roles" else kind, old), []).append(f"{kind}.{key}")
        return [
            f"{kind} {_name_alone(self.settings[kind])['name']} does not have these settings of {old}, which are left "
            f"out: {', '.join(dict.fromkeys(keys))}"
            for (kind, old), keys in lost.items()
        ]


def _model_settings(model: Any) -> dict[str, Any]:
    """What a run on `model` starts from: the settings of the recipe that makes it, or, for the folder of a run or of
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


def _complete_stage(stage: StageConfig) -> None:
    """Look every name up, write every component's defaults out, and refuse settings that contradict each other."""
    stage.engine.check()
    spec = stage.make_spec()
    for part in spec.parts():
        if isinstance(data := getattr(part.config, "data", None), DataConfig):
            data.check_paths()
    if stage.agent.name == AUTO:
        stage.agent = Component(name=spec.agent, **stage.agent.settings)
    agent_class, agent_config = stage.agent_config()
    learner_class, learner_config = stage.learner_config()
    roles = learner_class(learner_config).roles
    for role in stage.roles:
        if role not in roles:
            raise ConfigError(
                f"learner {stage.learner.name} has no role {role!r} with these settings.{did_you_mean(role, roles)}"
            )
    for role, role_spec in roles.items():
        workers, lora = stage.workers_of(role), stage.lora_of(role, role_spec)
        workers.check(role, learner_config if role_spec.trained else None)
        lora.check(role, workers, samples=agent_class.samples and role == "actor")
        own = stage.roles.get(role, RoleConfig())
        if own.lora and not role_spec.trained:
            raise ConfigError(f"roles.{role}.lora: the {role} is not trained, and so has no adapter")
        if stage.is_base(role, roles) and (own.workers or own.save):
            raise ConfigError(
                f"roles.{role}: with lora the {role} is the policy's own model without its adapter, which has no "
                "workers or weights of its own: give it a model, or leave this out"
            )
    smallest = learner_class.min_group_size
    if agent_class.samples and stage.rollout.group_size < smallest:
        raise ConfigError(
            f"learner {stage.learner.name} compares the episodes of one task: "
            f"rollout.group_size must be at least {smallest}, not {stage.rollout.group_size}"
        )
    if agent_class.samples and stage.curriculum.skip and stage.rollout.group_size < 2:
        raise ConfigError("curriculum.skip goes by the scores of a group: rollout.group_size must be at least 2")
    if agent_class.samples and stage.rollout.filter.zero_variance and stage.rollout.group_size < 2:
        raise ConfigError("rollout.filter.zero_variance compares the scores of a group: set rollout.group_size above 1")
    if metric_of(stage.checkpoint.best or "").startswith(HELD_OUT) and not stage.eval.every:
        raise ConfigError(f"checkpoint.best={stage.checkpoint.best} is measured by evaluations: set eval.every above 0")
    if stage.pretrain.path is not None:
        if not getattr(learner_config, "pretrain_coef", 0.0) > 0:
            raise ConfigError(
                f"pretrain.path mixes text into a policy gradient, which learner {stage.learner.name} would give no "
                "weight: it needs a setting pretrain_coef above 0"
            )
        if not Path(stage.pretrain.path).exists():
            raise DataError(f"pretrain.path: there is no file {stage.pretrain.path}")
    stage.env = Component(name=stage.env.name, **spec.config.model_dump(mode="json", exclude={"data"}))
    stage.agent = Component(name=stage.agent.name, **agent_config.model_dump(mode="json"))
    stage.learner = Component(**learner_config.model_dump(mode="json"))
