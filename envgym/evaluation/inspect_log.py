"""An evaluation as a log of inspect_ai, which `inspect view` shows and `read_eval_log` reads.

The format is version 2 of inspect_ai's `EvalLog` as JSON, one environment a file. Nothing here imports inspect_ai.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.types import Episode, Group, Message, Status, StopReason

SCORER = "envgym"
API = "none"
"""inspect_ai's API of no model. It takes no model's name without one, and ours may be a folder, or of any server."""
LIMITS = {"turns": "turn", "tokens": "token", "length": "token", "context": "context", "time": "time"}
"""Ours of the limits that inspect_ai has a name for; the others are `custom`."""
STOP_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "max_tokens"}
SETTINGS = ("env", "split", "weight", "cluster", "samples", "sampling", "fingerprints")
"""What of an environment's result says how it was played."""
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def write_inspect_logs(folder: Path, result: Mapping[str, Any], groups: Mapping[str, Sequence[Group]]) -> None:
    """Write a log for each environment of an evaluation into `folder`: its `result`, and the groups it played."""
    folder.mkdir(exist_ok=True)
    of_all = {name: result[name] for name in ("suite", "seed")}
    for name, env in result["envs"].items():
        log = inspect_log(
            [episode for group in groups[name] for episode in group.episodes],
            env=name,
            model=result["model"],
            created=result["began"],
            completed=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=inspect_metrics(env),
            sampling=env["sampling"],
            settings=of_all | {key: env[key] for key in SETTINGS},
            version=result["fingerprints"]["envgym"],
        )
        write_atomically(folder / log_name(name, result["began"]), json.dumps(log, allow_nan=False) + "\n")


