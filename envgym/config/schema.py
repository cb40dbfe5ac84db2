"""A run's settings: typed, validated without heavy imports, the same from YAML, the command line and Python.

A key outside `stages` holds for every stage. The complete settings are saved in the run folder as `config.yaml` and,
given back with `--config`, make the same run. `envgym.config.resolve` makes them of their layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from envgym.agent import Agent, AgentConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.learner import Learner, LearnerConfig, RoleSpec
from envgym.registry import load_component, spec
from envgym.render import RenderKind
from envgym.rollout.config import RolloutConfig
from envgym.run_folder import stage_name
from envgym.services.declarations import Url, VariableName
from envgym.settings import Settings, validate_settings
from envgym.tasks.curriculum import CurriculumConfig
from envgym.workers.config import WorkersConfig
from envgym.workers.lora import LoraConfig

from .recipes import DEFAULT_MODEL, DEFAULT_RECIPE
from .renamed import rename_settings
from .words import AUTO, component_mapping, merge


class Component(BaseModel):
    """An environment, agent or learner: its `name`, and settings of its own beside it."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


STAGE = "stage:"
"""Beginning of a value that stands for an earlier stage's result."""
ComponentField = Annotated[Component, BeforeValidator(component_mapping)]


def _as_list(value: Any) -> Any:
    return [] if value in (None, "none") else [value] if isinstance(value, str) else value


Trackers = Annotated[list[Literal["tensorboard", "wandb", "swanlab"]], BeforeValidator(_as_list)]


class TextSource(Settings):
    """One source of text."""

    path: str | None = None
    """JSONL, Parquet, a folder of them, one that `datasets` saved, or a text file with a document a line. Unset: no
    text is mixed in."""
    split: str | None = None
    """The split of a folder that has several. Unset: `train`."""
    text: str = "text"
    """Field of the text."""


class WeightedSource(TextSource):
    """One source of several."""

    path: str
    """As for one alone."""
    weight: float = Field(1.0, gt=0)
    """Its share of the documents, against the others' weights."""


class PretrainConfig(TextSource):
    """Text that is taught as it stands beside what the policy samples; `learner.pretrain_coef` weighs it."""

    sources: dict[str, WeightedSource] = Field({})
    """Several sources in place of one: `sources.NAME.path`, `sources.NAME.weight`, …"""
    rows: int = Field(8, ge=1)
    """Documents a step, dealt out to its optimizer steps."""
    max_tokens: int = Field(512, ge=2)
    """Tokens a document is cut to; what it holds beyond them is not taught."""

    @property
    def paths(self) -> list[str]:
        """Folders and files of the text; none where none is mixed in."""
        own = [] if self.path is None else [self.path]
        return [*own, *(source.path for source in self.sources.values())]

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.path is not None and self.sources:
            raise ValueError("give pretrain.path, or pretrain.sources.NAME.path for each of several")
        return self


class EngineConfig(Settings):
    """The engine that samples."""

    kind: Literal["auto", "vllm", "transformers", "openai"] = "auto"
    """`auto` is vLLM where it is installed, else the transformers fallback, and says so. `openai` is any API of that
    form, for evaluation; `model` is then the name that the API knows."""
    count: int = Field(1, ge=1)
    """Engines that requests are spread over. One that dies is replaced, and its episodes are played again."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that each engine spreads every layer over."""
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
        own: tuple[str, ...] = ("dtype", "count", "tensor_parallel", "max_model_len", "args")
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


class CheckpointConfig(Settings):
    """Checkpoints, from which a run can be resumed."""

    every: int = Field(20, ge=0)
    """Steps between checkpoints; one is made after the last step and at Ctrl-C. 0: only those."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    background: bool = True
    """The run goes on while a checkpoint is written, from a copy in the host's memory. Off, it waits."""
    episodes_every: float = Field(30.0, ge=0)
    """Seconds between writings of the running step's episodes: a run that is killed in a long step goes on in its
    middle. A deterministic run plays the step again, so that it stays the same."""
    best: str | None = Field(None, pattern=r"^-?\w\S*$")
    """Metric by which the best checkpoint is kept as well, as `checkpoints/best`: `eval/score`, or any number of
    `metrics.jsonl`. The greatest value is the best; the least where the name ends in `loss` or has a minus before
    it."""

    @property
    def metric(self) -> str:
        """The metric that `best` names, or an empty string."""
        return (self.best or "").removeprefix("-")

    @property
    def needs_evaluation(self) -> bool:
        """True if only an evaluation has that metric."""
        return self.metric.startswith("eval/")


