"""An evaluation as logs of inspect_ai, which `inspect view` shows and `read_eval_log` reads: one per environment.

inspect_ai is the optional extra `inspect`, so this module is imported only where `eval.inspect_logs` asks for its logs.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai import log
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentImage,
    ContentText,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall
from pydantic_core import to_jsonable_python

from envgym.errors import DataError
from envgym.types import Episode, Group, ImagePart, Message, Status, StopReason, TextPart

SCORER = "envgym"
API = "none"
"""inspect_ai's API name for no model. inspect_ai requires an API, and our model may be a folder or on any server."""
LIMITS = {"turns": "turn", "tokens": "token", "length": "token", "context": "context", "time": "time"}
"""Our limits under inspect_ai's names; the others are `custom`."""
STOP_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "max_tokens"}
SETTINGS = ("env", "split", "weight", "cluster", "samples", "sampling", "fingerprints")
"""Keys of an environment's result that hold its settings."""
FIELDS = ("env", "group_id", "member", "seed", "attempt", "reward", "metrics", "fingerprints")
"""An episode's fields in the metadata of its sample."""


async def write_inspect_logs(folder: Path, result: Mapping[str, Any], groups: Mapping[str, Sequence[Group]]) -> None:
    """Write a log per environment of an evaluation into `folder`, from its `result` and its groups of episodes."""
    folder.mkdir(exist_ok=True)
    for number, env in enumerate(result["envs"], 1):
        name = f"{number}-{re.sub(r'[^a-zA-Z0-9.-]', '-', env)}.eval"
        await log.write_eval_log_async(inspect_log(env, result, groups[env]), folder / name)


def inspect_log(env: str, result: Mapping[str, Any], groups: Sequence[Group]) -> log.EvalLog:
    """The log of one environment of an evaluation; `result` is the evaluation's.

    An episode is a sample: its id is the task's key, its epoch counts the task's episodes from 1. A failed episode
    without a reward has an `error` and no score, so that inspect_ai omits it from its metrics, as envgym does; a
    truncated one has the `limit` that it met, with what it had used. The model's name is `none/MODEL`, and in the
    metadata MODEL alone.
    """
    env_result, model = result["envs"][env], f"{API}/{result['model']}"
    episodes = sorted(
        (episode for group in groups for episode in group.episodes),
        key=lambda episode: (episode.group_id, episode.member),
    )
    epochs: Counter[str] = Counter()
    samples = []
    for episode in episodes:
        epochs[episode.task.key] += 1
        samples.append(_sample(episode, epochs[episode.task.key], model))
    settings = {name: result[name] for name in ("suite", "seed", "model")}
    metrics = {name: value for name, value in inspect_metrics(env_result).items() if value is not None}
    return log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            eval_id=uuid.uuid4().hex,
            run_id=uuid.uuid4().hex,
            created=result["began"],
            task=env,
            task_id=uuid.uuid5(uuid.NAMESPACE_URL, f"envgym:{env}").hex,
            dataset=log.EvalDataset(name=env, samples=len(epochs), sample_ids=list(epochs), shuffled=False),
            model=model,
            model_generate_config=GenerateConfig(**env_result["sampling"]),
            config=log.EvalConfig(epochs=max(epochs.values(), default=1), epochs_reducer=["mean"]),
            packages={"envgym": result["fingerprints"]["envgym"]},
            metadata=_plain(settings | {name: env_result[name] for name in SETTINGS}),
        ),
        results=log.EvalResults(
            total_samples=len(samples),
            completed_samples=sum(sample.error is None for sample in samples),
            scores=[
                log.EvalScore(
                    name=SCORER,
                    scorer=SCORER,
                    reducer="mean",
                    metrics={name: log.EvalMetric(name=name, value=value) for name, value in metrics.items()},
                )
            ],
        ),
        stats=log.EvalStats(
            started_at=result["began"],
            completed_at=result["ended"],
            model_usage={model: sum((sample.model_usage[model] for sample in samples), ModelUsage())},
        ),
        samples=samples,
    )


