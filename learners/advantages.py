"""From rewards to advantages, in the order in which it happens.

1. Shape: an episode's raw reward pays for length and truncation, and is clipped (`shaped_reward`).
2. Compare: an episode, or a turn, is worth more or less than the others of its group (`standardised`, `centred`,
   `left_one_out`; `turn_advantages`).
3. Spread that over the episode's action tokens (`ActionTokens`, `rewards_to_go`, `spread`); or, with a critic or a KL
   in the reward, sum up what each token earned (`generalised_advantages`, `discounted_returns`).
4. Normalise over the tokens of the rollout or of a group (`normalised`).

Only action tokens are time steps. Feedback between two turns takes no time: with it as time steps, its length would
decide the sign of an advantage. Numbers of time steps ([n], `Steps`) are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgym.learner import TrainSample, Trajectory
from envgym.types import Episode, Row, Status

from .settings import Scope, ShapingConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps = NDArray[np.float64]
    Mask = NDArray[np.bool_]

Compare = Callable[[Sequence[float], Sequence[float]], Sequence[float]]
"""(values, rewards) -> one advantage for each member: its value against the group's rewards."""

HUGE = 2.0**1000
"""Size of rewards above which they are first divided by it. A power of two loses no digit."""
EPS = 1e-8
"""Added to the standard deviation of tokens before dividing by it."""

# ---------------------------------------------------------------------------------------------------------
# 1. The raw reward


def shaped_reward(episode: Episode, config: ShapingConfig) -> float:
    """The reward that the episode counts with. It must have one."""
    assert episode.reward is not None, "an episode without a reward is compared with none"
    reward = episode.reward
    if config.overlong_length is not None and config.overlong_buffer is not None:
        n_tokens = sum(row.n_action_tokens for row in episode.rows)
        reward -= overlong_penalty(n_tokens, config.overlong_length, config.overlong_buffer, config.overlong_factor)
    if config.stop_properly is not None and episode.outcome.status is Status.TRUNCATED:
        reward = stopped_improperly(reward, config.stop_properly)
    if config.clip is not None:
        reward = min(max(reward, config.clip[0]), config.clip[1])
    return reward


def overlong_penalty(n_tokens: int, length: int, buffer: int, factor: float) -> float:
    """0 up to `length - buffer` tokens, from there linearly up to `factor` at `length`, and `factor` beyond it.

    Tokens are sampled ones alone. Source: Q. Yu et al., "DAPO" (2025), eq. 13.
    """
    return min(max(n_tokens - (length - buffer), 0), buffer) / buffer * factor


def stopped_improperly(reward: float, coefficient: float) -> float:
    """The reward of a truncated episode: `coefficient` times it where that is not negative, else `coefficient`.

    Source: the stop-properly penalty of ProRL v2 (J. Hu et al., 2025).
    """
    return coefficient * reward if coefficient >= 0 else coefficient


# ---------------------------------------------------------------------------------------------------------
# 2. Against the group. `values` are what members earned and `rewards` what the group did; the two are the same but for
# a turn that fewer than two members reached.


def standardised(values: Sequence[float], rewards: Sequence[float], eps: float) -> list[float]:
    """GRPO: (v - mean) / (std + eps) with the mean and standard deviation of the group's rewards, n >= 2; exactly 0
    where all of these are equal.

    Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1. The standard deviation is the unbiased one.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(values)
    if max(map(abs, [*values, *rewards])) > HUGE:  # differences of these may be no floats, nor their squares' root
        return standardised([value / HUGE for value in values], [reward / HUGE for reward in rewards], eps / HUGE)
    mean = mean_of(rewards)
    # `hypot`, because squares of very large or very small rewards would overflow or vanish.
    std = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)
    return [(value - mean) / (std + eps) for value in values]


def centred(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO and REINFORCE++-baseline: v - mean of the group's rewards; exactly 0 for values that are all the
    rewards there are.

    Source: Z. Liu et al., "Understanding R1-Zero-Like Training" (2025), section 3.2.
    """
    mean = mean_of(rewards)
    return [value - mean for value in values]


