"""Whether episodes can be played at all, end, and say what Gymnasium's tuples say; and what becomes of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from envgym.errors import CallTimeout
from envgym.types import Action, Observation, ToolCall, ToolSpec

from .context import Clock, Subject
from .play import Played, play, text_of
from .report import Finding, failed, listed, not_applicable, ok, warning
from .scripts import MAX_TURNS, calling, empty, injection, random_tokens

TASKS = 6
SECONDS = 5.0


async def check(subject: Subject) -> list[Finding]:
    """Play whatever scripts there are. The other checks of episodes make sense only where one of them went well."""
    clock = Clock(SECONDS)
    for number, task in enumerate(await subject.tasks(TASKS)):
        if clock.is_up and number >= 2:
            break
        noise = {"empty": empty, "tokens": random_tokens(number), "injection": injection}
        for name, script in (subject.scripts(task) | noise).items():
            subject.episodes.append(await play(subject.spec, task, number, script, name))
            if hangs(subject.episodes[-1]):
                return [can_be_played(subject), types(subject), await tools(subject)]
    return [can_be_played(subject), types(subject), await tools(subject)]


def can_be_played(subject: Subject) -> Finding:
    """No exceptions, no hanging calls, and an end."""
    name = "episodes"
    played = subject.episodes
    if not played:
        return not_applicable(name, "there are no tasks to play")
    if (last := played[-1]).close_error is not None and hangs(last):
        return failed(name, str(last.close_error), "a call must return within env.call_timeout, close within seconds")
    broken = [episode for episode in played if episode.error is not None and not episode.wrong_types]
    if broken:
        first = broken[0]
        after = f" in turn {len(first.turns) + 1}" if first.failed_in == "step" else ""
        found = f"{len(broken)} of {len(played)} failed, the first ({first.script}){after}: {first.problem()}"
        if all(episode.no_service for episode in broken) and subject.needs_services:
            return not_applicable(name, found)
        advice = (
            "a call must return within env.call_timeout; give what it waits for a deadline"
            if isinstance(first.error, CallTimeout)
            else "whatever the policy says is a turn to be answered: no text may raise"
        )
        return failed(name, found, advice)
    turns = sum(len(episode.turns) for episode in played)
    endless = [episode for episode in played if not episode.ended and len(episode.turns) == MAX_TURNS]
    found = f"{len(played)} played, {turns} turns"
    if played and len(endless) == len([episode for episode in played if episode.script != "demonstration"]):
        advice = "set a limit of turns and return truncated=True past it: a policy may never do the right thing"
        return warning(name, f"{found}; none ended within {MAX_TURNS} turns", advice)
    return ok(name, found)


def types(subject: Subject) -> Finding:
    """Observation, five-tuple, reward, score and metrics."""
    name = "types"
    played = subject.episodes
    if wrong := [episode for episode in played if episode.wrong_types]:
        return failed(name, wrong[0].problem(), "see docs/environments.md for what reset and step return")
    if odd := [episode.odd_flag for episode in played if episode.odd_flag]:
        return failed(name, odd[0], "terminated and truncated are True or False")
    if any(played.first is not None and not text_of(played.first).strip() for played in subject.episodes):
        return failed(name, "the first observation says nothing", "reset returns what the policy reads first")
    infos = [turn.info for episode in played for turn in episode.turns]
    if invalid := [info for info in infos if "invalid_metrics" in (info.get("metrics") or {})]:
        found = f"metrics that are no finite numbers in {len(invalid)} of {len(infos)} steps"
        return failed(name, found, 'info["metrics"] maps names to finite numbers')
    if not infos:
        return not_applicable(name, "no step came back")
    return ok(name, f"{len(infos)} steps returned five-tuples with numbers where numbers belong")


async def tools(subject: Subject) -> Finding:
    """Schemas are schemas, and a call that is wrong is answered, not raised."""
    name = "tools"
    offered = [tool for episode in subject.episodes if episode.first for tool in episode.first.tools]
    if not offered:
        return not_applicable(name, "no tools are offered")
    specs = {tool.name: tool for tool in offered}
    if wrong := [f"{tool.name}: {reason}" for tool in specs.values() if (reason := _wrong_tool(tool))]:
        return failed(name, listed(wrong), "give the arguments as a JSON schema of type object")
    task = next(iter(await subject.tasks(1)))
    calls = [
        ToolCall("one", "no_such_tool", {"x": 1}),
        ToolCall("two", "", {}, error="the call is no JSON"),
        *(ToolCall(f"lacks {tool}", tool, {"no such argument": None}) for tool in specs),
    ]
    for call in calls:
        played = await play(subject.spec, task, 0, _says_once(calling([call])), "wrong call")
        if played.error is not None and not played.no_service:
            what = call.error or f"a call of {call.name} with {dict(call.arguments)}"
            advice = "answer it with a message of the role tool that says what is wrong, as ToolBox does"
            return failed(name, f"{what}: {played.problem()}", advice)
        turn = played.turns[0] if played.turns else None
        if turn and not played.ended and call.id not in {m.tool_call_id for m in turn.observation.messages}:
            advice = "answer every call with a message of the role tool that has its tool_call_id, as ToolBox does"
            return failed(name, f"a call of {call.name or 'nothing'} got no answer", advice)
    return ok(name, f"{listed(specs, 5)}; wrong calls are answered")


def _says_once(action: Action) -> Any:
    def script(turn: int, observation: Observation) -> Action | None:
        return action if turn == 0 else None

    return script


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


TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def _wrong_schema(schema: object) -> str:
    """What is wrong with a JSON schema, as far as tools' schemas go; empty where nothing is."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{schema!r:.40} is no schema"
    kinds = schema.get("type", [])
    if not {kinds} <= TYPES if isinstance(kinds, str) else not set(kinds) <= TYPES:
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


def hangs(played: Played) -> bool:
    """Whether a call took longer than it may."""
    return isinstance(played.error, CallTimeout) or isinstance(played.close_error, CallTimeout)


def can_go_on(subject: Subject) -> bool:
    """Whether more episodes would tell anything: none hung, and some took a turn."""
    return not any(map(hangs, subject.episodes)) and any(episode.turns for episode in subject.episodes)
