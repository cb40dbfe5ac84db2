"""`envgym envs list` and `envgym envs show`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from envgym.cli.parser import ENV, Parser, make_spec
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome, NameNotFound, printable, printable_line
from envgym.processes import event_loop
from envgym.types import Message, Observation, Task, ToolSpec

if TYPE_CHECKING:
    from envgym.env import EnvSpec


def list_main(arguments: Sequence[str]) -> int:
    """List installed environments, and remote ones with a saved name.

    example: envgym envs list
    """
    parser = Parser("envs list", list_main)
    parser.parse_with_words(arguments)

    from envgym import registry
    from envgym.remote_names import read_usable

    remote, problems = read_usable()
    for problem in problems:
        print(printable_line(f"note: {problem}"), file=sys.stderr)
    ids = registry.list_ids()
    width = max(map(len, ids), default=0)
    for id in ids:
        try:
            is_remote = id in remote and not registry.is_installed(id)
            summary = f"remote: {', '.join(remote[id].urls)}" if is_remote else registry.find(id).summary
        except NameNotFound as error:  # a task set whose environment was removed
            summary = f"(unavailable: {error})"
        except EnvgymError as error:  # a broken environment must not hide the others
            summary = f"(cannot be used: {error})"
        print(printable_line(f"{id:<{width}}  {summary}".rstrip()))
    if not ids:
        print("no environments are installed")
    return 0


def show_main(arguments: Sequence[str]) -> int:
    """Show an environment: its agent, tools, services, settings, tasks and a first observation.

    usage: E [key=value …]
    example: envgym envs show math_verify env.digits=3
    """
    parser = Parser("envs show", show_main)
    parser.add_argument("env", **ENV)
    options, words = parser.parse_with_words(arguments)
    event_loop.run(_show(make_spec(options.env, words)))
    return 0


async def _show(spec: EnvSpec) -> None:
    from envgym.env.spec import first_sentence
    from envgym.registry import task_set_of
    from envgym.services import start_services

    if (task_set := task_set_of(spec.id)) is not None:
        print(printable(f"{spec.id}  {task_set.description}"))
        print(printable(f"source: {task_set.source}; licence: {task_set.licence or 'not stated'}"))
        if task_set.published_reading:
            print(printable(f"published scores: {task_set.published_reading}"))
    async with start_services(spec, eager=False):
        env = spec.make()
        is_whole = spec.summary == first_sentence(spec.docstring)  # a remote environment has only the first sentence
        label = spec.id if task_set is None else f"environment {task_set.env['name']}:"
        print(printable(f"{label}  {spec.docstring if is_whole else spec.summary}".rstrip()))
        for split in ("train", "test"):
            size = spec.tasks(split).size
            print(f"{split} tasks: {'no end' if size is None else size}")
        print(printable(f"agent: {spec.agent}"))
        for part in {id(part): part for part in (spec, *spec.parts())}.values():
            for name, service in part.services.items():
                print(printable(f"service {name}: {type(service).__name__}"))
        print("settings:")
        for name, field in type(spec.config).model_fields.items():
            value = getattr(spec.config, name)
            print(printable(f"  env.{name}={value!r}" + (f"  {field.description}" if field.description else "")))
        try:
            is_held_out = spec.tasks("train").size == 0
            task = (await choose_task(spec, 0, None))[1] if is_held_out else None  # else the environment draws one
            observation, _ = await env.reset(seed=0, options={"task": task} if task else None)
        except InvalidOutcome as error:
            print(printable(f"there is no first observation: {error}"))
        else:
            if observation.tools:
                print("tools:")
            for tool in observation.tools:
                print(printable(f"  {signature(tool)}  {first_line(tool)}".rstrip()))
            print("a first observation:")
            for role, text in lines_of(observation):
                print(printable(f"  {role}: {text}" if role != "text" else f"  {text}"))
        finally:
            await env.close()


async def choose_task(spec: EnvSpec, seed: int, word: tuple[str, int] | None) -> tuple[str, Task]:
    """The split and the task of `word` (a split and a number), by default a task drawn by the seed. Without a split it
    is a training task, or a held-out one where there is nothing to train on."""
    split, number = word or ("", None)
    split = split or ("test" if spec.tasks("train").size == 0 else "train")
    if number is None:
        number = random.Random(seed).randrange(max(1, spec.tasks(split).index_bound))
    try:
        return split, await spec.tasks(split).get(number)
    except IndexError:
        raise ConfigError(f"there is no task {number} in {split}: it has {spec.tasks(split).size}") from None


# -- text for people --------------------------------------------------------------------------------------


def lines_of(observation: Observation) -> list[tuple[str, str]]:
    """An observation as pairs of role and text."""
    lines = [(_speaker(message), message.printed) for message in observation.messages]
    return lines if observation.text is None else [*lines, ("text", observation.text)]


def _speaker(message: Message) -> str:
    return f"{message.role} {message.name}".strip() if message.role == "tool" else message.role


def signature(tool: ToolSpec) -> str:
    """The declaration of a tool: `search(query: string, limit: integer = 5)`."""
    required = tool.parameters.get("required", ())
    parameters = []
    for name, schema in _properties(tool).items():
        default = f" = {json.dumps(schema['default'])}" if "default" in schema else "" if name in required else " = …"
        parameters.append(f"{name}: {_type(schema)}{default}")
    return printable_line(f"{tool.name}({', '.join(parameters)})")


def example_call(tool: ToolSpec, command: str) -> str:
    """A call that the user can type, with types in place of argument values."""
    required = tool.parameters.get("required", ())
    arguments = {name: f"<{_type(schema)}>" for name, schema in _properties(tool).items() if name in required}
    return printable_line(f"{command} {tool.name} {json.dumps(arguments)}")


def first_line(tool: ToolSpec) -> str:
    """The first line of a tool's description."""
    return printable_line(tool.description.strip().partition("\n")[0])


def _properties(tool: ToolSpec) -> dict[str, dict[str, Any]]:
    return dict(tool.parameters.get("properties", {}))


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in list(schema["enum"])[:4])
    kind = schema.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