def left_one_out(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """RLOO: v_i - mean of the rewards other than the i-th, n >= 2.

    Source: A. Ahmadian et al., "Back to Basics" (2024), section 3.4.
    """
    return [value - mean_of([*rewards[:i], *rewards[i + 1 :]]) for i, value in enumerate(values)]


def mean_of(rewards: Sequence[float]) -> float:
    """The mean, exactly theirs where all are equal: one that is off by a bit would make an advantage of nothing."""
    if len(set(rewards)) == 1:
        return rewards[0]
    try:
        return math.fsum(rewards) / len(rewards)
    except OverflowError:  # of the sum, which the mean is not as large as
        return math.fsum(reward / len(rewards) for reward in rewards)


def turn_advantages(to_go: Sequence[Sequence[float]], rewards: Sequence[float], compare: Compare) -> list[list[float]]:
    """An advantage for each turn of each member of a group.

    `to_go[i][k]` is what member i earned from turn k on, `rewards[i]` in all. A turn is compared with the same turn
    of the members that reached it; where fewer than two did, with the rewards of the whole episodes.
    """
    result: list[list[float]] = [[] for _ in to_go]
    for turn in range(max(map(len, to_go), default=0)):
        reached = [member for member, own in enumerate(to_go) if len(own) > turn]
        if len(reached) > 1:
            values = [to_go[member][turn] for member in reached]
            advantages = compare(values, values)
        else:
            values = list(rewards)
            values[reached[0]] = to_go[reached[0]][turn]
            advantages = [compare(values, rewards)[reached[0]]]
        for member, advantage in zip(reached, advantages, strict=True):
            result[member].append(advantage)
    return result


# ---------------------------------------------------------------------------------------------------------
# 3. Over the action tokens


@dataclass(slots=True)
class ActionTokens:
    """An episode's time steps: the tokens that count (weight above 0), of all its rows in order.

    samples        the episode's rows, whose arrays are read and written
    token_indices  for each row, the indices [n of the row] of its time steps
    turn_ends      for each turn, how many steps there are up to and with its last; a turn may have none
    rewards        for each turn, its reward
    reward         the episode's: the sum of its turns'
    truncated      whether a limit ended it, and not the environment's word
    """

    samples: list[TrainSample]
    token_indices: list[NDArray[np.intp]]
    turn_ends: list[int]
    rewards: list[float]
    reward: float
    truncated: bool

    @classmethod
    def of(cls, trajectory: Trajectory, reward: float) -> ActionTokens:
        """The action tokens of a trajectory. What `reward` is more or less than the rewards of the turns (penalties, a
        clip) is the last turn's."""
        import numpy as np

        episode, samples = trajectory.episode, trajectory.samples
        token_indices = [np.flatnonzero(sample.loss_weights > 0) for sample in samples]
        turn_ends, rewards, steps = [], [], 0
        for row, indices in zip(episode.rows, token_indices, strict=True):
            for end, turn_reward in turns(row):
                turn_ends.append(steps + int(np.searchsorted(indices, end)))
                rewards.append(turn_reward)
            steps += len(indices)
        if rewards:
            rewards[-1] = reward - sum(rewards[:-1])
        truncated = episode.outcome.status is Status.TRUNCATED
        return cls(samples, token_indices, turn_ends, rewards, reward, truncated)

    def __len__(self) -> int:
        return sum(map(len, self.token_indices))

    def step_rewards(self, *, by_turn: bool) -> Steps:
        """[n] Rewards on the last token of their own turn, or all on the episode's last. The reward of a turn without
        a step is on the step before it."""
        import numpy as np

        result = np.zeros(len(self))
        if len(self):
            placed = zip(self.turn_ends, self.rewards, strict=True) if by_turn else [(len(self), self.reward)]
            for end, reward in placed:
                result[max(end - 1, 0)] += reward
        return result

    def read(self, name: str, offset: int = 0) -> Steps:
        """[n] The samples' array `name` (or `old_logprobs`), `offset` tokens after each time step."""
        import numpy as np

        arrays = [s.old_logprobs if name == "old_logprobs" else s.arrays[name] for s in self.samples]
        parts = [array[indices + offset] for array, indices in zip(arrays, self.token_indices, strict=True)]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float64)

    def write(self, name: str, values: Steps) -> None:
        """Make the samples' array `name` of one number [n] for each time step; it is 0 elsewhere."""
        import numpy as np

        start = 0
        for sample, indices in zip(self.samples, self.token_indices, strict=True):
            sample.arrays[name] = np.zeros(len(sample), np.float32)
            sample.arrays[name][indices] = values[start : start + len(indices)]
            start += len(indices)


def turns(row: Row) -> list[tuple[int, float]]:
    """(token index of its end, its reward) for each turn of a row.

    A turn is an action segment. Where a row holds other numbers of the two, nobody knows which belongs to which, and
    it counts as one turn.
    """
    ends, length = [], 0
    for segment in row.segments:
        length += len(segment)
        if segment.role == "action":
            ends.append(length)
    rewards = [turn.reward or 0.0 for turn in row.turns]
    if len(rewards) != len(ends):
        ends, rewards = ends[-1:], [sum(rewards)] if ends else []
    return list(zip(ends, rewards, strict=True))