class PlacementConfig(Settings):
    """The place of one part of a stage: a role, the `engine`, a reward model of the environment."""

    nodes: int | None = Field(None, ge=1)
    """Machines that its processes are spread over, as many on each; by default as few as hold them."""
    gpus: float = Field(1.0, ge=0)
    """GPUs that each of its processes has: a share of one (0.5), or 0 for the CPU. An engine has as many as its
    `tensor_parallel`."""


class SyncConfig(Settings):
    """New weights to the engine after every step, and the check that they arrived."""

    tolerance: float | None = Field(None, gt=0)
    """Largest difference in log-probability, in nats, that sampler and trainer may have on the probe after a
    sync, and on average over a step's rows. Beyond it the run stops: it would learn from another policy's
    samples. By default 1e-3 for float32 weights and 0.5 for 16-bit ones, whose kernels differ by more."""
    transfer: Literal["files", "nccl", "cuda_ipc"] = "files"
    """`files`: in shared memory, or where engines are on other machines in the run's folder, which must then be on a
    disk that all have. Between GPUs, by vLLM's own transfers: `nccl`, and on GPUs that ranks and engines share
    `cuda_ipc`."""
    bucket_megabytes: int = Field(256, ge=1)
    """MiB of weights that travel at a time."""


class RoleConfig(Settings):
    """Settings that one of the learner's models (`critic`, `reference`) has to itself."""

    model: str | None = None
    """Folder or hub id of its weights; by default the stage's model. A critic may start from a reward model."""
    base_url: str | None = Field(None, pattern=r"^https?://")
    """Address of a vLLM server (`http://127.0.0.1:8000/v1`) that knows `model` by that name, in place of weights here:
    for a teacher, who is asked for its likeliest tokens."""
    api_key_env: str | None = None
    """Environment variable that holds that server's key."""
    lr: float | None = Field(None, ge=0)
    """Its peak learning rate; by default the learner's."""
    save: bool = False
    """Keep its weights in the run folder, under the role's name, when the stage ends. The policy's always are."""
    workers: dict[str, Any] = Field({})
    """Settings of its workers that differ from the stage's `workers`."""
    lora: dict[str, Any] = Field({})
    """Settings of its adapter that differ from the stage's `lora`; `{rank: 0}` trains it in full."""


