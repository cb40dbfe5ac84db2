"""Settings of rollouts."""

from __future__ import annotations

from pydantic import Field

from envgym.engine import SamplingParams
from envgym.settings import Settings

from .filter import FilterConfig


class RolloutConfig(Settings):
    """Settings of rollouts."""

    tasks_per_step: int = Field(64, ge=1)
    """Tasks (groups) per training step."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    max_tokens: int = Field(512, ge=1)
    """Token budget of one turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the support is truncated and importance ratios are biased."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0: all tokens."""
    concurrency: int = Field(1024, ge=1)
    """Maximum number of concurrent episodes."""
    episode_timeout: float = Field(300.0, gt=0)
    """Seconds an episode may take before it counts as failed (`timeout`)."""
    max_staleness: int = Field(0, ge=0, le=4)
    """Maximum number of training steps between the policy version that starts an episode and the one trained on it. 0:
    synchronous training. Above 0, episodes run during training and new weights take over in mid-episode; 1 is usual.
    No episode is discarded for its age: a training step waits for those at the limit."""
    retries: int = Field(2, ge=0)
    """Maximum retries of an episode that failed transiently (a timeout, a lost connection)."""
    refills: int = Field(1, ge=0)
    """Maximum number of permanently failed episodes that a group replaces; it is trained on without any others."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """Maximum share of failed episodes in a training step. A higher share stops the run."""
    filter: FilterConfig = FilterConfig()

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters of one turn."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)
