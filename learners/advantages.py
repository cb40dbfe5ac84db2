"""From rewards to advantages, in the order in which it happens.

1. Shape: subtract penalties for length and truncation from an episode's raw reward, and clip it (`shaped_reward`).
2. Compare: score each episode, or each turn, against its group, by the formula in the learner's file
   (`turn_advantages`).
3. Broadcast that to the episode's action tokens (`ActionTokens`, `rewards_to_go`, `broadcast_turn_values`); or, with a
   critic or a KL in the reward, accumulate rewards per token (`gae_advantages`, `discounted_returns`).
4. Normalize over the tokens of the rollout or of a group (`normalize_advantages`).

Only action tokens are time steps. Feedback between two turns takes no time: otherwise its length would decide the sign
of an advantage. Arrays over the n action tokens of an episode ([n], `TokenArray`) are float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgym.types import Episode, Row, Status

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .policy_gradient import Credit, Scope, ShapingConfig

    TokenArray = NDArray[np.float64]
    Mask = NDArray[np.bool_]

Compare = Callable[[Sequence[float]], Sequence[float]]
"""One advantage per member of a group, from the members' rewards."""

EPS = 1e-8
"""Added to the standard deviation of the advantages before dividing by it."""

# ---------------------------------------------------------------------------------------------------------
# 1. The raw reward


def shaped_reward(episode: Episode, config: ShapingConfig) -> float:
    """The episode's reward after penalties and clip. Episodes without a reward must be dropped before this."""
    assert episode.reward is not None, "episodes without a reward are dropped before this"
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
    """0 up to `length - buffer` tokens, then linear up to `factor` at `length`, and `factor` beyond it.

    `n_tokens` counts only sampled tokens. Source: Q. Yu et al., "DAPO" (2025), eq. 13.
    """
    return min(max(n_tokens - (length - buffer), 0), buffer) / buffer * factor


def stopped_improperly(reward: float, coefficient: float) -> float:
    """The reward of a truncated episode: `coefficient * reward` for a coefficient of at least 0, else `coefficient`.

    Source: the stop-properly penalty of ProRL v2 (J. Hu et al., 2025).
    """
    return coefficient * reward if coefficient >= 0 else coefficient


# ---------------------------------------------------------------------------------------------------------
# 2. Against the group


def mean_of(rewards: Sequence[float]) -> float:
    """The mean. If all rewards are equal it is exactly their value, so that rounding creates no advantage."""
    if len(set(rewards)) == 1:
        return rewards[0]
    try:
        return math.fsum(rewards) / len(rewards)
    except OverflowError:  # the sum overflows although the mean does not: divide first
        return math.fsum(reward / len(rewards) for reward in rewards)


def turn_advantages(to_go: Sequence[Sequence[float]], rewards: Sequence[float], compare: Compare) -> list[list[float]]:
    """An advantage for each turn of each member of a group.

    `to_go[i][k]` is the return of member i from turn k on, `rewards[i]` its whole reward. A turn is compared with the
    same turn of the other members that reached it; if no other did, with the rewards of their whole episodes.
    """
    result: list[list[float]] = [[] for _ in to_go]
    for turn in range(max(map(len, to_go), default=0)):
        returns = {member: turns[turn] for member, turns in enumerate(to_go) if len(turns) > turn}
        compared = returns if len(returns) > 1 else dict(enumerate(rewards)) | returns
        for member, advantage in zip(compared, compare(list(compared.values())), strict=True):
            if member in returns:
                result[member].append(advantage)
    return result


# ---------------------------------------------------------------------------------------------------------
# 3. Over the action tokens


