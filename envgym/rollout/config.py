"""Settings of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from envgym.engine import MaxTokens, SamplingParams, Temperature, TopP
from envgym.settings import Settings
from envgym.types import SeedScope

BranchRule = Literal["evenly", "entropy", "spread"]


class FilterConfig(Settings):
    """Dynamic filtering: groups that give no gradient are dropped, and other tasks are rolled out instead. Replayed
    groups are never dropped."""

    zero_variance: bool = False
    """Drop groups whose episodes all have the same score."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Drop groups with a mean score at or below this."""
    max_score: float | None = Field(None, ge=0, le=1)
    """Drop groups with a mean score at or above this."""
    max_rounds: int = Field(10, ge=1)
    """Maximum rollout rounds of a training step. After them the step trains on the groups it has, with an alert."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"no score is above min_score={self.min_score:g} and below max_score={self.max_score:g}")
        return self


class RolloutConfig(Settings):
    """Settings of rollouts."""

    tasks_per_step: int = Field(64, ge=1)
    """Tasks (groups) per training step."""
    min_steps_per_epoch: int = Field(0, ge=0)
    """Minimum number of training steps per pass over the training tasks: with fewer tasks than that many full steps,
    `tasks_per_step` is lowered, and a line says so. Setting `tasks_per_step` sets this to 0."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    branches: int = Field(0, ge=0)
    """Further episodes per task, which continue finished ones of the group from one of their turns. 0: none."""
    branch_at: BranchRule = "evenly"
    """The turns at which they begin. `evenly`: one episode after the other, at equal distances; `entropy`: the turns
    whose first token had the largest -log p; `spread`: the first half evenly, the others where returns differ most."""
    max_tokens: MaxTokens = 512
    """Token budget of one turn."""
    temperature: Temperature = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution. 0 is greedy, without `top_p` and
    `top_k`, in evaluations and rollouts; training needs more than 0."""
    top_p: TopP = 1.0
    """Nucleus sampling. Below 1 the support is truncated and importance ratios are biased."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0: all tokens."""
    concurrency: int = Field(1024, ge=1)
    """Maximum number of concurrent episodes."""
    processes: int = Field(0, ge=0)
    """Run the episodes in this many processes, each with its own instances of the environment and its own connections
    to the engines, where one process with all episodes cannot feed the engines. 0: in the run's own process. The
    episodes are the same."""
    episode_timeout: float = Field(300.0, gt=0)
    """Seconds an episode may take, without the policy's time in the engine, before it counts as failed (`timeout`)."""
    policy_timeout: float = Field(3600.0, gt=0)
    """Seconds in the engine, waiting included, that the policy may take per episode. Then its turn ends as at
    `max_tokens`, and the episode is truncated (`time`)."""
    max_staleness: int = Field(0, ge=0, le=4)
    """Maximum number of training steps between the policy version that starts an episode and the one trained on it. 0:
    synchronous training. Above 0, episodes run during training and new weights take over in mid-episode; 1 is usual.
    No episode is discarded for its age: a training step waits for those at the limit."""
    retries: int = Field(2, ge=0)
    """Maximum retries of an episode that failed transiently (a timeout, a lost connection)."""
    refills: int = Field(1, ge=0)
    """Maximum number of permanently failed episodes that a group replaces; it is trained on without any others."""
    seed_scope: SeedScope | None = None
    """Episodes with the same environment seed. `task`: all episodes of a task, for the whole run; `group`: the members
    of a group, so that each visit of a task draws a new seed; `episode`: none. Unset: `group`, but in evaluations
    `task` or, with several episodes per task, `episode`. `reset` gets the seed of a task that has its own."""
    failed_reward: float | dict[str, float] | None = None
    """Reward of failed episodes: one number for every kind of failure but `engine`, or a number per kind
    (`rollout.failed_reward.environment=0`). Such an episode is not retried. It is trained on, and counts in metrics and
    evaluations. Unset: failed episodes are retried, then left out."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """Maximum share of failed episodes without a reward in a training step. A higher share after any of its rounds of
    rollouts stops the run."""
    filter: FilterConfig = FilterConfig()

    @field_validator("failed_reward", mode="before")
    @classmethod
    def _check_failed_reward(cls, value: Any) -> Any:
        """One sentence for both forms: pydantic's names the types of the union."""
        values = list(value.values()) if isinstance(value, Mapping) else [value]
        if value is not None and any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
            raise ValueError("must be a number, or numbers by kind of failure")
        return value

    def scope_in_evaluation(self, samples: int) -> SeedScope:
        """The scope of environment seeds in an evaluation with `samples` episodes per task."""
        return self.seed_scope or ("task" if samples == 1 else "episode")

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters of one turn; greedy sampling ignores all but `max_tokens` and the stop tokens."""
        if self.temperature == 0:
            return SamplingParams(self.max_tokens, temperature=0.0, stop_token_ids=stop_token_ids)
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)
