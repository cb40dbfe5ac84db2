"""A run's settings: typed, validated without heavy imports, the same from YAML, the command line and Python.

A key outside `stages` applies to every stage. The run folder's `config.yaml` holds the complete settings, and with
`--config` they make the same run. `envgym.config.resolve` merges them from layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, model_validator

from envgym.agent import Agent, AgentConfig
from envgym.engines import choose_engine
from envgym.env import EnvSpec
from envgym.errors import ConfigError, reported_as
from envgym.learner import Learner, LearnerConfig, OptimizerConfig, RoleSpec
from envgym.registry import load_component, spec
from envgym.render import RenderConfig
from envgym.rollout.config import RolloutConfig
from envgym.run_folder import stage_name
from envgym.services.declarations import BaseUrl, VariableName
from envgym.settings import Settings, validate_settings
from envgym.tasks.curriculum import CurriculumConfig
from envgym.workers.config import WorkersConfig
from envgym.workers.lora import LoraConfig
from envgym.yaml_files import read_yaml

from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE
from .words import AUTO, WARMUPS, component_mapping, merge


class Component(BaseModel):
    """An environment, agent or learner: its `name` and its settings."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


STAGE = "stage:"
"""Prefix of a value that stands for an earlier stage's result."""
ComponentField = Annotated[Component, BeforeValidator(component_mapping)]


def _as_list(value: Any) -> Any:
    return [] if value in (None, "none") else [value] if isinstance(value, str) else value


TrackerNames = Annotated[list[Literal["tensorboard", "wandb", "swanlab"]], BeforeValidator(_as_list)]


class TextSource(Settings):
    """One source of text."""

    path: str | None = None
    """JSONL, Parquet, a folder of them, a folder that `datasets` saved, or a text file with one document per line.
    Unset: no text is added."""
    split: str | None = None
    """Split of a folder with several. Unset: `train`."""
    text: str = "text"
    """Field of the text."""


class WeightedSource(TextSource):
    """One of several sources."""

    path: str
    """As `pretrain.path`."""
    weight: float = Field(1.0, gt=0)
    """Its share of the documents, relative to the other sources' weights."""


class PretrainConfig(TextSource):
    """Text to train on in addition to the policy's samples, with the weight `learner.pretrain_coef`."""

    sources: dict[str, WeightedSource] = Field({})
    """Several sources in place of one: `sources.NAME.path`, `sources.NAME.weight`, …"""
    rows: int = Field(8, ge=1)
    """Documents per training step, dealt out to its optimizer steps."""
    max_tokens: int = Field(512, ge=2)
    """Maximum tokens of a document; longer ones are truncated."""

    @property
    def paths(self) -> list[str]:
        """Folders and files of the text; empty if no text is added."""
        paths = [] if self.path is None else [self.path]
        return [*paths, *(source.path for source in self.sources.values())]

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.path is not None and self.sources:
            raise ValueError("give pretrain.path, or pretrain.sources.NAME.path for each of several")
        return self


API_SETTINGS = {"base_url", "api_key_env", "timeout", "tries", "requests_per_minute", "extra"}
"""Settings of the engine `openai`, which has no others."""


class EngineConfig(Settings):
    """The inference engine. `engine=KIND` sets the kind alone."""

    kind: str = "auto"
    """`auto` is vLLM if it is installed, else the transformers fallback, with a note. `openai` is any OpenAI-compatible
    API, for evaluation and rollouts; `model` is then the API's name of a model. Others are `vllm`, `transformers`,
    names of other packages, and `file.py:Name`."""
    count: int = Field(1, ge=1)
    """Number of engines, which share the requests. A crashed engine is replaced, and its episodes are retried."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that each engine splits every layer over."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is `workers.dtype`: by default float32 on a CPU and bfloat16 on an accelerator. Commands that only sample
    take float32 there too for a policy that was trained in it, since 16 bits can undo a training."""
    max_model_len: int | None = Field(None, ge=2)
    """Context length in tokens; by default the model's own, at most 32768."""
    args: dict[str, Any] = Field({})
    """Arguments of the engine's library, passed through: any of vLLM's engine arguments, say."""
    base_url: BaseUrl | None = None
    """With `openai`: the address without `/chat/completions`, for example `http://127.0.0.1:8000/v1`."""
    api_key_env: VariableName = ""
    """With `openai`: name of the environment variable that holds the API key; empty for none."""
    timeout: float = Field(120.0, gt=0)
    """With `openai`: timeout of one attempt of a request, in seconds."""
    tries: int = Field(5, ge=1)
    """With `openai`: maximum attempts of a request that fails at the network or the server."""
    requests_per_minute: float | None = Field(None, gt=0)
    """With `openai`: maximum requests started per minute, evenly spaced."""
    extra: dict[str, Any] = Field({})
    """With `openai`: fields to set in every request's body; null removes a key (`{"max_tokens": null,
    "max_completion_tokens": 900}`)."""

    def check(self) -> None:
        """Raise `ConfigError` for contradictory settings, and `NameNotFound` for an unknown kind."""
        is_api = self.kind == "openai"
        if not is_api:
            choose_engine(self.kind)
        elif self.base_url is None:
            raise ConfigError(
                "engine.kind=openai needs engine.base_url, the API's address without /chat/completions "
                "(http://127.0.0.1:8000/v1)"
            )
        for name, field in type(self).model_fields.items():
            if name != "kind" and (name in API_SETTINGS) != is_api and getattr(self, name) != field.default:
                reason = "is decided by the server" if is_api else "is for engine.kind=openai"
                raise ConfigError(f"engine.{name} {reason}: leave it out with engine.kind={self.kind}")