@dataclass(slots=True)
class ActionTokens:
    """An episode's action tokens: the tokens of positive loss weight, over all its rows in order.

    rows           the episode's rows, whose arrays are read and written
    token_indices  for each row, the indices of its action tokens
    turn_ends      for each turn, the number of action tokens up to its end; a turn may have no token. With credit by
                   episode, the whole episode is one turn
    rewards        for each turn, its reward
    reward         the episode's reward: the sum over its turns
    truncated      whether a limit ended the episode, and not the environment
    episode        the episode
    """

    rows: list[Row]
    token_indices: list[NDArray[np.intp]]
    turn_ends: list[int]
    rewards: list[float]
    reward: float
    truncated: bool
    episode: Episode

    @classmethod
    def from_episode(cls, episode: Episode, reward: float, credit: Credit) -> ActionTokens:
        """The action tokens of an episode. The difference between the shaped `reward` and the sum of the turn rewards
        goes to the last turn."""
        import numpy as np

        token_indices = [(row.loss_weights > 0).nonzero()[0] for row in episode.rows]
        truncated = episode.outcome.status is Status.TRUNCATED
        if credit == "episode":
            turn_ends = [sum(map(len, token_indices))]
            return cls(episode.rows, token_indices, turn_ends, [reward], reward, truncated, episode)
        turn_ends, rewards, n_tokens = [], list[float](), 0
        for row, indices in zip(episode.rows, token_indices, strict=True):
            ends, turn_rewards = turns(row)
            turn_ends += (n_tokens + np.searchsorted(indices, ends)).tolist()
            rewards += turn_rewards
            n_tokens += len(indices)
        if rewards:
            rewards[-1] = reward - sum(rewards[:-1])
        return cls(episode.rows, token_indices, turn_ends, rewards, reward, truncated, episode)

    def __len__(self) -> int:
        return sum(map(len, self.token_indices))

    def token_rewards(self) -> TokenArray:
        """[n] Turn rewards on each turn's last token. The reward of a turn without tokens goes to the token before
        it."""
        import numpy as np

        result = np.zeros(len(self))
        if len(self):
            for end, reward in zip(self.turn_ends, self.rewards, strict=True):
                result[max(end - 1, 0)] += reward
        return result

    def read(self, name: str, offset: int = 0) -> TokenArray:
        """[n] The rows' array `name` (or `old_logprobs`), `offset` tokens after each action token."""
        import numpy as np

        arrays = [row.old_logprobs if name == "old_logprobs" else row.arrays[name] for row in self.rows]
        parts = [array[indices + offset] for array, indices in zip(arrays, self.token_indices, strict=True)]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float64)

    def write(self, name: str, values: TokenArray) -> None:
        """Set the rows' array `name` to `values` [n] at the action tokens, and to 0 elsewhere."""
        import numpy as np

        start = 0
        for row, indices in zip(self.rows, self.token_indices, strict=True):
            row.arrays[name] = array = np.zeros(len(row.loss_weights), np.float32)
            array[indices] = values[start : start + len(indices)]
            start += len(indices)


def turns(row: Row) -> tuple[Sequence[int], list[float]]:
    """The token index of the end, and the reward, of each turn of a row.

    A turn is an action segment. A row whose numbers of turns and of action segments differ counts as one turn.
    """
    ends: Sequence[int] = row.turn_ends
    rewards = [turn.reward or 0.0 for turn in row.turns]
    if len(rewards) != len(ends):
        ends, rewards = ends[-1:], [sum(rewards)] if ends else []
    return ends, rewards


def rewards_to_go(rewards: Sequence[float], turn_ends: Sequence[int], gamma: float) -> list[float]:
    """Discounted return at each turn's last token: G_k = r_k + gamma^(end_{k+1} - end_k) G_{k+1}."""
    result: list[float] = []
    to_go, next_end = 0.0, 0
    for reward, end in zip(reversed(rewards), reversed(turn_ends), strict=True):
        to_go = reward + gamma ** max(0, next_end - end) * to_go
        next_end = end
        result.append(to_go)
    return result[::-1]


