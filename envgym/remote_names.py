"""Saved names of remote environments: `envgym envs add NAME URL`, for this user or for a project.

A project's are in `envgym.yaml` in the current folder, a user's in `$XDG_CONFIG_HOME/envgym/environments.yaml`
(`~/.config` where that is not set). Of the same name in both, the project's counts. The files hold addresses and the
paths of token files, never a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envgym.disk import write_atomically
from envgym.errors import ConfigError, reported_as
from envgym.settings import settings_error

Scope = Literal["user", "project"]
SCOPES: tuple[Scope, ...] = ("user", "project")
"""In ascending precedence."""
HEADER = "# Remote environments by their names; written by `envgym envs add` and `envgym envs remove`.\n"


class NamedEnvironment(BaseModel):
    """The addresses of a named environment, the token file for its servers, and trusted certificates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = Field(min_length=1)
    token_file: Path | None = None
    ca_file: Path | None = None

    def settings(self) -> dict[str, Any]:
        """The settings of a `RemoteEnvSpec`."""
        return self.model_dump(exclude_none=True)


class _NamesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    environments: dict[str, NamedEnvironment] = {}


def file_of(scope: Scope) -> Path:
    """The file of a scope, which may not exist."""
    if scope == "project":
        return Path.cwd() / "envgym.yaml"
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "envgym" / "environments.yaml"


def read_all() -> dict[str, NamedEnvironment]:
    """All names, the project's before the user's. Raises `ConfigError` for a file that cannot be used."""
    return {**read("user"), **read("project")}


def read_usable() -> tuple[dict[str, NamedEnvironment], list[str]]:
    """The names in the usable files, and the errors of the other files."""
    entries: dict[str, NamedEnvironment] = {}
    problems: list[str] = []
    for scope in SCOPES:
        try:
            entries |= read(scope)
        except ConfigError as error:
            problems.append(str(error))
    return entries, problems


def read(scope: Scope) -> Mapping[str, NamedEnvironment]:
    """The names in `scope`. A relative path in the file counts from the file's folder."""
    path = file_of(scope)
    if not os.path.exists(path):
        return {}
    from envgym.yaml_files import read_yaml

    try:
        entries = _NamesFile.model_validate(read_yaml(path)).environments
    except ValidationError as error:
        raise settings_error(error, _NamesFile, str(path)) from None
    return {name: _with_paths(entry, path.parent) for name, entry in entries.items()}


def _with_paths(entry: NamedEnvironment, folder: Path) -> NamedEnvironment:
    paths = {name: path for name in ("token_file", "ca_file") if (path := getattr(entry, name)) is not None}
    return entry.model_copy(update={name: folder / path.expanduser() for name, path in paths.items()})


def save(scope: Scope, name: str, entry: NamedEnvironment | None) -> Path:
    """Save `entry` under `name`, in place of one of the same name, or remove the name with None; returns the file,
    which is rewritten without its comments."""
    import yaml

    from envgym.yaml_files import read_yaml

    path = file_of(scope)
    with reported_as(ConfigError, f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        read(scope)  # never overwrite a file that cannot be read
        entries = dict(read_yaml(path).get("environments", {})) if path.exists() else {}
        if entry is None:
            del entries[name]
        else:
            entries[name] = entry.model_dump(mode="json", exclude_none=True)
        content = yaml.safe_dump({"environments": entries}, sort_keys=False, allow_unicode=True)
        write_atomically(path, HEADER + content)
    return path
