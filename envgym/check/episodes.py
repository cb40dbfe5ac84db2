"""Checks of single episodes: errors, limits of turns, return types (Gymnasium's), answers to tool calls, and speed."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping

from envgym.rollout.scripted import script_of
from envgym.types import ToolCall, ToolSpec

from .play import CheckedEpisode, text_of
from .report import CheckVerdict, Finding, failure, join_first, not_applicable, ok, warning
from .scripts import MAX_TURNS, call_action, random_text, random_tokens, silence
from .subject import Subject, take_in_time

CHECKS = ("episodes", "types", "tools", "latency")
TASKS = 6
SECONDS = 5.0
SLOW_SECONDS = 1.0
"""A longer median call is a warning: a training step waits for its slowest episode."""


async def check(subject: Subject) -> list[Finding]:
    """Run all scripts. Other groups of checks need an episode with a turn, and none that hangs."""
    await _run_scripts(subject)
    episodes, finding = subject.episodes, episodes_finding(subject)
    is_usable = any(episode.turns for episode in episodes) and not any(episode.hangs for episode in episodes)
    finding.is_last = not is_usable or finding.verdict is CheckVerdict.NOT_APPLICABLE
    return [finding, types_finding(subject.episodes), await tools_finding(subject), latency_finding(subject.episodes)]


async def _run_scripts(subject: Subject) -> None:
    for number, task in take_in_time(await subject.tasks(TASKS), SECONDS, fewest=2):
        noise = {"empty": silence, "words": random_text(number), "tokens": random_tokens(number)}
        for name, script in (subject.scripts(task) | noise).items():
            subject.episodes.append(await subject.play(task, number, script, name))
            if subject.episodes[-1].hangs:
                return


def episodes_finding(subject: Subject) -> Finding:
    """The finding on exceptions, hanging calls and endless episodes."""
    episodes = subject.episodes
    if not episodes:
        return not_applicable("there are no tasks")
    if (last := episodes[-1]).close_hangs:
        message = f"close took longer than {last.close_limit:g} s"
        return failure(message, "a call must return within env.call_timeout, close within seconds")
    if broken := [episode for episode in episodes if episode.failed and not episode.wrong_types]:
        first = broken[0]
        place = f" in turn {len(first.turns) + 1}" if first.last_call == "step" else ""
        message = f"{len(broken)} of {len(episodes)} failed, the first ({first.script_name}){place}: {first.problem()}"
        if all(episode.no_service for episode in broken) and subject.needs_services:
            return not_applicable(message)
        if first.hangs:
            return failure(message, "a call must return within env.call_timeout; set a timeout for what it waits on")
        if first.last_call == "reset":
            return failure(message, "reset may not raise, for any task and seed")
        return failure(message, "step may not raise for any text of the policy")
    turns = sum(len(episode.turns) for episode in episodes)
    endless = [episode for episode in episodes if not episode.has_ended and len(episode.turns) == MAX_TURNS]
    message = f"{len(episodes)} episodes, {turns} turns"
    if len(endless) == len([episode for episode in episodes if episode.script_name != "demonstration"]):
        advice = "set a limit of turns and return truncated=True at it: a policy may never solve the task"
        return warning(f"{message}; none ended within {MAX_TURNS} turns", advice)
    return ok(message)


def types_finding(episodes: list[CheckedEpisode]) -> Finding:
    """The finding on the types of observations, five-tuples, rewards, scores and metrics."""
    if mistyped := [episode for episode in episodes if episode.wrong_types]:
        return failure(mistyped[0].problem(), "see docs/environments/environments.md for what reset and step return")
    if odd_flags := [episode.odd_flag for episode in episodes if episode.odd_flag]:
        return failure(odd_flags[0], "terminated and truncated must be True or False")
    if any(episode.opening is not None and not text_of(episode.opening).strip() for episode in episodes):
        return failure("the first observation is empty", "reset must return the policy's first input")
    infos = [turn.info for episode in episodes for turn in episode.turns]
    if invalid := [info for info in infos if "invalid_metrics" in (info.get("metrics") or {})]:
        message = f"metrics that are not finite numbers in {len(invalid)} of {len(infos)} steps"
        return failure(message, 'info["metrics"] maps names to finite numbers')
    if not infos:
        return not_applicable("no step returned")
    return ok(f"{len(infos)} steps returned five-tuples of the right types")


async def tools_finding(subject: Subject) -> Finding:
    """The finding on tools: schemas must be valid, and wrong calls must be answered without an exception."""
    specs = {tool.name: tool for episode in subject.episodes if episode.opening for tool in episode.opening.tools}
    if not specs:
        return not_applicable("there are no tools")
    if mistakes := [f"{tool.name}: {reason}" for tool in specs.values() if (reason := _tool_mistake(tool))]:
        return failure(join_first(mistakes), "give the arguments as a JSON schema of type object")
    [task] = await subject.tasks(1)
    calls = [
        ToolCall("one", "no_such_tool", {"x": 1}),
        ToolCall("two", "", {}, error="the call is not JSON"),
        *(ToolCall(f"lacks {tool}", tool, {"no such argument": None}) for tool in specs),
    ]
    for call in calls:
        episode = await subject.play(task, 0, script_of([call_action([call])]))
        if episode.failed and not episode.no_service:
            label = call.error or f"a call of {call.name} with {dict(call.arguments)}"
            advice = "answer it with a message of the role tool that describes the mistake, as ToolBox does"
            return failure(f"{label}: {episode.problem()}", advice)
        turn = episode.turns[0] if episode.turns else None
        if turn and not episode.has_ended and call.id not in {m.tool_call_id for m in turn.observation.messages}:
            advice = "answer every call with a message of the role tool that has its tool_call_id, as ToolBox does"
            return failure(f"a call of {call.name or 'nothing'} got no answer", advice)
    return ok(f"{join_first(specs, 5)}; wrong calls are answered")


def latency_finding(episodes: list[CheckedEpisode]) -> Finding:
    """The finding on durations: a warning if the median reset or step takes longer than `SLOW_SECONDS`."""
    seconds = [episode.seconds for episode in episodes if episode.turns]
    if not seconds:
        return not_applicable("no step returned")
    reset = statistics.median(durations[0] for durations in seconds)
    step = statistics.median(duration for durations in seconds for duration in durations[1:])
    message = f"reset {1000 * reset:.1f} ms, step {1000 * step:.1f} ms (medians)"
    if max(reset, step) > SLOW_SECONDS:
        return warning(message, "move work that is the same for every episode to EnvSpec.setup")
    return ok(message)


# -- schemas ----------------------------------------------------------------------------------------------

TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def _tool_mistake(tool: ToolSpec) -> str:
    """The first mistake in a tool's name or parameters; empty if there is none."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name):
        return "its name may only have letters, digits, _ and -"
    try:
        json.dumps(tool.as_dict())
    except (TypeError, ValueError) as error:
        return f"not JSON ({error})"
    if tool.parameters.get("type") != "object":
        return f"its parameters are of type {tool.parameters.get('type')!r}, not 'object'"
    return _schema_mistake(tool.parameters)


def _schema_mistake(schema: object) -> str:
    """The first mistake in a tool's JSON schema; empty if there is none."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{schema!r:.40} is not a schema"
    kinds = schema.get("type", [])
    if not ({kinds} if isinstance(kinds, str) else set(kinds)) <= TYPES:
        return f"there is no type {kinds!r}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return f"properties are {properties!r:.40}, not names to schemas"
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        return f"required is {required!r:.40}, not a list of names"
    if properties and (unknown := [name for name in required if name not in properties]):
        return f"{unknown[0]!r} is required and not described"
    if not isinstance(schema.get("enum", []), list | tuple):
        return "enum must be a list"
    parts = [*properties.values(), *schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    parts += schema.get("$defs", {}).values()
    return next((reason for part in parts if (reason := _schema_mistake(part))), "")
