"""Remote environments that were given a name: `envgym envs add NAME URL`, for this user or for a project.

A project's are in `envgym.yaml` in the current folder, a user's in `$XDG_CONFIG_HOME/envgym/environments.yaml`
(`~/.config` where that is not set). Of the same name in both, the project's counts. The files hold addresses and the
paths of token files, never a token.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envgym.env import describe_validation_error
from envgym.errors import ConfigError
from envgym.run_folder import write_atomically

Scope = Literal["user", "project"]
HEADER = "# Remote environments by their names; written by `envgym envs add` and `envgym envs remove`.\n"


class Registered(BaseModel):
    """Where a named environment is served, and what its servers are shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = Field(min_length=1)
    token_file: Path | None = None
    ca_file: Path | None = None

    def settings(self) -> dict[str, Any]:
        """The settings of a `RemoteEnvSpec`."""
        return self.model_dump(exclude_none=True)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    environments: dict[str, Registered] = {}


def file_of(scope: Scope) -> Path:
    """The file of a scope, which may not exist."""
    if scope == "project":
        return Path.cwd() / "envgym.yaml"
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "envgym" / "environments.yaml"


def registered() -> dict[str, Registered]:
    """All names, the project's before the user's. Raises `ConfigError` for a file that cannot be used."""
    return {**read("user"), **read("project")}


def scope_of(name: str) -> Scope | None:
    """Where `name` is found."""
    scopes: tuple[Scope, ...] = ("project", "user")
    return next((scope for scope in scopes if name in read(scope)), None)


def read(scope: Scope) -> Mapping[str, Registered]:
    """What is registered in `scope`. A relative path in the file counts from the file's folder."""
    path = file_of(scope)
    try:
        status = path.stat()
    except OSError:
        return {}
    return _parse(path, status.st_mtime_ns, status.st_size)


def add(scope: Scope, name: str, entry: Registered) -> Path:
    """Write `entry` down, in place of one of the same name; returns the file."""
    return _write(scope, {**read(scope), name: entry})


def remove(scope: Scope, name: str) -> Path:
    """Forget `name`; returns the file. Raises `KeyError` where it is not there."""
    entries = dict(read(scope))
    del entries[name]
    return _write(scope, entries)


@functools.lru_cache(maxsize=8)
def _parse(path: Path, _modified: int, _size: int) -> dict[str, Registered]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    try:
        entries = _File.model_validate(content or {}).environments
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_validation_error(error, _File)}") from None
    return {name: _with_paths(entry, path.parent) for name, entry in entries.items()}


def _with_paths(entry: Registered, folder: Path) -> Registered:
    paths = {"token_file": entry.token_file, "ca_file": entry.ca_file}
    return entry.model_copy(
        update={name: folder / path.expanduser() for name, path in paths.items() if path is not None}
    )


def _write(scope: Scope, entries: Mapping[str, Registered]) -> Path:
    import yaml

    path = file_of(scope)
    said = {name: entry.model_dump(mode="json", exclude_none=True) for name, entry in sorted(entries.items())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, HEADER + yaml.safe_dump({"environments": said}, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path
