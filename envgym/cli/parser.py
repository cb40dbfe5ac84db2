"""The parser that commands share: options, and `key=value` words anywhere among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from envgym.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from envgym.config.schema import RunConfig
    from envgym.env import EnvSpec

    from .errors import Invocation

ENV: dict[str, Any] = {"metavar": "E", "help": "environment: id, file.py[:Name], import path or URL"}


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line that names what was probably meant."""

    def __init__(self, command: str, arguments: str, summary: str, example: str) -> None:
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
        """The options, and the `key=value` words in the order given. Raises `ConfigError` for anything else."""
        options, words = self.parse_known_args(arguments)
        for word in words:
            if word.startswith("-"):
                name = word.partition("=")[0]
                if name == "--env" and any(action.metavar == "E" for action in self._get_positional_actions()):
                    meant = f" The environment is a word of its own: {self.prog} E."
                else:
                    meant = _as_setting(name) or did_you_mean(name, self._option_string_actions)
                raise ConfigError(f"{self.prog} has no option {name!r}.{meant} See: {self.prog} --help")
            if "=" not in word:
                self.error(f"{word!r} is neither an option nor a key=value setting")
        return options, words

    def parse_without_words(self, arguments: Sequence[str], why: str) -> argparse.Namespace:
        """The options of a command that takes no settings but `debug=true`, and says `why`."""
        options, words = self.parse_with_words(arguments)
        if refused := [word for word in words if word != "debug=true"]:
            self.error(f"{why}: leave out {refused[0]}")
        return options

    def parse_with_folder(self, arguments: Sequence[str], setting: str) -> tuple[argparse.Namespace, str]:
        """The options of a command whose only setting is a folder, and the folder."""
        from envgym.config.words import parse_words

        options, words = self.parse_with_words(arguments)
        given = parse_words(words)
        if unknown := given.keys() - {setting, "debug"}:
            raise ConfigError(f"{self.prog} has no setting {unknown.pop()!r}: it takes {setting}=FOLDER")
        return options, str(given.get(setting, default_of(setting)))


def run_folders() -> list[Path]:
    """The folders that runs and evaluations are kept in."""
    return [Path(default_of(name)) for name in ("runs_dir", "evals_dir")]


def find_path(given: str) -> Path:
    """The path of a run, an evaluation or a file, by its name or its path."""
    for path in (*(folder / given for folder in run_folders()), Path(given)):
        if path.exists():
            return path
    known = [path.name for folder in run_folders() for path in folder.glob("*/")]
    raise ConfigError(f"there is no run, evaluation or file {given!r} (see: envgym runs).{did_you_mean(given, known)}")


def default_of(setting: str) -> Any:
    """The default of a setting of the whole run, such as `runs_dir`."""
    from envgym.config.schema import RunConfig

    return RunConfig.model_fields[setting].default


def _as_setting(option: str) -> str:
    """A hint for `--steps 10`, which elsewhere is how it would be written."""
    from envgym.config.known_settings import known_keys, meant
    from envgym.config.recipes import DEFAULT_RECIPE
    from envgym.config.schema import RunConfig, StageConfig

    key = option.lstrip("-").replace("-", "_")
    known = {**RunConfig.model_fields, **StageConfig.model_fields}
    if key.partition(".")[0] in known:
        return f" It is a setting, written {key}=…"
    names = meant(key, known_keys({"learner": DEFAULT_RECIPE}))
    return f" There is a setting, written {' or '.join(f'{name}=…' for name in names)}" if names else ""


def add_run_options(parser: Parser) -> None:
    """The options that say what runs. Each is short for a key of the configuration, but for the two files."""
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", metavar="M", help="folder, hub id, run, checkpoint, or a recipe that makes a model")
    parser.add_argument("--learner", metavar="L", help="learner: id, file.py[:Name] or import path")
    parser.add_argument("--recipe", metavar="R", help="what to start from (see: envgym config recipes)")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--runtime", metavar="local|ray", help="where workers run")
    parser.add_argument("--name", metavar="RUN", help="name of the run's folder")


def given_settings(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The settings that `add_run_options` and the words give; a word wins over an option."""
    from envgym.config.words import merge, parse_words

    keys = ("env", "model", "learner", "runtime", "name")
    given = {key: value for key in keys if (value := getattr(options, key, None)) is not None}
    return merge(given, parse_words(words))


def resolve_options(options: argparse.Namespace, words: Sequence[str], invocation: Invocation) -> RunConfig:
    """The configuration that they describe; with its `debug`, errors of the command show their tracebacks."""
    from envgym.config.resolve import resolve

    recipe, file = getattr(options, "recipe", None), getattr(options, "config", None)
    config = resolve(given_settings(options, words), recipe=recipe, file=file)
    invocation.debug |= config.debug
    return config


def make_spec(name: str, words: Sequence[str]) -> EnvSpec:
    """The environment `name` with the settings that a run would give it: keys `env` and `data`."""
    from envgym.registry import spec

    return spec(name, **env_settings(name, words))


def env_settings(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The settings that `make_spec` gives the environment `name`."""
    from envgym.config.words import parse_words

    settings: dict[str, Any] = parse_words(words)
    settings.pop("debug", None)
    if unknown := [key for key in settings if key not in ("env", "data")]:
        advice = " An environment's settings are written env.KEY=VALUE."
        raise ConfigError(f"unknown key {unknown[0]!r}.{did_you_mean(unknown[0], ('env', 'data', 'debug')) or advice}")
    own = settings.get("env", {})
    data = {"data": settings["data"]} if "data" in settings else {}
    if not isinstance(own, dict):
        raise ConfigError(f"the environment is given already: {name!r}; its settings are written env.KEY=VALUE")
    return {**own, **data}
