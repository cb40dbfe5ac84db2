"""Advantages in a tree of episodes (`rollout.branches`): a turn is compared with the others in its state.

The nodes of a group's tree are the sampled turns, its leaves the ends of episodes. A turn's value is the mean return of
the leaves below it, and its advantage compares that with the values of its siblings, the turns that were sampled in the
same state. A turn without siblings has the advantage of the turn before it: the two are one choice. So without branches
every turn has its episode's advantage in the group.

Sources: values by continuations from the state, A. Kazemnejad et al., "VinePPO: Refining Credit Assignment in RL
Training of LLMs" (2025), section 4; comparisons within a tree of agent steps, Y. Ji et al., "Tree Search for LLM Agent
Reinforcement Learning" (2025), section 3.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from envgym.types import Episode, Row, turn_node

from .advantages import mean_of

Node = tuple[str, int]
"""A sampled turn: the id of the episode that sampled it, and its number."""


def tree_advantages(
    episodes: Sequence[Episode],
    n_turns: Sequence[int],
    returns: Sequence[float],
    compare: Callable[[Sequence[float], Sequence[float]], Sequence[float]],
) -> list[list[float]]:
    """The advantages of each turn of each episode of a group, from the episodes' numbers of turns and returns.

    `compare` is given the values of turns in one state, and all returns. Turns after the group's only beginning, which
    can be compared with nothing, have the advantage 0.
    """
    by_id = {episode.id: episode for episode in episodes}
    paths = [
        [turn_node(episode, turn, by_id) for turn in range(max(1, n))]
        for episode, n in zip(episodes, n_turns, strict=True)
    ]
    values_below: dict[Node, list[float]] = defaultdict(list)
    siblings: dict[Node | None, dict[Node, None]] = defaultdict(dict)
    for path, value in zip(paths, returns, strict=True):
        for parent, node in zip([None, *path], path, strict=False):
            values_below[node].append(value)
            siblings[parent][node] = None
    advantages: dict[Node | None, float] = {None: 0.0}
    for path in paths:
        for parent, node in zip([None, *path], path, strict=False):
            nodes = list(siblings[parent])
            if node in advantages:
                continue
            compared = (
                compare([mean_of(values_below[n]) for n in nodes], returns) if len(nodes) > 1 else [advantages[parent]]
            )
            advantages.update(zip(nodes, compared, strict=True))
    return [[advantages[node] for node in path[:n]] for path, n in zip(paths, n_turns, strict=True)]


def learn_shared_turns_once(episodes: Sequence[Episode]) -> None:
    """Give the first episode with a turn the loss weights that all its copies have, and the mean of their advantages:
    the loss is the same, and each sampled token is in it once. The copies count as context."""
    by_id = {episode.id: episode for episode in episodes}
    holders: dict[Node, Row] = {}
    for episode in episodes:
        ends = [
            (row, end, length)
            for row in episode.rows
            for end, (length, _) in zip(row.turn_ends, row.answers, strict=True)
        ]
        for turn, (row, end, length) in enumerate(ends):
            holder = holders.setdefault(turn_node(episode, turn, by_id), row)
            if holder is not row:
                _move_weights(row, holder, slice(end - length, end))


def _move_weights(row: Row, holder: Row, tokens: slice) -> None:
    import numpy as np

    weights, moved_weights = holder.loss_weights[tokens], row.loss_weights[tokens]
    values, moved_values = holder.arrays["advantages"][tokens], row.arrays["advantages"][tokens]
    total = weights + moved_weights
    mean = (weights * values + moved_weights * moved_values) / np.maximum(total, np.finfo(np.float32).tiny)
    holder.arrays["advantages"][tokens] = np.where(values == moved_values, values, mean)
    holder.loss_weights[tokens] = total
    row.loss_weights[tokens], row.old_logprobs[tokens] = 0.0, np.nan