class EvalConfig(Settings):
    """Evaluation on held-out tasks during training."""

    every: Annotated[int, Field(ge=0)] | Literal["epoch"] = 20
    """Training steps between evaluations, or `epoch`: one per pass over the training tasks. Also before the first step
    and after the last. 0: no evaluation."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature of evaluations; by default the training temperature. Greedy ones are `greedy`."""
    tasks: int = Field(512, ge=1)
    """Number of held-out tasks, always the first ones."""
    samples: int = Field(1, ge=1)
    """Episodes per task."""
    greedy: bool = True
    """Also evaluate greedily before the first step and after the last."""
    inspect_logs: bool = False
    """In `envgym eval`: also write logs for inspect_ai, a package of the extra `inspect`."""


class CheckpointConfig(Settings):
    """Checkpoints, from which a run can be resumed."""

    every: int = Field(20, ge=0)
    """Training steps between checkpoints; also after the last step and at Ctrl-C. 0: only then."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""
    background: bool = True
    """Write checkpoints during training, from a copy in host memory. Off: training waits."""
    episodes_every: float = Field(30.0, ge=0)
    """Seconds between saves of the current step's episodes, so that a killed run resumes in the middle of a long step.
    A deterministic run repeats the step instead, for the same result."""
    best: str | None = Field(None, pattern=r"^-?\w\S*$")
    """Metric of the best checkpoint, which is also kept, as `checkpoints/best`: `eval/score`, or any number in
    `metrics.jsonl`. Higher is better; lower is if the name ends in `loss` or begins with a minus."""

    @property
    def metric(self) -> str:
        """The metric that `best` names, or an empty string."""
        return (self.best or "").removeprefix("-")

    @property
    def needs_evaluation(self) -> bool:
        """True if evaluations measure the metric."""
        return self.metric.startswith("eval/")


def _check_size(value: Any) -> Any:
    """Raise `ValueError` for a text that is not a size."""
    if isinstance(value, str):
        try:
            if TypeAdapter(ByteSize).validate_python(value) and not value.strip()[-1].isalpha():
                raise ValueError
        except ValueError:
            raise ValueError(f"must be a number of steps or a size such as 20GB, not {value!r:.60}") from None
    return value


Amount = Annotated[Annotated[int, Field(ge=1)] | str | None, BeforeValidator(_check_size)]
"""A number of steps, or a size (`20GB`)."""


class KeepConfig(Settings):
    """Files of past steps to keep: a number of steps, or a size in all (`20GB`), of the newest. Unset: all."""

    rollouts: Amount = None
    """Episodes, in `rollouts/`."""
    learned: Amount = None
    """Training values of their tokens, in `learned/`."""


class PlacementConfig(Settings):
    """Placement of one part of a stage: a role, the `engine`, a reward model of the environment."""

    nodes: int | None = Field(None, ge=1)
    """Number of nodes with an equal number of its processes each; by default as few nodes as possible."""
    gpus: float = Field(1.0, ge=0)
    """GPUs per process: a fraction to share one (0.5), or 0 for the CPU. An engine with `tensor_parallel` has that
    many."""


class SyncConfig(Settings):
    """The transfer of new weights to the engine after every step, and its check."""

    tolerance: float | None = Field(None, gt=0)
    """Maximum difference in log-probability, in nats, between engine and trainer on the probe after a sync, and on
    average over a step's tokens; on average over the probe, 12% of it. Above it the run stops, since it would train on
    another policy's samples. By default the difference after a sync is compared with the one that both have from the
    same files: 2.5 times as much, confirmed by the step's tokens, stops the run."""
    transfer: Literal["files", "nccl", "cuda_ipc"] = "files"
    """`files`: in shared memory or, if engines run on other nodes, in the run's folder, which must then be on a shared
    disk. vLLM's transfers between GPUs: `nccl`, or `cuda_ipc` if ranks and engines share GPUs."""
    bucket_megabytes: int = Field(256, ge=1)
    """MiB of weights to send at a time."""