class StageConfig(Settings):
    """One run of the one loop, or another task of a pipeline (`kind`)."""

    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    """Name of the stage's folder and of what it leaves to later ones (`stage:NAME`); by default its learner's."""
    kind: Literal["train", "rollout", "score"] = "train"
    """`rollout`: play the first `rollout.tasks_per_step` training tasks, `rollout.group_size` episodes of each, into a file.
    `score`: let the environment judge the answers of `data.path`, episodes or recorded data, into a file."""
    env: ComponentField
    """Environment: id, `file.py[:Name]`, import path or URL, and its own settings."""
    agent: ComponentField = Component(name=AUTO)
    """Agent, and its own settings; `auto` is the one the environment names."""
    learner: ComponentField
    """Learner, and its own settings (`learner.lr`)."""
    model: str = DEFAULT_MODEL
    """Hugging Face folder or hub id, a recipe that makes a model (its name or its YAML file), or `stage:NAME`; by
    default, after the first stage, what the stage before trained."""
    data: dict[str, Any] = Field({})
    """Tasks for the environment: `path`, field names (`prompt`, `answer`, …), a template, splits: see
    `envgym/tasks/config.py`."""
    render: RenderKind = "auto"
    """`chat`: the tokenizer's chat template; `text`: plain text with the speakers' names; `raw`: the texts alone, one
    after the other; `auto`: the template where there is one, else `text`."""
    steps: int | None = Field(100, ge=1)
    """Loop steps to stop after; null where `epochs` says how long."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training tasks to stop after, in place of `steps`."""
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pretrain: PretrainConfig = PretrainConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    lora: LoraConfig = LoraConfig()
    """Train adapters instead of weights, in every model that is trained."""
    roles: dict[str, RoleConfig] = Field({})
    """Settings of single models, by role."""
    colocate: Literal["auto", "none", "all"] | list[list[str]] = "auto"
    """Parts that share GPUs: sets of them (`[[actor, reference], [critic, reward]]`), or `all`. Where the engine shares
    with models that learn they take turns, and each has all of the memory in its own. `auto`: every part has GPUs of
    its own where there are enough, else all of them share and hold their memory at the same time."""
    placement: dict[str, PlacementConfig] = Field({})
    """Nodes and GPUs of each part, by its name."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, settings: Any) -> Any:
        return rename_settings(settings) if isinstance(settings, Mapping) else settings

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        self.steps = None if self.epochs else self.steps or type(self).model_fields["steps"].default
        return self

    def make_spec(self) -> EnvSpec:
        """The environment's spec. Raises `EnvgymError` for an unknown name or setting."""
        settings = self.env.settings
        if self.data:
            settings["data"] = self.data
        return spec(self.env.name, **settings)

    def learner_config(self) -> tuple[type[Learner], LearnerConfig]:
        """The learner's class and its validated settings."""
        learner_class: type[Learner] = load_component("learner", self.learner.name)
        return learner_class, validate_settings(learner_class.Config, self.learner.model_dump(), f"learner {self.learner.name}")

    def workers_of(self, role: str) -> WorkersConfig:
        """The settings of a role's workers."""
        own = self.roles.get(role, RoleConfig()).workers
        return validate_settings(WorkersConfig, merge(self.workers.model_dump(), own), f"roles.{role}.workers")

    def lora_of(self, role: str, spec: RoleSpec) -> LoraConfig:
        """The adapter of a role's model. Models that only score have none."""
        own = self.roles.get(role, RoleConfig()).lora
        if not spec.trained or own == {"rank": 0}:
            return LoraConfig()
        return validate_settings(LoraConfig, merge(self.lora.model_dump(), own), f"roles.{role}.lora")

    def is_base(self, role: str, roles: Mapping[str, RoleSpec]) -> bool:
        """True if a role is the policy as the stage found it, and the policy's own model without its adapter is that:
        then no other is loaded."""
        spec, own = roles[role], self.roles.get(role, RoleConfig())
        scores_alike = not spec.trained and spec.head == roles["actor"].head and own.model is None
        return scores_alike and self.lora_of("actor", roles["actor"]).rank > 0

    def takes_turns(self, part: str) -> bool:
        """True if a part shares GPUs with the engine by `colocate`: a role then takes turns with it."""
        sets = self.colocate if isinstance(self.colocate, list) else []
        return self.colocate == "all" or any({part, "engine"} <= set(one) for one in sets)

    def agent_config(self) -> tuple[type[Agent], AgentConfig]:
        """The agent's class and its validated settings."""
        agent_class: type[Agent] = load_component("agent", self.agent.name)
        return agent_class, validate_settings(agent_class.Config, self.agent.settings, f"agent {self.agent.name}")


class RunConfig(Settings):
    """A run: its name and place, what holds for all of it, and its stages."""

    recipe: str = DEFAULT_RECIPE
    """Shipped recipe or YAML file the settings start from."""
    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    """Run folder within `runs_dir`; by default made from the environment, the learner and the time."""
    runs_dir: str = "runs"
    """Parent of run folders."""
    evals_dir: str = "evals"
    """Parent of the folders of evaluations."""
    runtime: Literal["local", "ray"] = "local"
    """Place of workers: processes on this machine, or actors on Ray."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random in a run."""
    deterministic: bool = False
    """Same seed, same bits: waves of sorted requests, seeded sampling, no caches across them. Slower."""
    report_to: Trackers = Field([])
    """Outputs for metrics beside `metrics.jsonl`: any of `tensorboard`, `wandb`, `swanlab`."""
    project: str = "envgym"
    """Project that W&B and SwanLab file the run under, unless their own variables (`WANDB_PROJECT`) name one."""
    debug: bool = False
    """Workers run inside the controller, where a breakpoint works, and errors show their traceback."""
    stages: list[StageConfig] = Field(min_length=1)
    """Stages, in the order they run. Any value of a stage that is `stage:NAME` is what the stage of that name left: its
    model or, where it did not train, its episodes."""

    @property
    def stage_names(self) -> list[str]:
        """The names of the stages."""
        return [stage_name(stage.name, stage.learner.name) for stage in self.stages]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
