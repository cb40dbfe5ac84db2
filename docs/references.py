"""Write three pages of `docs/reference/` from the code: `cli.md`, `python_api.md` and `recipe_table.md`.

python docs/references.py
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

import envgym
from envgym.cli import load_command, summaries_of_commands
from envgym.cli.envs import ACTIONS
from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser
from envgym.cli.serve import protocols
from envgym.config.recipes import FOLDER, load_recipe, recipe_names
from envgym.config.resolve import stages_of
from envgym.config.schema import StageConfig
from envgym.config.words import dotted_keys, merge_stage
from envgym.env.spec import first_sentence
from envgym.learner import LearnerConfig

REFERENCE = Path(__file__).parent / "reference"
WRITTEN = "Written by `python docs/references.py` from the code."

# -- the command line ----------------------------------------------------------------------------------

CLI_HEAD = f"""# Command line

Every command with its options, as `envgym COMMAND --help` prints them. Most commands also take settings as `key=value`
words, with dots for nested keys ([all settings](settings.md)). {WRITTEN}

The exit status is 0 for success, 2 for a mistake that the user can fix (one line on standard error explains it), 130
for Ctrl-C, and 1 for an error in envgym, for a failed check of `envgym envs check`, for a cheat that pays in `envgym
envs attack`, and for a difference below that of `envgym compare --fail-below`."""
ACTIONS_OF = {"model": ["merge", "export"], "envs": [*ACTIONS], "serve": [f"--dialect {name}" for name in protocols()]}


def cli() -> str:
    """The page on the command line."""
    parts = [CLI_HEAD]
    for name, summary in sorted(summaries_of_commands().items()):
        parser = parser_of([name])
        parts += [f"## `envgym {name}`", *described(parser, summary)]
        for action in ACTIONS_OF.get(name, ()):
            further = parser_of([name, *action.split()])
            is_dialect = further.usage == parser.usage
            parts += [f"### `envgym {name} {action}`"]
            parts += options_of(further) if is_dialect else described(further)
    return "\n\n".join(parts) + "\n"


def parser_of(words: list[str]) -> Parser:
    """The parser that a command builds: the one whose help it prints."""
    parsers: list[Parser] = []
    with (
        mock.patch.object(Parser, "print_help", lambda self, file=None: parsers.append(self)),
        contextlib.suppress(SystemExit),
    ):
        load_command(words[0]).main([*words[1:], "--help"], Invocation(words))
    return parsers[-1]


def described(parser: Parser, summary: str = "") -> list[str]:
    """The description, usage, options and examples of a command; the summary if its description is a word."""
    about = " ".join(str(parser.description).partition("\n\n")[0].split())
    if " " not in about:
        about = f"{summary[:1].upper()}{summary[1:]}."
    examples = textwrap.dedent(str(parser.epilog).partition("\n")[2])
    blocks = [wrapped(about), f"```text\n{parser.usage}\n```", *options_of(parser)]
    return [*blocks, f"For example:\n\n```text\n{examples}\n```"]


def options_of(parser: Parser) -> list[str]:
    """The table of a parser's options; no table without options."""
    rows = [option(action) for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    return ["\n".join(["| option | meaning |", "|---|---|", *rows])] if rows else []


def option(action: argparse.Action) -> str:
    """The table row of an option or a positional argument."""
    metavar = f" {action.metavar or '|'.join(action.choices or ())}" if action.nargs != 0 else ""
    names = ", ".join(f"`{name}{metavar}`" for name in action.option_strings) or f"`{action.metavar}`"
    return f"| {escaped(names)} | {escaped(str(action.help))} |"


# -- Python --------------------------------------------------------------------------------------------

API_HEAD = f"""# Python API

The public names of `envgym`, with their fields and methods. Types in the signatures that are not here are in the module
of the class. {WRITTEN}"""
SECTIONS = {
    "Runs": ("train", "TrainResult", "evaluate", "EvalResult"),
    "Environments": ("Env", "StepInfo", "EnvConfig", "EnvSpec", "DataEnvSpec", "DataEnvConfig"),
    "Names of environments": ("make", "spec", "register", "list_ids", "registry"),
    "Reward functions": ("reward", "Reward"),
    "Tools": ("ToolEnv", "ToolEnvConfig", "Tool", "ToolCall", "McpServer"),
    "Tasks": ("Task", "TaskSet", "TaskList", "SeededTasks"),
    "Messages and episodes": ("Message", "Observation", "Action", "StopReason", "Episode", "Outcome"),
    "Agents and learners": ("Agent", "Learner"),
    "Errors": ("EnvgymError", "InvalidOutcome"),
}
"""The sections of the page; together they name all of `envgym.__all__` but `__version__`."""


def python_api() -> str:
    """The page on the Python API."""
    parts = [API_HEAD]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(entry(name, getattr(envgym, name)) for name in names)]
    return "\n\n".join(parts) + "\n"


def entry(name: str, item: Any) -> str:
    """A public name: its signature, its docstring, and the fields and methods of a class."""
    if inspect.ismodule(item):
        return f"### `envgym.{name}`\n\n{inspect.cleandoc(item.__doc__)}"
    if not inspect.isclass(item):
        call = wrapped(signature(name, item), indent="    ")
        return f"### `envgym.{name}`\n\n```text\n{call}\n```\n\n{inspect.cleandoc(item.__doc__)}"
    members = [wrapped(f"- {label}{text and f': {text}'}", indent="  ") for label, text in members_of(item)]
    return "\n\n".join([f"### `envgym.{name}`", inspect.cleandoc(item.__doc__), "\n".join(members)]).strip()


