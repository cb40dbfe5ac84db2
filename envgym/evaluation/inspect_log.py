"""An evaluation as logs of inspect_ai, which `inspect view` shows and `read_eval_log` reads.

The format is version 2 of inspect_ai's `EvalLog` as JSON, one file per environment. Nothing here imports inspect_ai,
which would bring some thirty packages and older pins into every installation; install it in a separate environment to
view logs.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.types import Episode, Group, Message, Status, StopReason

SCORER = "envgym"
API = "none"
"""inspect_ai's API name for no model. inspect_ai requires an API, and our model may be a folder or on any server."""
LIMITS = {"turns": "turn", "tokens": "token", "length": "token", "context": "context", "time": "time"}
"""Our limits under inspect_ai's names; the others are `custom`."""
STOP_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "max_tokens"}
SETTINGS = ("env", "split", "weight", "cluster", "samples", "sampling", "fingerprints")
"""Keys of an environment's result that hold its settings."""
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def write_inspect_logs(folder: Path, result: Mapping[str, Any], groups: Mapping[str, Sequence[Group]]) -> None:
    """Write a log per environment of an evaluation into `folder`, from its `result` and its groups of episodes."""
    folder.mkdir(exist_ok=True)
    for env in result["envs"]:
        log = inspect_log(env, result, groups[env])
        write_atomically(folder / log_name(env, result["began"]), json.dumps(log, allow_nan=False) + "\n")


def inspect_log(env: str, result: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """The log of one environment of an evaluation, as JSON's own types; `result` is the evaluation's.

    An episode is a sample: its id is the task's key, its epoch the member's number from 1 (higher if an evaluation ran
    the task in several groups). A failed episode without a reward has an `error` and no score, so that inspect_ai omits
    it from its metrics, as envgym does; a truncated one has the `limit` it met, with its usage. The model's name is
    `none/MODEL`, and in the metadata MODEL alone. Keep the order of the keys when the log is written.
    """
    env_result, created, model = result["envs"][env], result["began"], f"{API}/{result['model']}"
    settings = {name: result[name] for name in ("suite", "seed", "model")} | {
        name: env_result[name] for name in SETTINGS
    }
    episodes = sorted(
        (episode for group in groups for episode in group.episodes),
        key=lambda episode: (episode.group_id, episode.member),
    )
    samples = [_inspect_sample(episode, epoch, model, created) for episode, epoch in _epochs(episodes)]
    scored: dict[str, list[float]] = {}
    for episode in episodes:
        task_scores = scored.setdefault(episode.task.key, [])
        if episode.is_counted and episode.score is not None:
            task_scores.append(episode.score)
    usage = Counter({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0})
    for sample in samples:
        usage.update(sample["output"]["usage"])
    identity = _uuid(created, env, model)
    config = {name: value for name in SAMPLING if (value := env_result["sampling"].get(name)) is not None}
    metrics = {name: value for name, value in inspect_metrics(env_result).items() if value is not None}
    scorer = {"name": SCORER, "scorer": SCORER, "reducer": "mean"}
    return {  # in this order: inspect_ai reads a log's header up to its samples
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": identity,
            "run_id": identity,
            "created": created,
            "task": env,
            "task_id": _uuid(env),
            "task_version": 0,
            "dataset": {"name": env, "samples": len(scored), "sample_ids": list(scored), "shuffled": False},
            "model": model,
            "model_generate_config": config,
            "config": {
                "epochs": max((sample["epoch"] for sample in samples), default=1),
                "epochs_reducer": ["mean"],
                "fail_on_error": False,
                "log_samples": True,
            },
            "packages": {"envgym": result["fingerprints"]["envgym"]},
            "metadata": _plain(settings),
        },
        "plan": {"name": "plan", "steps": [], "config": config},
        "results": {
            "total_samples": len(samples),
            "completed_samples": sum("error" not in sample for sample in samples),
            "scores": [
                {
                    **scorer,
                    "scored_samples": sum(map(bool, scored.values())),
                    "unscored_samples": sum(not values for values in scored.values()),
                    "metrics": {name: {"name": name, "value": value} for name, value in metrics.items()},
                }
            ],
        },
        "stats": {"started_at": created, "completed_at": result["ended"], "model_usage": {model: dict(usage)}},
        "samples": samples,
        "reductions": [
            {
                "scorer": SCORER,
                "reducer": "mean",
                "samples": [
                    {"sample_id": task, "value": sum(values) / len(values)} for task, values in scored.items() if values
                ],
            }
        ],
    }


