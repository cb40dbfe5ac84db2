"""Learners without a critic: an advantage is what was really earned, against what others of the group earned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .credit import turn_advantages
from .policy_gradient import PolicyGradient
from .returns import discounted_returns, rewards_to_go, spread
from .time_line import TimeLine

if TYPE_CHECKING:
    from .returns import Steps


class MonteCarlo(PolicyGradient):
    """Base of REINFORCE++, RLOO, GRPO and the like. A subclass is one function: `advantages`."""

    @abstractmethod
    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> Sequence[float]:
        """One advantage for each of several members of a group: what member i earned, `values[i]`, against `rewards`,
        what the members earned.

        The two are the same, but for a turn that fewer than two members reached: there `values[i]` is what was earned
        from that turn on, and `rewards` are those of the whole episodes.
        """

    def step_advantages(self, group: Sequence[TimeLine]) -> list[Steps]:
        gamma = self.config.gamma
        rewards = [line.reward for line in group]
        if self.config.credit == "turn":
            to_go = [rewards_to_go(line.rewards, line.ends, gamma) for line in group]
            by_turn = turn_advantages(to_go, rewards, self.advantages)
            earned = [spread(own, line.ends, gamma) for own, line in zip(by_turn, group, strict=True)]
        else:
            of_episodes = self.advantages(rewards, rewards)
            earned = [spread([own], [len(line)], gamma) for own, line in zip(of_episodes, group, strict=True)]
        if not self.pays_kl:
            return earned
        return [own + discounted_returns(self.kl_rewards(line), gamma) for own, line in zip(earned, group, strict=True)]