def inspect_log(
    episodes: Iterable[Episode],
    *,
    env: str,
    model: str,
    created: str,
    completed: str,
    metrics: Mapping[str, float | None],
    sampling: Mapping[str, Any],
    settings: Mapping[str, Any],
    version: str,
) -> dict[str, Any]:
    """The log of one environment's evaluation, as JSON's own types.

    An episode is a sample: its id is the task's key, its epoch the member's number from 1 (further on where an
    evaluation asked the task again). A failed one has an `error` and no score, which inspect_ai leaves out of its
    metrics as we do; one without a score has none either; a truncated one says which `limit` it met, with what it had
    used by then. `metrics` are what the evaluation reports (`inspect_metrics`), the first of them in front; None are
    left out. The model is named as one of no API, `none/MODEL`; the metadata has its own name. `created` and
    `completed` are ISO 8601 times with a zone. `sampling` are those of `SAMPLING` that were set; `settings` are kept as
    metadata, `version` is envgym's. Write the log with its keys in the order they have.
    """
    settings, model = {**settings, "model": model}, f"{API}/{model}"
    played = sorted(episodes, key=lambda episode: (episode.group, episode.member))
    samples = [_sample(episode, epoch, model, created) for episode, epoch in _epochs(played)]
    scored: dict[str, list[float]] = {}
    for episode in played:
        of_task = scored.setdefault(episode.task.key, [])
        if not episode.failed and episode.score is not None:
            of_task.append(episode.score)
    usage = {model: _sum(sample["output"]["usage"] for sample in samples)}
    identity = uuid.uuid5(uuid.NAMESPACE_URL, f"envgym:{created}:{env}:{model}").hex
    config = {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    return {  # in this order, for inspect_ai reads a log's header up to its samples
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": identity,
            "run_id": identity,
            "created": created,
            "task": env,
            "task_id": _task_id(env),
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
            "packages": {"envgym": version},
            "metadata": _plain(settings),
        },
        "plan": {"name": "plan", "steps": [], "config": config},
        "results": {
            "total_samples": len(samples),
            "completed_samples": sum("error" not in sample for sample in samples),
            "scores": [
                {
                    "name": SCORER,
                    "scorer": SCORER,
                    "reducer": "mean",
                    "scored_samples": sum(map(bool, scored.values())),
                    "unscored_samples": sum(not values for values in scored.values()),
                    "metrics": {
                        name: {"name": name, "value": value} for name, value in metrics.items() if value is not None
                    },
                }
            ],
        },
        "stats": {"started_at": created, "completed_at": completed, "model_usage": usage},
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
    """The metrics of one environment's result (`envgym.evaluation.result.result_of`) under inspect_ai's names where it
    has them."""
    low, high = result["ci95"] or (None, None)
    metrics = {"mean": result["score"], "stderr": result["stderr"], "ci95_low": low, "ci95_high": high}
    metrics["success_rate"] = result["success"]["rate"]
    for kind in ("pass@k", "pass^k", "majority@k"):
        metrics |= {kind.replace("k", k): value for k, value in result.get(kind, {}).items()}
    return metrics


def log_name(env: str, created: str) -> str:
    """The name of the log's file; inspect_ai takes JSON for a log only under such a name: `TIME_TASK_ID.json`."""
    time, task = re.sub(r"[^0-9T+-]", "-", created), re.sub(r"[^\w.-]|_", "-", env)
    return f"{time}_{task}_{_task_id(env)}.json"


def _task_id(env: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"envgym:{env}").hex


def _epochs(played: Sequence[Episode]) -> list[tuple[Episode, int]]:
    """Each episode with its epoch: where a task was asked in several groups, the later ones' follow the earlier's."""
    repeats = max((episode.member for episode in played), default=0) + 1
    groups: dict[str, list[str]] = {}
    for episode in played:
        of_task = groups.setdefault(episode.task.key, [])
        if episode.group not in of_task:
            of_task.append(episode.group)
    return [(e, groups[e.task.key].index(e.group) * repeats + e.member + 1) for e in played]


def _sample(episode: Episode, epoch: int, model: str, created: str) -> dict[str, Any]:
    task, outcome = episode.task, episode.outcome
    messages = episode.messages or list(() if isinstance(task.prompt, str) else task.prompt)
    asked = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    written = [
        _message(message, f"{episode.id}-{index}", "input" if index < asked else None)
        for index, message in enumerate(messages)
    ]
    turns = [turn for row in episode.rows for turn in row.turns]
    usage = _usage(episode)
    sample: dict[str, Any] = {
        "uuid": uuid.uuid5(uuid.NAMESPACE_URL, f"envgym:{created}:{episode.env}:{episode.id}").hex,
        "id": task.key,
        "epoch": epoch,
        "input": written[:asked] or (task.prompt if isinstance(task.prompt, str) else ""),
        "target": _text(task.answer),
        "messages": written,
        "output": {"model": model, "choices": _choices(written, turns), "usage": usage, "time": episode.seconds},
        "metadata": {
            "env": episode.env,
            "group": episode.group,
            "member": episode.member,
            "seed": episode.seed,
            "attempt": episode.attempt,
            "reward": episode.reward,
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
    if episode.failed:
        said = f"{outcome.reason}: {outcome.message}" if outcome.message else outcome.reason
        sample["error"] = {"message": said, "traceback": said, "traceback_ansi": said}
    elif episode.score is not None:
        sample["scores"] = {SCORER: _score(episode)}
    if outcome.status is Status.TRUNCATED:
        kind = LIMITS.get(outcome.reason, "custom")
        context = max((len(row.token_ids) for row in episode.rows), default=0)
        used = {"token": usage["output_tokens"], "context": context, "time": episode.seconds}.get(kind, len(turns))
        sample["limit"] = {"type": kind, "limit": used, "reason": f"truncated: {outcome.reason}"}
    return sample


def _score(episode: Episode) -> dict[str, Any]:
    said = [] if episode.reward is None else [f"reward {episode.reward:g}"]
    said += [f"{name} {value:g}" for name, value in episode.metrics.items()]
    if episode.outcome.status is Status.TRUNCATED:
        said.append(f"truncated: {episode.outcome.reason}")
    return {"value": episode.score, "answer": episode.answer, "explanation": "\n".join(said) or None}


def _message(message: Message, id: str, source: str | None) -> dict[str, Any]:
    """A message in inspect_ai's form; roles that it does not know are the user's, as they are to most models."""
    role = message.role if message.role in ("system", "user", "assistant", "tool") else "user"
    written: dict[str, Any] = {"id": id, "role": role, "content": message.text}
    if source or role == "assistant":
        written["source"] = source or "generate"
    if message.tool_calls:
        written["tool_calls"] = [
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
        written |= {"tool_call_id": message.tool_call_id or None, "function": message.name or None}
    return written


def _choices(written: Sequence[Mapping[str, Any]], turns: Sequence[Any]) -> list[dict[str, Any]]:
    """The last thing the policy said and why it stopped there; nothing where it never spoke."""
    last = next((message for message in reversed(written) if message.get("source") == "generate"), None)
    if last is None:
        return []
    reason = STOP_REASONS[turns[-1].stop_reason] if turns else "unknown"
    return [{"message": last, "stop_reason": "tool_calls" if reason == "stop" and "tool_calls" in last else reason}]


def _usage(episode: Episode) -> dict[str, int]:
    """Tokens read and sampled, by an API's count where there is one; a turn reads all that came before it, as APIs
    count."""
    read = sampled = 0
    for row in episode.rows:
        before = 0
        for segment in row.segments:
            if segment.role == "action":
                read, sampled = read + before, sampled + len(segment.token_ids)
            before += len(segment.token_ids)
    if not sampled:
        read = int(episode.metrics.get("prompt_tokens", 0))
        sampled = int(episode.metrics.get("completion_tokens", 0))
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}


def _sum(usages: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    for usage in usages:
        total = {name: total[name] + usage[name] for name in total}
    return total


def _plain(value: Any) -> Any:
    """JSON's own types, for readers that are strict about them: what is none of them as text, NaN and infinity as
    None."""
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