def inspect_metrics(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of one environment's result (`envgym.evaluation.result.result_of`), the main one first, under
    inspect_ai's names where it has one."""
    low, high = result["ci95"] or (None, None)
    metrics = {"mean": result["score"], "stderr": result["stderr"], "ci95_low": low, "ci95_high": high}
    metrics["success_rate"] = result["success"]["rate"]
    for kind in ("pass@k", "pass^k", "majority@k"):
        metrics |= {kind.replace("k", k): value for k, value in result.get(kind, {}).items()}
    return metrics


def log_name(env: str, created: str) -> str:
    """File name of the log, `TIME_TASK_ID.json`: inspect_ai reads no JSON file under another pattern."""
    time, task = re.sub(r"[^0-9T+-]", "-", created), re.sub(r"[^\w.-]|_", "-", env)
    return f"{time}_{task}_{_uuid(env)}.json"


def _uuid(*names: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, ":".join(["envgym", *names])).hex


def _epochs(episodes: Sequence[Episode]) -> list[tuple[Episode, int]]:
    """Each episode with its epoch; epochs of a task's second group follow those of its first."""
    repeats = max((episode.member for episode in episodes), default=0) + 1
    groups: dict[str, list[str]] = {}
    for episode in episodes:
        task_groups = groups.setdefault(episode.task.key, [])
        if episode.group_id not in task_groups:
            task_groups.append(episode.group_id)
    return [(e, groups[e.task.key].index(e.group_id) * repeats + e.member + 1) for e in episodes]


def _inspect_sample(episode: Episode, epoch: int, model: str, created: str) -> dict[str, Any]:
    """An episode as a sample of inspect_ai."""
    task, outcome, usage = episode.task, episode.outcome, _usage(episode)
    prompt = task.prompt if isinstance(task.prompt, str) else ""
    messages = episode.messages or list(() if isinstance(task.prompt, str) else task.prompt)
    turns = [turn for row in episode.rows for turn in row.turns]
    # The prompt may have examples by the assistant: the policy's turns are the last ones.
    assistant_indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    n_prompt = next(iter(assistant_indices[-len(turns) :] if turns else ()), len(messages))
    messages_json = [
        _message(message, f"{episode.id}-{index}", "input" if index < n_prompt else None)
        for index, message in enumerate(messages)
    ]
    sample: dict[str, Any] = {
        "uuid": _uuid(created, episode.env, episode.id),
        "id": task.key,
        "epoch": epoch,
        "input": messages_json[:n_prompt] or prompt,
        "target": _text(task.answer),
        "messages": messages_json,
        "output": {"model": model, "choices": _choices(messages_json, turns), "usage": usage, "time": episode.seconds},
        "metadata": {
            "env": episode.env,
            "group": episode.group_id,
            **{name: getattr(episode, name) for name in ("member", "seed", "attempt", "reward")},
            "status": outcome.status.value,
            "reason": outcome.reason,
            "difficulty": task.difficulty,
            "fields": _plain(task.fields),
            "metrics": _plain(episode.metrics),
            "fingerprints": dict(episode.fingerprints),
        },
        "model_usage": {model: usage},
        "total_time": episode.seconds,
        "working_time": episode.seconds,
        "turn_count": len(turns),
    }
    if not episode.is_counted:
        problem = f"{outcome.reason}: {outcome.message}" if outcome.message else outcome.reason
        sample["error"] = {"message": problem, "traceback": problem, "traceback_ansi": problem}
    elif episode.score is not None:
        sample["scores"] = {SCORER: _score(episode)}
    if outcome.status is Status.TRUNCATED:
        kind = LIMITS.get(outcome.reason, "custom")
        context = max((len(row) for row in episode.rows), default=0)
        # The limit itself is not recorded: its usage stands for it.
        usage_at_limit = {"token": usage["output_tokens"], "context": context, "time": episode.seconds}.get(
            kind, len(turns)
        )
        sample["limit"] = {"type": kind, "limit": usage_at_limit, "reason": f"truncated: {outcome.reason}"}
    return sample


def _score(episode: Episode) -> dict[str, Any]:
    lines = [] if episode.reward is None else [f"reward {episode.reward:g}"]
    lines += [f"{name} {value:g}" for name, value in episode.metrics.items()]
    if episode.outcome.status is Status.TRUNCATED:
        lines.append(f"truncated: {episode.outcome.reason}")
    return {"value": episode.score, "answer": episode.answer, "explanation": "\n".join(lines) or None}


def _message(message: Message, id: str, source: str | None) -> dict[str, Any]:
    """A message in inspect_ai's form; a role unknown to it becomes `user`, as for most models."""
    role = message.role if message.role in ("system", "user", "assistant", "tool") else "user"
    item: dict[str, Any] = {"id": id, "role": role, "content": message.text}
    if source or role == "assistant":
        item["source"] = source or "generate"
    if message.tool_calls:
        item["tool_calls"] = [
            {
                "id": call.id,
                "function": call.name,
                "arguments": _plain(call.arguments),
                "parse_error": call.error or None,
                "type": "function",
            }
            for call in message.tool_calls
        ]
    if role == "tool":
        item |= {"tool_call_id": message.tool_call_id or None, "function": message.name or None}
    return item


def _choices(messages: Sequence[Mapping[str, Any]], turns: Sequence[Any]) -> list[dict[str, Any]]:
    """The policy's last completion with its stop reason; empty if there is none."""
    last = next((message for message in reversed(messages) if message.get("source") == "generate"), None)
    if last is None:
        return []
    reason = STOP_REASONS[turns[-1].stop_reason] if turns else "unknown"
    return [{"message": last, "stop_reason": "tool_calls" if reason == "stop" and "tool_calls" in last else reason}]


def _usage(episode: Episode) -> dict[str, int]:
    """Input and output tokens, as APIs count: every turn reads all tokens before it. Without recorded tokens, the API's
    own counts."""
    read = sampled = 0
    for row in episode.rows:
        n_context = 0
        for segment in row.segments:
            if segment.role == "action":
                read, sampled = read + n_context, sampled + len(segment)
            n_context += len(segment)
    if not sampled:
        read = int(episode.metrics.get("prompt_tokens", 0))
        sampled = int(episode.metrics.get("completion_tokens", 0))
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}


def _plain(value: Any) -> Any:
    """The value in JSON's own types, for strict readers: NaN and infinity become None, other types text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(_plain(answer), ensure_ascii=False)
