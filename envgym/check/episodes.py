"""Checks of single episodes: can they be played, do they end, are the returned types Gymnasium's, are tool calls
answered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from envgym.rollout.scripted import in_order
from envgym.types import ToolCall, ToolSpec

from .play import Played, text_of
from .report import Finding, failed, listed, not_applicable, ok, warning
from .scripts import MAX_TURNS, calling, empty, injection, random_tokens
from .subject import Subject

CHECKS = ("episodes", "types", "tools")
TASKS = 6
SECONDS = 5.0


async def check(subject: Subject) -> list[Finding]:
    """Play all scripts there are. The other checks of episodes make sense only where one of them went well."""
    await _play(subject)
    return [can_be_played(subject), types(subject.episodes), await tools(subject)]


async def _play(subject: Subject) -> None:
    async for number, task in subject.numbered_tasks(TASKS, SECONDS, fewest=2):
        noise = {"empty": empty, "tokens": random_tokens(number), "injection": injection}
        for name, script in (subject.scripts(task) | noise).items():
            subject.episodes.append(await subject.play(task, number, script, name))
            if subject.episodes[-1].hangs:
                return


def can_go_on(subject: Subject) -> bool:
    """True if more episodes would show anything: none hung, and some took a turn."""
    played = subject.episodes
    return not any(episode.hangs for episode in played) and any(episode.turns for episode in played)


def can_be_played(subject: Subject) -> Finding:
    """No exceptions, no hanging calls, and an end."""
    played = subject.episodes
    if not played:
        return not_applicable("there are no tasks to play")
    if (last := played[-1]).close_hangs:
        found = f"close took longer than {last.close_limit:g} s"
        return failed(found, "a call must return within env.call_timeout, close within seconds")
    if broken := [episode for episode in played if episode.failed and not episode.wrong_types]:
        first = broken[0]
        after = f" in turn {len(first.turns) + 1}" if first.last_call == "step" else ""
        found = f"{len(broken)} of {len(played)} failed, the first ({first.script}){after}: {first.problem()}"
        if all(episode.no_service for episode in broken) and subject.needs_services:
            return not_applicable(found)
        if first.hangs:
            return failed(found, "a call must return within env.call_timeout; give what it waits for a deadline")
        if first.last_call == "reset":
            return failed(found, "every task must be posed: reset may not raise, whatever the task and the seed")
        return failed(found, "whatever the policy says is a turn to be answered: no text may raise")
    turns = sum(len(episode.turns) for episode in played)
    endless = [episode for episode in played if not episode.has_ended and len(episode.turns) == MAX_TURNS]
    found = f"{len(played)} played, {turns} turns"
    if len(endless) == len([episode for episode in played if episode.script != "demonstration"]):
        advice = "set a limit of turns and return truncated=True past it: a policy may never do the right thing"
        return warning(f"{found}; none ended within {MAX_TURNS} turns", advice)
    return ok(found)


def types(played: list[Played]) -> Finding:
    """Observation, five-tuple, reward, score and metrics."""
    if wrong := [episode for episode in played if episode.wrong_types]:
        return failed(wrong[0].problem(), "see docs/environments.md for what reset and step return")
    if odd := [episode.odd_flag for episode in played if episode.odd_flag]:
        return failed(odd[0], "terminated and truncated are True or False")
    if any(episode.first is not None and not text_of(episode.first).strip() for episode in played):
        return failed("the first observation says nothing", "reset returns what the policy reads first")
    infos = [turn.info for episode in played for turn in episode.turns]
    if invalid := [info for info in infos if "invalid_metrics" in (info.get("metrics") or {})]:
        found = f"metrics that are no finite numbers in {len(invalid)} of {len(infos)} steps"
        return failed(found, 'info["metrics"] maps names to finite numbers')
    if not infos:
        return not_applicable("no step came back")
    return ok(f"{len(infos)} steps returned five-tuples with numbers where numbers belong")


async def tools(subject: Subject) -> Finding:
    """Schemas are schemas, and a call that is wrong is answered, not raised."""
    specs = {tool.name: tool for episode in subject.episodes if episode.first for tool in episode.first.tools}
    if not specs:
        return not_applicable("no tools are offered")
    if wrong := [f"{tool.name}: {reason}" for tool in specs.values() if (reason := _wrong_tool(tool))]:
        return failed(listed(wrong), "give the arguments as a JSON schema of type object")
    [task] = await subject.tasks(1)
    calls = [
        ToolCall("one", "no_such_tool", {"x": 1}),
        ToolCall("two", "", {}, error="the call is no JSON"),
        *(ToolCall(f"lacks {tool}", tool, {"no such argument": None}) for tool in specs),
    ]
    for call in calls:
        played = await subject.play(task, 0, in_order([calling([call])]))
        if played.failed and not played.no_service:
            what = call.error or f"a call of {call.name} with {dict(call.arguments)}"
            advice = "answer it with a message of the role tool that says what is wrong, as ToolBox does"
            return failed(f"{what}: {played.problem()}", advice)
        turn = played.turns[0] if played.turns else None
        if turn and not played.has_ended and call.id not in {m.tool_call_id for m in turn.observation.messages}:
            advice = "answer every call with a message of the role tool that has its tool_call_id, as ToolBox does"
            return failed(f"a call of {call.name or 'nothing'} got no answer", advice)
    return ok(f"{listed(specs, 5)}; wrong calls are answered")


# -- schemas ----------------------------------------------------------------------------------------------

TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def _wrong_tool(tool: ToolSpec) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name):
        return "a name is made of letters, digits, _ and -"
    try:
        json.dumps(tool.as_dict())
    except (TypeError, ValueError) as error:
        return f"not JSON ({error})"
    if tool.parameters.get("type") != "object":
        return f"its parameters are of type {tool.parameters.get('type')!r}, not 'object'"
    return _wrong_schema(tool.parameters)


def _wrong_schema(schema: object) -> str:
    """The first mistake in a JSON schema, as far as tools' schemas go; empty where there is none."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{schema!r:.40} is no schema"
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
        return "enum is a list"
    parts = [*properties.values(), *schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    parts += schema.get("$defs", {}).values()
    return next((reason for part in parts if (reason := _wrong_schema(part))), "")