def members_of(cls: type) -> Iterator[tuple[str, str]]:
    """The fields and public methods that a class defines, each with the first paragraphs of its docstring."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if not name.startswith("_"):
                yield f"`{name}` (`{ast.unparse(kind)}`)", text
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                yield f"`{name}`", text
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                text = " ".join((ast.get_docstring(statement) or "").split())
                member = inspect.getattr_static(cls, name)
                if isinstance(member, property) or hasattr(member, "attrname"):  # a cached property
                    yield f"`{name}`", text
                elif not any(ast.unparse(line).startswith("validator") for line in statement.decorator_list):
                    prefix = "async " if isinstance(statement, ast.AsyncFunctionDef) else ""
                    yield f"`{prefix}{signature(name, getattr(cls, name))}`", text


class Text(str):
    """An annotation that is shown as it is written."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(name: str, function: Callable[..., Any]) -> str:
    """The call of a function, with the types as its author wrote them."""
    found = inspect.signature(function)
    parameters = [item for item in found.parameters.values() if item.name not in ("self", "cls")]
    parameters = [
        item if item.annotation is item.empty else item.replace(annotation=Text(item.annotation)) for item in parameters
    ]
    returned = found.return_annotation
    shown = found.replace(parameters=parameters, return_annotation=found.empty)
    return f"{name}{shown}" + ("" if returned in (found.empty, "None") else f" -> {returned}")


# -- recipes -------------------------------------------------------------------------------------------

RECIPES_HEAD = f"""# All recipes

`envgym train --recipe NAME` starts from one of these files of settings; any setting can be changed on the command line.
[Recipes](../training/recipes.md) compares the policy gradients, and [Offline training](../training/offline_methods.md)
describes the data that the others need. {WRITTEN}

A number in parentheses is the default of a setting that the recipe leaves open. The starter policy has settings of its
own, which override a recipe's, except those of a single stage (`envgym config --recipe NAME` prints the result).
"Tasks" are those of one training step; of recorded data, its rows. "Updates" are the optimizer steps into which one
training step is split. Settings of the environment, of evaluation and of checkpoints are in the recipe's file.

| recipe | what it does | stage | learner | learning rate | tasks × episodes | updates | length | other settings |
|---|---|---|---|--:|--:|--:|--:|---|
"""
COLUMNS = ("learner.lr", "rollout.tasks_per_step", "rollout.group_size", "learner.minibatches", "steps", "epochs")
"""Settings that have a column."""
UNLISTED = (*COLUMNS, "name", "kind", "model", "learner", "learner.name", "env", "agent", "agent.name", "data.path")
UNLISTED_PREFIXES = ("env.", "new_model.", "model_settings.", "workers.", "eval.", "checkpoint.")


def recipe_table() -> str:
    """The page with the table of recipes."""
    return RECIPES_HEAD + "\n".join(row for name in recipe_names() for row in recipe_rows(name)) + "\n"


def recipe_rows(name: str) -> Iterator[str]:
    """One table row per different stage of a recipe."""
    recipe = load_recipe(name)
    separate = stages_of(recipe.pop("stages", None), []) or [{}]
    stages = [dict(dotted_keys(merge_stage(recipe, stage))) for stage in separate]
    different = [stage for number, stage in enumerate(stages) if stage not in stages[:number]]
    first = [f"[`{name}`](../../envgym/config/recipes/{name}.yaml)", about(name)]
    for settings in different:
        learner = settings.get("learner.name", settings.get("learner"))
        label = "" if len(stages) == 1 else f"`{settings.get('name', learner)}`"
        label += f" (of {len(stages)} equal ones)" if len(different) < len(stages) else ""
        cells = [*first, label, f"`{learner}`", *numbers(settings)]
        yield f"| {' | '.join(map(escaped, cells))} |"
        first = ["", ""]


def about(name: str) -> str:
    """The first sentence of the comment in a recipe's file."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.removeprefix("#").strip() and line.startswith("#"), lines)
    text = first_sentence(" ".join(line.removeprefix("#").strip() for line in comment))
    return re.sub(r"[\w.]*\.\w+=\w+", lambda match: f"`{match[0]}`", text)


def numbers(settings: dict[str, Any]) -> list[str]:
    """The cells of a stage's numbers, and of its other settings."""
    if settings.get("kind", "train") != "train":
        return ["", "", "", "", "scores answers, and does not train"]
    rate, tasks, episodes, updates = (value_of(settings, key) for key in COLUMNS[:4])
    is_recorded = "replay" in (settings.get("agent"), settings.get("agent.name"))  # all recordings of a task
    epochs = settings.get("epochs")
    length = f"{epochs:g} epochs" if epochs else f"{value_of(settings, 'steps')} steps"
    length = length.removesuffix("s") if length.startswith("1 ") else length
    others = [
        f"`{key}={inline(value)}`"
        for key, value in settings.items()
        if key not in UNLISTED and not key.startswith(UNLISTED_PREFIXES)
    ]
    return [rate, tasks if is_recorded else f"{tasks} × {episodes}", updates, length, ", ".join(others)]


def value_of(settings: dict[str, Any], key: str) -> str:
    """The value that a recipe gives a setting, or the default in parentheses."""
    if key in settings:
        return inline(settings[key])
    value: Any = StageConfig.model_construct(env=None, learner=LearnerConfig.model_construct())
    for part in key.split("."):
        value = getattr(value, part)
    return f"({inline(value)})"


def inline(value: Any) -> str:
    """A value as a word of the command line."""
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()


# -- text ----------------------------------------------------------------------------------------------


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for name, page in {"cli": cli, "python_api": python_api, "recipe_table": recipe_table}.items():
        (REFERENCE / f"{name}.md").write_text(page(), encoding="utf-8")
