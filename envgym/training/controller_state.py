"""The controller's share of a checkpoint as JSON: exact, so that a resumed run goes on as if nothing had happened, and
reading that of somebody else runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envgym.episodes.exact import marked, restored
from envgym.episodes.record import from_record, to_record
from envgym.errors import RunError
from envgym.types import Episode, Group

GROUP = "$group"
"""How a group of episodes is marked that waits in the buffer."""


def to_json(state: Mapping[str, Any]) -> str:
    """`Trainer.state` as text. Raises `RunError` for values that are not of Python's plain kinds."""
    try:
        return json.dumps(marked(state), default=_written)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"a checkpoint cannot be kept: {error}. What a learner's state() returns must be made of numbers, text, "
            "lists, tuples and mappings"
        ) from None


def from_json(text: str) -> dict[str, Any]:
    """The state that `to_json` wrote. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    state = restored(json.loads(text), {GROUP: _group})
    if not isinstance(state, dict) or not isinstance(state["progress"]["step"], int):
        raise ValueError("it holds no state of a controller")
    return state


def _written(value: Any) -> Any:
    if not isinstance(value, Group):
        raise TypeError(f"it holds a {type(value).__name__}")
    # As text first: what a task holds that JSON does not know (a date) is text also in the files of episodes.
    record = {"id": value.id, "episodes": [_episode_record(episode) for episode in value.episodes]}
    return {GROUP: json.loads(json.dumps(record, default=str))}


def _episode_record(episode: Episode) -> dict[str, Any]:
    record = to_record(episode)
    for row, written in zip(episode.rows, record["rows"], strict=True):
        written["label"], written["outputs"] = marked(row.label), row.outputs
    return record


def _group(record: Mapping[str, Any]) -> Group:
    """A group as the buffer holds it: its members are all of one task, and there is at least one."""
    episodes = []
    for written in record["episodes"]:
        episode = from_record(written)
        for row, of in zip(episode.rows, written["rows"], strict=True):
            row.label, row.outputs = restored(of["label"]), of["outputs"]
        episodes.append(episode)
    return Group(record["id"], episodes[0].task, episodes)
