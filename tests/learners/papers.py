"""The papers' formulas in float64, token by token, as slow and as plain as they are written.

What the learners do is held against this. It is written from the papers and shares no code with them: no arrays of a
batch, no masks, no padding. An episode is a list of tokens; only tokens that the policy sampled are among them.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Token:
    """What there is to know of a sampled token. `weight` is how much it counts."""

    new: float
    """log pi: the model's, as it is now."""
    old: float = 0.0
    """log pi_old: the model's, at the start of the update."""
    sampled: float = 0.0
    """log pi of the sampler."""
    reference: float = 0.0
    advantage: float = 0.0
    entropy: float = 0.0
    weight: float = 1.0


# -- rewards to advantages --------------------------------------------------------------------------------


def discounted_returns(rewards, gamma):
    """G_t = sum over s >= t of gamma^(s - t) r_s."""
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def gae(rewards, values, next_value, gamma, lam):
    """Schulman et al. 2016, eq. 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}; eq. 10: delta_t = r_t + gamma
    V(s_{t+1}) - V(s_t)."""
    values = [*values, next_value]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    return [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]


def group_advantages(name, rewards, eps=1e-6):
    """Ragged groups: each call is one group."""
    r = np.array(rewards, np.float64)
    n = len(r)
    if name in ("ppo", "reinforce++"):
        return list(r)
    if len(set(rewards)) == 1:
        return [0.0] * n
    if name == "rloo":
        return [r[i] - (r.sum() - r[i]) / (n - 1) for i in range(n)]
    if name == "grpo":
        return list((r - r.mean()) / (r.std(ddof=1) + eps))
    assert name in ("dr_grpo", "reinforce++_baseline")
    return list(r - r.mean())


def normalised(tokens):
    tokens = np.array(tokens, np.float64)
    return (tokens - tokens.mean()) / (tokens.std() + 1e-8)


# -- losses -----------------------------------------------------------------------------------------------


@dataclass
class Loss:
    """The settings of a policy loss."""

    policy_loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token"
    constant_length: int = 1024
    entropy_coef: float = 0.0
    kl: dict = field(default_factory=dict)
    correction: dict = field(default_factory=dict)


def kl(token, estimator):
    """Schulman 2020, from samples of pi: with r = pi_ref / pi, k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    log_r = token.reference - token.new
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(min(log_r, 20.0)) - 1 - log_r}[estimator]


def sequence_ratio(episode):
    """GSPO, eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)."""
    count = sum(token.weight for token in episode)
    return np.exp(sum(token.weight * (token.new - token.old) for token in episode) / count)


def surrogate(token, episode, settings):
    """What one token adds to the policy loss."""
    ratio = sequence_ratio(episode) if settings.policy_loss == "gspo" else np.exp(token.new - token.old)
    bounded = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
    if settings.policy_loss == "reinforce":
        return -token.advantage * token.new
    if settings.policy_loss == "cispo":
        return -bounded * token.advantage * token.new
    objective = min(ratio * token.advantage, bounded * token.advantage)
    if settings.dual_clip is not None and token.advantage < 0:
        objective = max(objective, settings.dual_clip * token.advantage)
    return -objective


def correction_weights(episode, kind="none", low=0.5, high=5.0):
    """One factor for each token; None drops it."""
    weights = [np.exp(token.old - token.sampled) for token in episode]
    if kind == "none":
        return [1.0] * len(episode)
    if kind == "tis":
        return [min(weight, high) for weight in weights]
    if kind == "icepop":
        return [weight if low <= weight <= high else None for weight in weights]
    count = sum(token.weight for token in episode)
    mean = np.exp(sum(token.weight * (token.old - token.sampled) for token in episode) / count)
    return [min(weight, high) if low <= mean <= high else None for weight in weights]


def policy_loss(episodes, settings):
    """The loss of an optimizer step, whose episodes these are (those without a token among them)."""
    per_episode = []
    for episode in episodes:
        factors = correction_weights(episode, **settings.correction) if episode else []
        kept = [token for token, factor in zip(episode, factors, strict=True) if factor is not None]
        total = 0.0
        for token, factor in zip(episode, factors, strict=True):
            if factor is None:
                continue
            loss = factor * surrogate(token, kept, settings) - settings.entropy_coef * token.entropy
            if settings.kl.get("coef") and settings.kl.get("applied_to") == "loss":
                loss += settings.kl["coef"] * kl(token, settings.kl["estimator"])
            total += token.weight * loss
        per_episode.append((total, sum(token.weight for token in episode)))
    if settings.aggregation == "token":
        return sum(total for total, _ in per_episode) / sum(count for _, count in per_episode)
    if settings.aggregation == "constant":
        return sum(total for total, _ in per_episode) / (len(episodes) * settings.constant_length)
    return sum(total / count for total, count in per_episode if count) / len(episodes)


def value_loss(value, old, target, clip):
    """PPO's: half the larger of the squared errors of the value and of the value held near the old one."""
    near = old + min(max(value - old, -clip), clip)
    return 0.5 * max((near - target) ** 2, (value - target) ** 2)
