"""`envgym config`: the settings of a run, as YAML for `--config`."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import Invocation
from .parser import Parser, add_run_options, resolve_options


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Print all settings that envgym train would run with, or the list of recipes.

    usage: [recipes | options of train and key=value words]
    example: envgym config --env math_verify steps=50 > run.yaml
      envgym config recipes
    """
    parser = Parser("config", main)
    if list(arguments) == ["recipes"]:
        return _list_recipes()
    add_run_options(parser)
    print(resolve_options(*parser.parse_with_words(arguments), invocation).to_yaml(), end="")
    return 0


def _list_recipes() -> int:
    from envgym.config.recipes import FOLDER, recipe_names
    from envgym.monitoring.report import aligned

    def summary(name: str) -> str:
        line = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        return line.removeprefix("#").strip()

    # A recipe's first comment line describes it; a YAML parser drops it.
    print(aligned([(name, summary(name)) for name in recipe_names()]))
    return 0