class RoleConfig(Settings):
    """Settings of one of the learner's models (`critic`, `reference`)."""

    model: str | None = None
    """Folder or hub id of its weights; by default the stage's model. A critic may start from a reward model."""
    base_url: BaseUrl | None = None
    """Address of a vLLM server (`http://127.0.0.1:8000/v1`) that serves `model`, in place of local weights: for a
    teacher, which only returns its most likely tokens."""
    api_key_env: str | None = None
    """Name of the environment variable with that server's key."""
    learner: dict[str, Any] = Field({})
    """Settings of its optimizer, `lr` to `max_grad_norm`, that differ from the learner's (`roles.critic.learner.lr`). A
    warm-up replaces the learner's, in steps or as a share."""
    save: bool = False
    """Save its weights in the run folder, under the role's name, when the stage ends. The policy is always saved."""
    workers: dict[str, Any] = Field({})
    """Settings of its workers that differ from the stage's `workers`."""
    lora: dict[str, Any] = Field({})
    """Settings of its adapter that differ from the stage's `lora`; `{rank: 0}` trains it in full."""


class StageConfig(Settings):
    """One stage of a run: training, a rollout or scoring (`kind`)."""

    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    """Name of the stage's folder, and of its result in later stages (`stage:NAME`); by default its learner's."""
    kind: Literal["train", "rollout", "score"] = "train"
    """`train`; `rollout`: write episodes of the first `rollout.tasks_per_step` training tasks to a file,
    `rollout.group_size` of each; `score`: let the environment score the completions of `data.path` (episodes or
    recorded data) and write them to a file."""
    env: ComponentField
    """Environment: id, `file.py[:Name]`, import path or URL, and its settings."""
    agent: ComponentField = Component(name=AUTO)
    """Agent and its settings; `auto` is the environment's default agent."""
    learner: ComponentField
    """Learner and its settings (`learner.lr`)."""
    model: str = DEFAULT_MODEL
    """Hugging Face folder or hub id, a recipe that makes a model (its name or its YAML file), or `stage:NAME`. Later
    stages start by default from the model of the last training stage."""
    from_checkpoint: str | None = None
    """Checkpoint of another run of the same model, whose weights and optimizers the stage begins with (`--from`)."""
    data: dict[str, Any] = Field({})
    """Tasks for the environment: `path`, field names (`prompt`, `answer`, …), a template, splits: see
    `envgym/tasks/config.py`."""
    render: RenderConfig = RenderConfig()
    steps: int | None = Field(100, ge=1)
    """Training steps to stop after; null if `epochs` is set."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training tasks to stop after, in place of `steps`."""
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pretrain: PretrainConfig = PretrainConfig()
    engine: Annotated[EngineConfig, BeforeValidator(lambda value: component_mapping(value, "kind"))] = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    lora: LoraConfig = LoraConfig()
    """Adapters to train in place of the weights, in every trained model."""
    roles: dict[str, RoleConfig] = Field({})
    """Settings of individual models, by role."""
    colocate: Literal["auto", "none", "all"] | list[list[str]] = "auto"
    """Parts that share GPUs: sets of them (`[[actor, reference], [critic, reward]]`), or `all`. If the engine shares
    GPUs with the learner's models, they use them in turns, each with all of the memory. `auto`: separate GPUs for every
    part if there are enough, else all parts share them and hold their memory at the same time. `none`: always
    separate."""
    placement: dict[str, PlacementConfig] = Field({})
    """Nodes and GPUs of each part, by name."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    keep: KeepConfig = KeepConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        self.steps = None if self.epochs else self.steps or type(self).model_fields["steps"].default
        return self

    def make_spec(self) -> EnvSpec:
        """The environment. Raises `EnvgymError` for an unknown name or setting."""
        settings = self.env.settings
        if self.data:
            settings["data"] = self.data
        return spec(self.env.name, **settings)

    def learner_config(self) -> tuple[type[Learner], LearnerConfig]:
        """The learner's class and its validated settings."""
        learner_class: type[Learner] = load_component("learner", self.learner.name)
        settings, label = self.learner.model_dump(), f"learner {self.learner.name}"
        return learner_class, validate_settings(learner_class.Config, settings, label)

    def role(self, name: str) -> RoleConfig:
        """The settings of a role, which may be the defaults."""
        return self.roles.get(name, RoleConfig())

    def learner_config_of(self, role: str) -> LearnerConfig:
        """The learner's settings for a role, with those of its own optimizer."""
        learner_class, config = self.learner_config()
        overrides, label = self.role(role).learner, f"roles.{role}.learner"
        validate_settings(OptimizerConfig, overrides, label)  # a role has no others
        if overrides.keys() & set(WARMUPS):
            overrides = {**dict.fromkeys(WARMUPS, 0), **overrides}
        if overrides.get("optimizer") == "adamw":
            overrides = {"muon_lr": None, **overrides}
        return validate_settings(learner_class.Config, {**config.model_dump(), **overrides}, label)

    @property
    def takes_images(self) -> bool:
        """True unless a vision-language model is trained and sampled on texts alone, without its vision tower, as the
        engine's argument `language_model_only` says."""
        return not self.engine.args.get("language_model_only")

    def workers_of(self, role: str) -> WorkersConfig:
        """The settings of a role's workers."""
        overrides = self.role(role).workers
        return validate_settings(WorkersConfig, merge(self.workers.model_dump(), overrides), f"roles.{role}.workers")

    def lora_of(self, role: str, spec: RoleSpec) -> LoraConfig:
        """The adapter of a role's model; without a rank for models that are not trained."""
        overrides = self.role(role).lora
        if not spec.trained or overrides == {"rank": 0}:
            return LoraConfig()
        return validate_settings(LoraConfig, merge(self.lora.model_dump(), overrides), f"roles.{role}.lora")

    def is_base(self, role: str, roles: Mapping[str, RoleSpec]) -> bool:
        """True if this frozen role is the initial policy and the policy has a LoRA adapter: then the actor serves it
        with the adapter off, and no other model is loaded."""
        spec, config = roles[role], self.role(role)
        is_initial_policy = not spec.trained and spec.head == roles["actor"].head and config.model is None
        return is_initial_policy and self.lora_of("actor", roles["actor"]).rank > 0

    def takes_turns(self, part: str) -> bool:
        """True if `colocate` puts a part on the engine's GPUs, which a role then uses in turns with the engine."""
        sets = self.colocate if isinstance(self.colocate, list) else []
        return self.colocate == "all" or any({part, "engine"} <= set(names) for names in sets)

    def agent_config(self) -> tuple[type[Agent], AgentConfig]:
        """The agent's class and its validated settings."""
        agent_class: type[Agent] = load_component("agent", self.agent.name)
        return agent_class, validate_settings(agent_class.Config, self.agent.settings, f"agent {self.agent.name}")


