"""A reward function of a few lines as a complete environment.

    @envgym.reward
    def brevity(completion):
        return 1 / (1 + len(completion.split()))

(The folder is not called `reward`, which in this package is the decorator.)
"""

from envgym.types import Reward

from .environments import GroupRewardSpec, RewardConfig, RewardSpec, environment_of, reward
from .functions import as_reward, as_rewards, prompt_text

__all__ = [
    "GroupRewardSpec", "Reward", "RewardConfig", "RewardSpec", "as_reward", "as_rewards", "environment_of",
    "prompt_text", "reward",
]  # fmt: skip
