"""`envgym envs list` and `envgym envs show`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.cli.failures import Invocation
from envgym.cli.parser import Parser, make_spec
from envgym.errors import EnvgymError, InvalidOutcome
from envgym.isolation import event_loop

from .said import about, as_lines, signature

if TYPE_CHECKING:
    from envgym.env import EnvSpec
    from envgym.types import Observation


def list_main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "envs list",
        "",
        "List the environments that are installed, and the remote ones that were given a name.",
        "envgym envs list",
    )
    parser.parse_with_words(arguments)

    from envgym import registry
    from envgym.remote.registered import readable

    remote, problems = readable()
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    ids = registry.list_ids()
    width = max(map(len, ids), default=0)
    for id in ids:
        try:
            is_remote = id in remote and not registry.is_installed(id)
            about = f"remote: {', '.join(remote[id].urls)}" if is_remote else _about_id(id)
        except EnvgymError as error:  # one that cannot be used must not hide the others
            about = f"(cannot be used: {error})"
        print(f"{id:<{width}}  {about}".rstrip())
    if not ids:
        print("no environments are installed")
    return 0


def show_main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "envs show",
        "E [key=value …]",
        "Show an environment: its agent, tools, services, settings, tasks and a first observation.",
        "envgym envs show math_verify env.digits=3",
    )
    parser.add_argument("env", metavar="E", help="environment: id, file.py[:Name], import path or URL")
    options, words = parser.parse_with_words(arguments)
    event_loop.run(_show(make_spec(options.env, words)))
    return 0


def _about_id(id: str) -> str:
    from envgym import registry
    from envgym.env import Env, EnvSpec, first_words
    from envgym.loading import load_class

    found = registry.find(id)
    target = found.entry_point
    return first_words(load_class(target, (EnvSpec, Env), "environment") if isinstance(target, str) else target)


async def _show(spec: EnvSpec) -> None:
    from envgym.services import start_services

    async with start_services(spec, now=False):
        env = spec.make()
        print(f"{spec.id}  {spec.about}".rstrip())
        first, _, rest = spec.docstring.partition("\n")
        if first == spec.about and rest:  # of a remote one only the first words are known
            print(rest.rstrip())
        for split in ("train", "test"):
            size = spec.tasks(split).size
            print(f"{split} tasks: {'no end' if size is None else size}")
        print(f"agent: {spec.agent}")
        for part in {id(part): part for part in (spec, *spec.parts())}.values():
            for name, service in part.services.items():
                print(f"service {name}: {type(service).__name__}")
        print("settings:")
        for name, field in type(spec.config).model_fields.items():
            value = getattr(spec.config, name)
            print(f"  env.{name}={value!r}" + (f"  {field.description}" if field.description else ""))
        try:
            observation, _ = await env.reset(seed=0)
        except InvalidOutcome as error:
            print(f"a first observation cannot be had: {error}")
        else:
            _print_observation(observation)
        finally:
            await env.close()


def _print_observation(observation: Observation) -> None:
    if observation.tools:
        print("tools:")
        for tool in observation.tools:
            print(f"  {signature(tool)}  {about(tool)}".rstrip())
    print("a first observation:")
    for role, text in as_lines(observation):
        print(f"  {role}: {text}" if role != "text" else f"  {text}")
