"""Reward functions: their arguments, their results, checked, and final answers in text.

The environments made of them are in `envgym.env.rewards`. (The folder is not called `reward`, which in this package is
the decorator.)
"""

from envgym.types import Reward

from .functions import as_reward, as_rewards, prompt_text

__all__ = ["Reward", "as_reward", "as_rewards", "prompt_text"]
