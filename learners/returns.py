"""Returns over an episode's time line, in which only action tokens are time steps.

What the environment says between two turns takes no time: with it as time steps, its length would decide the sign of
an advantage. All arrays are float64, one number for each time step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps = NDArray[np.float64]


def discounted_returns(rewards: Steps, gamma: float) -> Steps:
    """[n] G_t = r_t + gamma G_{t+1}, and 0 after the last step."""
    return _accumulated(rewards, gamma)


def generalised_advantages(
    rewards: Steps, values: Steps, *, next_value: float, gamma: float, gae_lambda: float
) -> Steps:
    """[n] A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t.

    `values` [n] are of the states in which each token was chosen; `next_value` is of the state after the last one.
    Source: J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    eq. 11 and 16.
    """
    import numpy as np

    following = np.append(values[1:], next_value) if len(values) else values
    return _accumulated(rewards + gamma * following - values, gamma * gae_lambda)


def rewards_to_go(rewards: Sequence[float], ends: Sequence[int], gamma: float) -> list[float]:
    """What is earned from each turn's last token on: G_k = r_k + gamma^(ends[k+1] - ends[k]) G_{k+1}.

    `ends[k]` is how many time steps there are up to and with turn k.
    """
    result: list[float] = []
    after, end_after = 0.0, 0
    for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
        after = reward + gamma ** max(0, end_after - end) * after
        end_after = end
        result.append(after)
    return result[::-1]


def spread(values: Sequence[float], ends: Sequence[int], gamma: float) -> Steps:
    """[n] Give each turn's value to its tokens: gamma^j times it, j steps before the turn's last token."""
    import numpy as np

    result, start = np.zeros(ends[-1] if ends else 0), 0
    for value, end in zip(values, ends, strict=True):
        result[start:end] = value * gamma ** np.arange(end - start - 1, -1, -1.0)
        start = end
    return result


def _accumulated(values: Steps, decay: float) -> Steps:
    """[n] x_t + decay x_{t+1} + decay^2 x_{t+2} + …"""
    import numpy as np

    total, result = 0.0, []
    for value in reversed(values.tolist()):
        total = value + decay * total
        result.append(total)
    return np.array(result[::-1], np.float64)