def broadcast_turn_values(values: Sequence[float], turn_ends: Sequence[int], gamma: float) -> TokenArray:
    """[n] Each turn's value at all its tokens, times gamma^j at the j-th token before the turn's last."""
    import numpy as np

    if gamma == 1:
        lengths = list(map(operator.sub, turn_ends, [0, *turn_ends]))
        return np.array(values, np.float64).repeat(lengths)
    result, start = np.zeros(turn_ends[-1] if turn_ends else 0), 0
    for value, end in zip(values, turn_ends, strict=True):
        result[start:end] = value * gamma ** np.arange(end - start - 1, -1, -1.0)
        start = end
    return result


def discounted_returns(rewards: TokenArray, gamma: float) -> TokenArray:
    """[n] G_t = r_t + gamma G_{t+1}, and G = 0 after the last token."""
    import numpy as np

    total, result = 0.0, []
    for reward in reversed(rewards.tolist()):
        total = reward + gamma * total
        result.append(total)
    return np.array(result[::-1], np.float64)


def gae_advantages(
    rewards: TokenArray, values: TokenArray, *, next_value: float, gamma: float, gae_lambda: float
) -> TokenArray:
    """PPO: [n] A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t.

    V_t is `values` [n], the value of the state in which token t was chosen; `next_value` that of the final state.
    Source: J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    eq. 11 and 16.
    """
    import numpy as np

    next_values = np.append(values[1:], next_value) if len(values) else values
    return discounted_returns(rewards + gamma * next_values - values, gamma * gae_lambda)


# ---------------------------------------------------------------------------------------------------------
# 4. Mean 0 and standard deviation 1


def normalize_advantages(
    groups: Sequence[Sequence[TokenArray]], scope: Scope, no_signal: Sequence[Sequence[Mask]] = ()
) -> list[list[TokenArray]]:
    """(A - mean) / (std + 1e-8) over all action tokens of the rollout (`batch`) or of each group (`group`); A - mean of
    the rollout (`batch_mean`).

    `groups` holds for each group the advantages [n] of each episode. The standard deviation is the biased one; equal
    advantages become exactly 0. Tokens masked by `no_signal`, [n] bool per episode, count in the statistics but get
    advantage 0: subtracting the mean would otherwise give them one. Source: J. Hu et al., "REINFORCE++" (2025).
    """
    import numpy as np

    if scope == "none":
        return [list(group) for group in groups]
    if scope == "group":
        advantages = [_standardize_tokens(group) for group in groups]
    else:
        episodes = [episode for group in groups for episode in group]
        standardized = iter(_standardize_tokens(episodes, scaled=scope == "batch"))
        advantages = [[next(standardized) for _ in group] for group in groups]
    if not no_signal:
        return advantages
    return [
        [np.where(mask, 0.0, episode) for episode, mask in zip(group, masks, strict=True)]
        for group, masks in zip(advantages, no_signal, strict=True)
    ]


def no_signal_masks(group: Sequence[TokenArray], turn_ends: Sequence[Sequence[int]]) -> list[Mask]:
    """[n] bool for each episode of a group: True at the tokens of turns in which all members' advantages are 0.

    `turn_ends[i]` are member i's.
    """
    import numpy as np

    masks = [np.zeros(len(episode), bool) for episode in group]
    for turn in range(max(map(len, turn_ends), default=0)):
        spans = [
            (member, slice(ends[turn - 1] if turn else 0, ends[turn]))
            for member, ends in enumerate(turn_ends)
            if turn < len(ends)
        ]
        if not any(group[member][tokens].any() for member, tokens in spans):
            for member, tokens in spans:
                masks[member][tokens] = True
    return masks


def _standardize_tokens(episodes: Sequence[TokenArray], *, scaled: bool = True) -> list[TokenArray]:
    import numpy as np

    tokens = np.concatenate([np.zeros(0), *episodes])
    if not len(tokens) or tokens.min() == tokens.max():
        return [np.zeros_like(episode) for episode in episodes]
    mean, divisor = tokens.mean(), tokens.std() + EPS if scaled else 1.0
    return [(episode - mean) / divisor for episode in episodes]
