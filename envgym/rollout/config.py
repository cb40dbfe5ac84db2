"""Settings of playing episodes."""

from __future__ import annotations

from pydantic import Field

from envgym.engine import SamplingParams
from envgym.settings import Settings

from .filter import FilterConfig


class RolloutConfig(Settings):
    """Settings of playing episodes."""

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
    max_staleness: int = Field(0, ge=0, le=4)
    """Steps by which the policy that learns may be ahead of the one that begins an episode. 0: sampling and learning
    take turns. Above, tasks stay in play while the policy learns, and its new weights take over in mid-episode; 1 is
    usual. Nothing is thrown away for its age: a step waits for what may not get older."""
    retries: int = Field(2, ge=0)
    """Times a failed episode is played again where its failure may pass (a timeout, a lost connection)."""
    refills: int = Field(1, ge=0)
    """Times a group plays another episode in place of one that failed for good. Then it is learned from without."""
    max_failed_share: float = Field(0.5, gt=0, le=1)
    """A step in which more than this share of episodes failed stops the run."""
    filter: FilterConfig = FilterConfig()

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling parameters of one turn."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)
