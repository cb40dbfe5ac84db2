"""An episode as JSON, and back: what journals, rollout files and remote partners keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envgym.types import (
    Episode,
    Message,
    Objective,
    Outcome,
    Row,
    Segment,
    Status,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    as_messages,
)

from .exact import marked, restored, restored_names


def to_record(episode: Episode) -> dict[str, Any]:
    """Everything an episode holds but what scoring roles said of its rows and their labels, as JSON's own types.

    Messages have the form of OpenAI-compatible APIs, but that a call's arguments are a mapping, and that one which
    could not be read has its `error`. The task's answer and fields come back as they are where they are of Python's
    plain kinds (`envgym.episodes.exact`); what is not becomes text when it is written.
    """
    task = episode.task
    return {
        "id": episode.id,
        "env": episode.env,
        "task": {
            "id": task.id,
            "prompt": task.prompt if isinstance(task.prompt, str) else [_message(item) for item in task.prompt],
            "answer": marked(task.answer),
            "fields": marked(task.fields),
            "difficulty": task.difficulty,
            "seed": task.seed,
            "env": task.env,
        },
        "group": episode.group,
        "member": episode.member,
        "seed": episode.seed,
        "attempt": episode.attempt,
        "outcome": {
            "status": episode.outcome.status.value,
            "reason": episode.outcome.reason,
            "retryable": episode.outcome.retryable,
            "message": episode.outcome.message,
        },
        "reward": episode.reward,
        "score": episode.score,
        "score_is_reward": episode.score_is_reward,
        "answer": episode.answer,
        "metrics": dict(episode.metrics),
        "seconds": episode.seconds,
        "fingerprints": dict(episode.fingerprints),
        "messages": [_message(message) for message in episode.messages],
        "rows": [_row(row) for row in episode.rows],
    }


def from_record(record: Mapping[str, Any]) -> Episode:
    """The episode that `to_record` made `record` of. Raises `KeyError`, `TypeError` or `ValueError` for what is not
    such a record."""
    task, outcome = record["task"], record["outcome"]
    prompt = task["prompt"]
    return Episode(
        id=record["id"],
        task=Task(
            id=task["id"],
            prompt=prompt if isinstance(prompt, str) else as_messages(prompt),
            answer=restored(task["answer"]),
            fields=restored_names(task["fields"]),
            difficulty=task["difficulty"],
            seed=task["seed"],
            env=task["env"],
        ),
        outcome=Outcome(Status(outcome["status"]), outcome["reason"], outcome["retryable"], outcome["message"]),
        rows=[_row_of(row) for row in record["rows"]],
        reward=record["reward"],
        score=record["score"],
        score_is_reward=record.get("score_is_reward", False),  # rollout files do not say, nor older ones
        answer=record["answer"],
        metrics=dict(record["metrics"]),
        messages=list(as_messages(record["messages"])),
        env=record["env"],
        group=record["group"],
        member=record["member"],
        seed=record["seed"],
        attempt=record["attempt"],
        seconds=record["seconds"],
        fingerprints=dict(record["fingerprints"]),
    )


def _message(message: Message) -> dict[str, Any]:
    result = message.as_dict()
    for written, call in zip(result.get("tool_calls", ()), message.tool_calls, strict=True):
        if call.error:
            written["error"] = call.error
    return result


def _row(row: Row) -> dict[str, Any]:
    return {
        "objective": row.objective.value,
        "turns": [{"reward": turn.reward, "stop_reason": turn.stop_reason.value} for turn in row.turns],
        "segments": [
            {
                "role": segment.role,
                "token_ids": list(segment.token_ids),
                "weights": list(segment.weights),
                "logprobs": None if segment.logprobs is None else list(segment.logprobs),
                "versions": [{"version": v.version, "start": v.start, "end": v.end} for v in segment.versions],
                "temperature": segment.temperature,
            }
            for segment in row.segments
        ],
    }


def _row_of(record: Mapping[str, Any]) -> Row:
    segments = [
        Segment(
            segment["role"],
            list(segment["token_ids"]),
            list(segment["weights"]),
            None if segment["logprobs"] is None else list(segment["logprobs"]),
            tuple(VersionSpan(**span) for span in segment["versions"]),
            segment["temperature"],
        )
        for segment in record["segments"]
    ]
    turns = [Turn(turn["reward"], StopReason(turn["stop_reason"])) for turn in record["turns"]]
    return Row(segments, Objective(record["objective"]), turns)