def inspect_metrics(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of one environment's result (`envgym.evaluation.result.result_of`), the main one first, under
    inspect_ai's names where it has one."""
    low, high = result["ci95"] or (None, None)
    metrics = {"mean": result["score"], "stderr": result["stderr"], "ci95_low": low, "ci95_high": high}
    metrics["success_rate"] = result["success"]["rate"]
    for kind in ("pass@k", "pass^k", "majority@k"):
        metrics |= {kind.replace("k", k): value for k, value in result.get(kind, {}).items()}
    return metrics


def _sample(episode: Episode, epoch: int, model: str) -> log.EvalSample:
    """An episode as a sample of inspect_ai."""
    task, outcome, usage = episode.task, episode.outcome, _usage(episode)
    turns = [turn for row in episode.rows for turn in row.turns]
    messages = episode.messages or list(() if isinstance(task.prompt, str) else task.prompt)
    # The prompt may have examples by the assistant: the policy's turns are the last ones.
    by_assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    n_prompt = next(iter(by_assistant[-len(turns) :] if turns else ()), len(messages))
    chat = [_message(message, "input" if index < n_prompt else None) for index, message in enumerate(messages)]
    choices = [
        ChatCompletionChoice(message=message, stop_reason=STOP_REASONS[turns[-1].stop_reason] if turns else "unknown")
        for message in chat[n_prompt:]
        if message.role == "assistant"
    ]
    sample = log.EvalSample(
        id=task.key,
        epoch=epoch,
        input=chat[:n_prompt] or (task.prompt if isinstance(task.prompt, str) else ""),
        target=_text(task.answer),
        messages=chat,
        output=ModelOutput(model=model, choices=choices[-1:], usage=usage, time=episode.seconds),
        metadata=_plain({name: getattr(episode, name) for name in FIELDS} | {"fields": task.fields}),
        model_usage={model: usage},
        total_time=episode.seconds,
        turn_count=len(turns),
    )
    if not episode.is_counted:
        problem = f"{outcome.reason}: {outcome.message}" if outcome.message else outcome.reason
        sample.error = log.EvalError(message=problem, traceback=problem, traceback_ansi=problem)
    elif episode.score is not None:
        sample.scores = {SCORER: Score(value=episode.score, answer=episode.answer)}
    if outcome.status is Status.TRUNCATED:
        kind = LIMITS.get(outcome.reason, "custom")
        # The limit itself is not recorded: its usage stands for it.
        usage_at_limit = {
            "token": usage.output_tokens,
            "context": max(map(len, episode.rows), default=0),
            "time": episode.seconds,
        }
        sample.limit = log.EvalSampleLimit(
            type=kind, limit=usage_at_limit.get(kind, len(turns)), reason=f"truncated: {outcome.reason}"
        )
    return sample


def _message(message: Message, source: str | None) -> ChatMessage:
    """A message in inspect_ai's form; a role unknown to it becomes `user`, as for most models."""
    if message.role == "assistant":
        calls = [
            ToolCall(id=call.id, function=call.name, arguments=_plain(call.arguments), parse_error=call.error or None)
            for call in message.tool_calls
        ]
        return ChatMessageAssistant(content=message.text, source=source or "generate", tool_calls=calls or None)
    if message.role == "tool":
        names = {"tool_call_id": message.tool_call_id or None, "function": message.name or None}
        return ChatMessageTool(content=_content(message), source=source, **names)
    kind = ChatMessageSystem if message.role == "system" else ChatMessageUser
    return kind(content=_content(message), source=source)


def _content(message: Message) -> str | list[Content]:
    """A message's text, or its parts with the files of images."""
    return [_part(part) for part in message.content] if message.images else message.text


def _part(part: TextPart | ImagePart) -> Content:
    """A part of a message; of an image whose file is not there, its size."""
    if isinstance(part, TextPart):
        return ContentText(text=part.text)
    try:
        return ContentImage(image=part.data_uri())
    except DataError:
        return ContentText(text=part.label)


def _usage(episode: Episode) -> ModelUsage:
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
    return ModelUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)


def _plain(value: Any) -> Any:
    """The value in JSON's own types: NaN and infinity become None, types that JSON does not have text."""
    return to_jsonable_python(value, fallback=str, inf_nan_mode="null")


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(_plain(answer), ensure_ascii=False)
