"""The parser that commands share: options, and `key=value` words anywhere among them."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from envgym.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from envgym.config.schema import RunConfig
    from envgym.env import EnvSpec

    from .errors import Invocation

ENV: dict[str, Any] = {"metavar": "E", "help": "environment: id, file.py[:Name], import path or URL"}
OF_RUN = ("env", "model", "learner", "runtime", "name", "recipe")
"""Settings that are options too: every command that takes settings takes both forms, `--model M` and `model=M`."""
MODEL: dict[str, Any] = {"metavar": "M", "help": "folder, hub id, run, checkpoint, or a recipe such as starter"}


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the intended option."""

    def __init__(self, command: str, function: Callable[..., int], **values: str) -> None:
        """The parser of the command that a function's docstring describes: its summary, then a line `usage: ARGUMENTS`
        unless it takes none, and one `example: COMMAND`. `values` stand for their names in braces."""
        text = inspect.getdoc(function) or ""
        summary, _, texts = (text.format(**values) if values else text).rpartition("\n\n")
        arguments, _, example = texts.removeprefix("usage: ").rpartition("example: ")
        super().__init__(
            prog=f"envgym {command}",
            usage=f"envgym {command} {arguments}".rstrip(),
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation in a script breaks when an option is added
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See: {self.prog} --help")

    def parse_with_words(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the `key=value` words in order. Raises `ConfigError` for anything else."""
        has_env = any(action.metavar == "E" for action in self._get_positional_actions())
        strings = {*self._option_string_actions, *(["--env"] if has_env else [])}
        names = [name for name in OF_RUN if f"--{name}" not in strings]
        for name in names:
            self.add_argument(f"--{name}", dest=f"word_{name}", help=argparse.SUPPRESS)
        options, words = self.parse_known_args(arguments)
        values = {name: vars(options).pop(f"word_{name}") for name in names}
        words += [f"{name}={value}" for name, value in values.items() if value is not None]
        for word in words:
            if word.startswith("-"):
                name = word.partition("=")[0]
                if name == "--env" and has_env:
                    hint = f" The environment is a separate word: {self.prog} E."
                else:
                    hint = _as_setting(name) or did_you_mean(name, self._option_string_actions)
                raise ConfigError(f"{self.prog} has no option {name!r}.{hint} See: {self.prog} --help")
            if "=" not in word:
                self.error(f"{word!r} is neither an option nor a key=value setting")
        return options, words

    def parse_words_anywhere(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """`parse_with_words`, also for settings before a word that is no option's."""
        is_setting = re.compile(r"[a-z_][\w.+-]*=").match
        return self.parse_with_words(sorted(arguments, key=lambda word: bool(is_setting(word))))

    def parse_without_words(self, arguments: Sequence[str], why: str) -> argparse.Namespace:
        """The options of a command that takes no settings but `debug=true`; `why` is in the error message."""
        options, words = self.parse_with_words(arguments)
        if settings := [word for word in words if word != "debug=true"]:
            self.error(f"{why}: leave out {settings[0]}")
        return options

    def parse_with_folder(self, arguments: Sequence[str], setting: str) -> tuple[argparse.Namespace, str]:
        """The options of a command whose only setting is a folder, and the folder."""
        from envgym.config.words import parse_overrides

        options, words = self.parse_with_words(arguments)
        settings = parse_overrides(words)
        if unknown := settings.keys() - {setting, "debug"}:
            raise ConfigError(f"{self.prog} has no setting {unknown.pop()!r}: it takes {setting}=FOLDER")
        return options, str(settings.get(setting, default_of(setting)))


def run_folders() -> list[Path]:
    """The folders of runs and evaluations."""
    return [Path(default_of(name)) for name in ("runs_dir", "evals_dir")]


def find_path(name: str) -> Path:
    """The path of a run, an evaluation or a file, by its name or its path."""
    for path in (*(folder / name for folder in run_folders()), Path(name)):
        if path.exists():
            return path
    names = [path.name for folder in run_folders() for path in folder.glob("*/")]
    raise ConfigError(f"there is no run, evaluation or file {name!r} (see: envgym runs).{did_you_mean(name, names)}")


def default_of(setting: str) -> Any:
    """The default of a setting of the whole run, such as `runs_dir`."""
    from envgym.config.schema import RunConfig

    return RunConfig.model_fields[setting].default


def _as_setting(option: str) -> str:
    """A hint for a setting that is written like an option, such as `--steps 10`."""
    from envgym.config.known_settings import known_keys, similar_keys
    from envgym.config.recipes import DEFAULT_RECIPE
    from envgym.config.schema import RunConfig, StageConfig

    key = option.lstrip("-").replace("-", "_")
    if key.partition(".")[0] in RunConfig.model_fields.keys() | StageConfig.model_fields.keys():
        return f" It is a setting, written {key}=…"
    names = similar_keys(key, known_keys({"learner": DEFAULT_RECIPE}))
    return f" There is a setting, written {' or '.join(f'{name}=…' for name in names)}" if names else ""


def add_run_options(parser: Parser) -> None:
    """Add the options of a run. Each sets a key of the configuration, except `--recipe` and `--config`."""
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", **MODEL)
    parser.add_argument("--learner", metavar="L", help="learner: id, file.py[:Name] or import path")
    parser.add_argument("--recipe", metavar="R", help="recipe to start from (see: envgym config recipes)")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--runtime", metavar="local|ray", help="where workers run")
    parser.add_argument("--name", metavar="RUN", help="name of the run's folder")


def cli_settings(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The settings from the options of `add_run_options` and the words; a word wins over an option."""
    from envgym.config.known_settings import parse_words
    from envgym.config.words import merge

    settings = {key: value for key in OF_RUN if (value := getattr(options, key, None)) is not None}
    return merge(settings, parse_words(words, settings))


def resolve_options(
    options: argparse.Namespace, words: Sequence[str], invocation: Invocation, *, samples_only: bool = False
) -> RunConfig:
    """The configuration of the options and words. Its `debug` makes the command's errors show tracebacks."""
    from envgym.config.resolve import resolve

    config = resolve(cli_settings(options, words), file=options.config, samples_only=samples_only)
    invocation.debug |= config.debug
    return config


def make_spec(name: str, words: Sequence[str]) -> EnvSpec:
    """The environment `name` with a run's settings for it: the keys `env` and `data`."""
    from envgym.registry import spec

    return spec(name, **env_settings(name, words))


def env_settings(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The settings that `make_spec` gives the environment `name`."""
    from envgym.config.known_settings import parse_words

    settings: dict[str, Any] = parse_words(words, {"env": name})
    settings.pop("debug", None)
    if unknown := [key for key in settings if key not in ("env", "data")]:
        advice = " An environment's settings are written env.KEY=VALUE."
        raise ConfigError(f"unknown key {unknown[0]!r}.{did_you_mean(unknown[0], ('env', 'data', 'debug')) or advice}")
    config = settings.get("env", {})
    data = {"data": settings["data"]} if "data" in settings else {}
    if not isinstance(config, dict):
        raise ConfigError(f"the environment is given already: {name!r}; its settings are written env.KEY=VALUE")
    return {**config, **data}
