"""`envgym envs`: the environments there are, and one of them in detail."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.errors import EnvgymError

from .failures import Invocation
from .parser import Parser, choose, make_spec

if TYPE_CHECKING:
    from envgym.env import EnvSpec
    from envgym.registry import Registration


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "envs",
        "list | show E [key=value …]",
        "List the environments that are installed, or show one: its settings, its tasks and a first observation.",
        "envgym envs list\n  envgym envs show math_verify",
    )
    if list(arguments) in (["--help"], ["-h"]):
        parser.parse_args(arguments)
    action, rest = choose("envs", ("list", "show"), arguments)
    if action == "show":
        parser.add_argument("env", metavar="E", help="environment: id, file.py[:Name], import path or URL")
    options, words = parser.parse_with_words(rest)
    if action == "show":
        asyncio.run(_show(make_spec(options.env, words)))
    else:
        _list()
    return 0


def _list() -> None:
    from envgym import registry

    ids = registry.list_ids()
    width = max(map(len, ids), default=0)
    for id in ids:
        try:
            about = _about(_class_of(registry.find(id)))
        except EnvgymError as error:  # one that cannot be used must not hide the others
            about = f"(cannot be used: {error})"
        print(f"{id:<{width}}  {about}".rstrip())
    if not ids:
        print("no environments are installed")


def _class_of(registration: Registration) -> type:
    from envgym.env import Env, EnvSpec
    from envgym.loading import load_class

    target = registration.entry_point
    return load_class(target, (EnvSpec, Env), "environment") if isinstance(target, str) else target


async def _show(spec: EnvSpec) -> None:
    from envgym.env import EnvSpec

    env = spec.make()
    async with spec:
        print(f"{spec.id}  {_about(type(env.env) if type(spec) is EnvSpec else type(spec))}".rstrip())
        for split in ("train", "test"):
            size = spec.tasks(split).size
            print(f"{split} tasks: {'no end' if size is None else size}")
        print("settings:")
        for name, field in type(spec.config).model_fields.items():
            value = getattr(spec.config, name)
            print(f"  env.{name}={value!r}" + (f"  {field.description}" if field.description else ""))
        observation, _ = await env.reset(seed=0)
        await env.close()
        print("a first observation:")
        for message in observation.messages or ():
            print(f"  {message.role}: {message.text}")
        if observation.text is not None:
            print(f"  {observation.text}")


def _about(cls: type) -> str:
    """The first line of the docstring that the environment's author wrote, not of a class of ours above it."""
    classes = (getattr(cls, "env_class", None), cls)
    docs = (vars(one).get("__doc__") for one in classes if one is not None)
    return next((inspect.cleandoc(doc).partition("\n")[0] for doc in docs if doc), "")