def rewards_to_go(rewards: Sequence[float], turn_ends: Sequence[int], gamma: float) -> list[float]:
    """Rewards still to come at each turn's last token: G_k = r_k + gamma^(end_{k+1} - end_k) G_{k+1}."""
    result: list[float] = []
    after, end_after = 0.0, 0
    for reward, end in zip(reversed(rewards), reversed(turn_ends), strict=True):
        after = reward + gamma ** max(0, end_after - end) * after
        end_after = end
        result.append(after)
    return result[::-1]


def spread(values: Sequence[float], turn_ends: Sequence[int], gamma: float) -> Steps:
    """[n] Give each turn's value to its tokens: gamma^j times it, j steps before the turn's last token."""
    import numpy as np

    result, start = np.zeros(turn_ends[-1] if turn_ends else 0), 0
    for value, end in zip(values, turn_ends, strict=True):
        result[start:end] = value * gamma ** np.arange(end - start - 1, -1, -1.0)
        start = end
    return result


def discounted_returns(rewards: Steps, gamma: float) -> Steps:
    """[n] G_t = r_t + gamma G_{t+1}, and 0 after the last step."""
    import numpy as np

    total, result = 0.0, []
    for reward in reversed(rewards.tolist()):
        total = reward + gamma * total
        result.append(total)
    return np.array(result[::-1], np.float64)


def generalised_advantages(
    rewards: Steps, values: Steps, *, next_value: float, gamma: float, gae_lambda: float
) -> Steps:
    """PPO: [n] A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t.

    `values` [n] are of the states in which each token was chosen; `next_value` is of the state after the last one.
    Source: J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    eq. 11 and 16.
    """
    import numpy as np

    following = np.append(values[1:], next_value) if len(values) else values
    return discounted_returns(rewards + gamma * following - values, gamma * gae_lambda)


# ---------------------------------------------------------------------------------------------------------
# 4. Mean 0 and standard deviation 1


def normalised(
    groups: Sequence[Sequence[Steps]], scope: Scope, no_signal: Sequence[Sequence[Mask]] = ()
) -> list[list[Steps]]:
    """(A - mean) / (std + 1e-8) over all action tokens of the rollout (`batch`) or of each group by itself; A - mean of
    the rollout (`batch_mean`).

    `groups` holds for each group the advantages [n] of each episode. The standard deviation is that of the tokens
    themselves (biased); equal advantages become exactly 0. So do tokens with `no_signal`, [n] bool for each episode:
    they count in mean and deviation, but the mean, which long episodes pull their way, must not move what nothing is
    known of. Source: J. Hu et al., "REINFORCE++" (2025).
    """
    import numpy as np

    if scope == "none":
        return [list(group) for group in groups]
    if scope == "group":
        advantages = [_standard_tokens(group) for group in groups]
    else:
        every = [episode for group in groups for episode in group]
        together = iter(_standard_tokens(every, scaled=scope == "batch"))
        advantages = [[next(together) for _ in group] for group in groups]
    if not no_signal:
        return advantages
    return [
        [np.where(mask, 0.0, episode) for episode, mask in zip(group, masks, strict=True)]
        for group, masks in zip(advantages, no_signal, strict=True)
    ]


def without_variance(group: Sequence[Steps], turn_ends: Sequence[Sequence[int]]) -> list[Mask]:
    """[n] bool for each episode of a group: the tokens of turns for which no member has an advantage over the others.

    `turn_ends[i]` are those of member i, or of the episode as one turn.
    """
    import numpy as np

    masks = [np.zeros(len(episode), bool) for episode in group]
    for turn in range(max(map(len, turn_ends), default=0)):
        reached = [
            (member, slice(ends[turn - 1] if turn else 0, ends[turn]))
            for member, ends in enumerate(turn_ends)
            if turn < len(ends)
        ]
        if not any(group[member][tokens].any() for member, tokens in reached):
            for member, tokens in reached:
                masks[member][tokens] = True
    return masks


def _standard_tokens(episodes: Sequence[Steps], *, scaled: bool = True) -> list[Steps]:
    import numpy as np

    tokens = np.concatenate([np.zeros(0), *episodes])
    if not len(tokens) or tokens.min() == tokens.max():
        return [np.zeros_like(episode) for episode in episodes]
    mean, divisor = tokens.mean(), tokens.std() + EPS if scaled else 1.0
    return [(episode - mean) / divisor for episode in episodes]