class RunConfig(Settings):
    """A run: its name and folder, the settings of the whole run, and its stages."""

    recipe: str = DEFAULT_RECIPE
    """Shipped recipe or YAML file that the settings start from."""
    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    """Name of the run's folder in `runs_dir`; by default made from the environment, the learner and the time."""
    runs_dir: str = "runs"
    """Parent of run folders."""
    evals_dir: str = "evals"
    """Parent of evaluation folders."""
    runtime: Literal["local", "ray"] = "local"
    """Runtime of the workers: processes on this machine, or actors on Ray."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random in a run."""
    deterministic: bool = False
    """Same seed, same bits: sorted requests in lockstep batches, seeded sampling, no prefix caching. Slower."""
    report_to: TrackerNames = Field([])
    """Outputs for metrics in addition to `metrics.jsonl`: any of `tensorboard`, `wandb`, `swanlab`."""
    project: str = "envgym"
    """The run's project in W&B and SwanLab, unless their own variables (`WANDB_PROJECT`) name one."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's files, in a folder with the run's name; by default the run's own folder."""
    debug: bool = False
    """Run workers inside the controller, where breakpoints work, and show tracebacks of errors."""
    stages: list[StageConfig] = Field(min_length=1)
    """Stages, in the order they run. A value `stage:NAME` in a stage stands for that earlier stage's result: its model
    or, if it did not train, its episodes."""

    @property
    def stage_names(self) -> list[str]:
        """The names of the stages."""
        return [stage_name(stage.name, stage.learner.name) for stage in self.stages]

    @property
    def stages_by_name(self) -> dict[str, StageConfig]:
        """The stages by their names."""
        return dict(zip(self.stage_names, self.stages, strict=True))

    @classmethod
    def read(cls, file: Path) -> Self:
        """The configuration that a run saved. Raises `ConfigError` if this version of envgym cannot read it."""
        saved = read_yaml(file)
        problem = f"{file} is not of this version of envgym ({version('envgym')}), or was changed"
        with reported_as(ConfigError, problem, cause=ConfigError):
            return validate_settings(cls, saved)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
