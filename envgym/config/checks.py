"""Checks of a stage's settings: every name is looked up, and contradictory settings raise errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envgym.agent import Agent, AgentConfig
from envgym.errors import ConfigError, DataError, did_you_mean
from envgym.learner import Learner, LearnerConfig, RoleSpec
from envgym.tasks import DataConfig

from .schema import Component, StageConfig
from .words import AUTO


def complete_stage(stage: StageConfig, *, samples_only: bool = False) -> None:
    """Look up every name, fill in every component's defaults, and raise `EnvgymError` for contradictory settings.
    `samples_only`: the stage is not run, and lends its settings to an evaluation or a rollout."""
    if stage.rollout.temperature == 0 and stage.kind == "train" and not samples_only:
        raise ConfigError(
            "key 'rollout.temperature': must be more than 0, got 0: training needs samples that differ (0 is greedy, "
            "in envgym eval and envgym rollout)"
        )
    stage.engine.check()
    spec = stage.make_spec()
    for part in spec.parts():
        if isinstance(data := getattr(part.config, "data", None), DataConfig):
            data.check_paths()
        if stage.rollout.processes and (address := getattr(part.config, "listen", None)) is not None:
            raise ConfigError(
                f"rollout.processes={stage.rollout.processes}: several processes cannot listen at the one address "
                f"{address} (env.listen): name the servers in env.urls, or set rollout.processes=0"
            )
    if stage.agent.name == AUTO:
        stage.agent = Component(name=spec.agent, **stage.agent.settings)
    agent_class, agent_config = stage.agent_config()
    learner_class, learner_config = stage.learner_config()
    _check_roles(stage, learner_class(learner_config).roles, samples=agent_class.uses_policy)
    if stage.kind == "train" and learner_class.needs_policy_samples and not agent_class.uses_policy:
        raise ConfigError(
            f"learner {stage.learner.name} trains on episodes that the policy samples, and agent {stage.agent.name} "
            "replays recorded data: choose a learner for recorded data, or another agent"
        )
    if agent_class.uses_policy:
        _check_groups(stage, learner_class)
    if stage.rollout.branches and agent_class.uses_policy and not samples_only:
        _check_branches(stage, agent_class, agent_config, learner_config)
    if stage.rollout.max_staleness:
        _check_staleness(stage, learner_class, learner_config)
    if stage.checkpoint.needs_evaluation and not stage.eval.every:
        raise ConfigError(f"checkpoint.best={stage.checkpoint.best} is measured by evaluations: set eval.every above 0")
    _check_pretraining(stage, learner_config)
    stage.env = Component(name=stage.env.name, **spec.config.model_dump(mode="json", exclude={"data"}))
    stage.agent = Component(name=stage.agent.name, **agent_config.model_dump(mode="json"))
    stage.learner = Component(**learner_config.model_dump(mode="json"))


def _check_staleness(stage: StageConfig, learner_class: type[Learner], config: LearnerConfig) -> None:
    """Samples of older policies need importance weights, or a clipped ratio to the policy that sampled them. An engine
    that samples during training cannot give its memory to the models."""
    if any(map(stage.takes_turns, learner_class(config).roles)):
        raise ConfigError(
            f"rollout.max_staleness={stage.rollout.max_staleness} samples during training, so the engine cannot share "
            "GPUs with the models in turns: set rollout.max_staleness=0, or give the engine separate GPUs (colocate)"
        )
    is_corrected = getattr(getattr(config, "correction", None), "kind", "none") != "none"
    if getattr(config, "needs_correction", False) and not is_corrected:
        raise ConfigError(
            f"rollout.max_staleness={stage.rollout.max_staleness}: learner {stage.learner.name} would treat samples of "
            "older policies as the current policy's: set learner.correction.kind=tis, or learner.old_logprobs=rollout "
            "with a clipped policy_loss"
        )


def _check_roles(stage: StageConfig, roles: Mapping[str, RoleSpec], *, samples: bool) -> None:
    for role in stage.roles:
        if role not in roles:
            raise ConfigError(
                f"learner {stage.learner.name} has no role {role!r} with these settings.{did_you_mean(role, roles)}"
            )
    for role, role_spec in roles.items():
        workers, lora = stage.workers_of(role), stage.lora_of(role, role_spec)
        role_config = stage.role(role)
        if not role_spec.trained and role_config.learner:
            raise ConfigError(f"roles.{role}.learner: the {role} is not trained, so it has no optimizer")
        workers.check(role, stage.learner_config_of(role) if role_spec.trained else None)
        lora.check(role, workers, is_sampled=samples and role == "actor")
        if role_spec.trained and workers.offload_parameters and samples and stage.takes_turns(role):
            raise ConfigError(
                f"workers.offload_parameters of the {role}, which shares GPUs with the engine in turns: DeepSpeed "
                "cannot move it. Leave it out, or give the engine separate GPUs (colocate)"
            )
        if role_spec.needs_model and role_config.model is None and stage.kind == "train":
            raise ConfigError(f"learner {stage.learner.name} needs a model for its {role}: set roles.{role}.model")
        if role_config.base_url is not None and not role_spec.top_k:
            raise ConfigError(
                f"roles.{role}.base_url: an API gives a teacher's most likely tokens, no {role}'s outputs"
            )
        if role_config.lora and not role_spec.trained:
            raise ConfigError(f"roles.{role}.lora: the {role} is not trained, so it has no adapter")
        if stage.is_base(role, roles) and (role_config.workers or role_config.save):
            raise ConfigError(
                f"roles.{role}: with lora the {role} is the policy's own model without its adapter, which has no "
                "separate workers or weights: give it a model, or leave this out"
            )


def _check_groups(stage: StageConfig, learner_class: type[Learner]) -> None:
    size, min_size = stage.rollout.group_size, learner_class.min_group_size
    if size < min_size:
        raise ConfigError(
            f"learner {stage.learner.name} compares the episodes of one task: "
            f"rollout.group_size must be at least {min_size}, not {size}"
        )
    if stage.curriculum.skip and size < 2:
        raise ConfigError("curriculum.skip uses the scores of a group: rollout.group_size must be at least 2")
    if stage.rollout.filter.zero_variance and size < 2:
        raise ConfigError("rollout.filter.zero_variance compares the scores of a group: set rollout.group_size above 1")


def _check_branches(
    stage: StageConfig, agent_class: type[Agent], agent_config: AgentConfig, learner_config: LearnerConfig
) -> None:
    """Branches repeat the turns of their parents, and a learner must know that these are the same."""
    if getattr(learner_config, "advantage", "") != "tree":
        raise ConfigError(
            f"rollout.branches: learner {stage.learner.name} would learn the turns that episodes share several times: "
            "set learner.advantage=tree, with a learner that has it, or rollout.branches=0"
        )
    if not agent_class.steps_are_turns:
        raise ConfigError(
            f"rollout.branches: the turns of agent {stage.agent.name} are recorded, and not what it does in the "
            "environment, so they cannot be repeated: set rollout.branches=0, or choose another agent"
        )
    if getattr(agent_config, "max_turns", None) == 1:
        raise ConfigError(
            f"rollout.branches begin after an episode's first turn, and agent {stage.agent.name} takes one "
            "(agent.max_turns=1): set rollout.branches=0, or agent=multi_turn"
        )


def _check_pretraining(stage: StageConfig, learner_config: LearnerConfig) -> None:
    if not stage.pretrain.paths:
        return
    if not getattr(learner_config, "pretrain_coef", 0.0) > 0:
        raise ConfigError(
            f"pretrain.path adds text to policy-gradient training, which learner {stage.learner.name} would give no "
            "weight: it needs a setting pretrain_coef above 0"
        )
    for path in stage.pretrain.paths:
        if not Path(path).exists():
            raise DataError(f"pretrain.path: there is no file {path}")
