"""Names for environments, learners and agents.

Environment ids follow Gymnasium: `namespace/Name-v0`, the namespace and the version optional; a name without a version
means the newest. Gymnasium's own registry holds its own environments in one global dictionary, and Gymnasium
is optional here, so this is code of ours; tests hold its grammar and its suggestions to Gymnasium's.

Packages offer theirs by entry points of the groups `envgym.envs`, `envgym.learners` and `envgym.agents`. They
are read when a name is first looked up, and a class is imported when it is asked for. Those of the group `envgym.files`
make environments of files that are written for another program: each is a function of a file's path and of the name
behind it (`file.py:Name`, else empty) that returns an `EnvSpec` subclass, or None where the file is not one of those.
They are asked before the file is imported.

Environments that are elsewhere come by three groups, so that no client is imported here. `envgym.schemes`: what stands
before the colon of a name (`http`), and `envgym.locators`: a setting that says where the environment of a name is that
nobody registered (`urls`), each with the `EnvSpec` subclass that is made of the name and the settings.
`envgym.directories`: functions `(*, strict: bool)` that return the registrations of names which are kept elsewhere;
`strict` ones raise `ConfigError` where those cannot be read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from .env import CheckedEnv, Env, EnvSpec
from .errors import ConfigError, NameNotFound, VersionNotFound, did_you_mean
from .loading import absolute_target, check_class, entry_points, is_file_target, load_class, load_function, split_target

_ID = re.compile(r"(?:(?P<namespace>[\w:-]+)/)?(?P<name>[\w:.-]+?)(?:-v(?P<version>\d+))?")


@dataclass(frozen=True, slots=True)
class Registration:
    """An id's environment: a class, or `module:attr` that is imported when needed, and its default settings."""

    id: str
    entry_point: str | type
    kwargs: dict[str, Any] = field(default_factory=dict)


_registered: dict[str, Registration] = {}


def register(id: str, entry_point: str | type[Env] | type[EnvSpec] | Callable[..., Any], /, **kwargs: Any) -> None:
    """Make `id` stand for an environment: an `Env` or `EnvSpec` subclass, a function that `envgym.reward` decorates, or
    where to find one (`"module:Name"`).

    `kwargs` are its settings by default. Registering an id again replaces it, with a warning.
    Raises `ConfigError` for a malformed id, and where a name would have both versions and none.
    """
    id = check_beside(id, _registrations())
    if id in _registered:
        warnings.warn(f"environment {id!r} is registered anew", stacklevel=2)
    if not isinstance(entry_point, str):
        entry_point = check_class(entry_point, id, (EnvSpec, Env), "environment")
    _registered[id] = Registration(id, entry_point, kwargs)


def check_beside(id: str, known: Collection[str]) -> str:
    """The id as it is registered beside those `known`. Raises `ConfigError` for a malformed one, and where its name
    would have both versions and none."""
    namespace, name, version = parse_env_id(id)
    id = env_id(namespace, name, version)
    others = [key for key in known if parse_env_id(key)[:2] == (namespace, name) and key != id]
    if others and (version is None or any(parse_env_id(key)[2] is None for key in others)):
        raise ConfigError(f"cannot register {id!r} beside {others[0]!r}: give all of a name's ids a version, or none")
    return id


def list_ids() -> list[str]:
    """All registered environment ids, sorted; also those of directories (`envgym envs add`) that can be read."""
    return sorted({*_from_directories(strict=False), *_registrations()})


def is_installed(id: str) -> bool:
    """True if an environment of this name, in whatever version, is registered by a package or by this process.

    Raises `ConfigError` for a malformed id.
    """
    wanted = parse_env_id(id)[:2]
    return any(parse_env_id(key)[:2] == wanted for key in _registrations())


def spec(name: str, /, **kwargs: Any) -> EnvSpec:
    """The environment that `name` stands for, with `kwargs` as its settings.

    `name` is an id, a file (`file.py`, `file.py:Class`), an import path (`package.module:Class`), or has a scheme: a
    URL. A scheme comes first: `python:package.module:Class` is an import path whatever schemes there are.
    Raises `NameNotFound` or `VersionNotFound` for what does not exist, `ConfigError` for unusable settings.
    """
    if name.startswith("python:"):
        return _build(name, name.removeprefix("python:"), kwargs)
    scheme, colon, _ = name.partition(":")
    if colon and scheme in (schemes := entry_points("envgym.schemes")):
        return _build(name, schemes[scheme], kwargs)
    if "://" in name:
        raise ConfigError(_other_scheme(name))
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", name):  # what is imported does not begin with a digit
        raise ConfigError(f"{name} looks like an address: write http://{name}, or https://{name}")
    if is_file_target(name):
        name = absolute_target(name)
    elif ":" not in name or name in _registrations():
        try:
            registration = find(name)
        except (ConfigError, NameNotFound, VersionNotFound):
            locators = [target for setting, target in entry_points("envgym.locators").items() if setting in kwargs]
            if not locators or is_installed(name):
                raise
            return _build(name, locators[0], kwargs)
        return _build(registration.id, registration.entry_point, registration.kwargs | kwargs)
    return _build(name, name, kwargs)


def make(name: str, /, **kwargs: Any) -> CheckedEnv:
    """A new instance of the environment that `name` stands for; see `spec`. Its `close` closes the spec too, which was
    made for it alone: use `spec` where several instances are to share one."""
    env = spec(name, **kwargs).make()
    env.owns_spec = True
    return env


def spec_from_json(text: str) -> EnvSpec:
    """Rebuild an environment from its description (`EnvSpec.to_json`); the two are equal."""
    try:
        description = json.loads(text)
        name, kwargs = description["id"], description.get("kwargs", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not an environment's description ({error!r}): {text:.80}") from None
    return spec(name, **kwargs)


def load_component(kind: Literal["learner", "agent"], name: str) -> type:
    """The `Learner` or `Agent` class that `name` stands for: an id, `file.py[:Class]` or `package.module:Class`."""
    from . import agent, learner

    base: type = learner.Learner if kind == "learner" else agent.Agent
    if is_file_target(name) or ":" in name:
        return load_class(name, (base,), kind)
    known = entry_points(f"envgym.{kind}s")
    if name not in known:
        raise NameNotFound(
            f"there is no {kind} {name!r}.{did_you_mean(name, known) or _known(known)}{_not_installed()}"
        )
    return load_class(known[name], (base,), kind)


def parse_env_id(id: str) -> tuple[str | None, str, int | None]:
    """Split an id into (namespace, name, version), as Gymnasium does. Raises `ConfigError` for a malformed one."""
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError(f"malformed environment id {id!r}: ids look like [namespace/]name[-v0]")
    namespace, name, version = match.group("namespace", "name", "version")
    return namespace, name, None if version is None else int(version)


def env_id(namespace: str | None, name: str, version: int | None) -> str:
    """The id of the three parts; the inverse of `parse_env_id`."""
    return (f"{namespace}/" if namespace is not None else "") + name + (f"-v{version}" if version is not None else "")


def find(id: str) -> Registration:
    """The registration of `id`: without a version the newest, and an older one with a `DeprecationWarning`.

    Raises `NameNotFound` (with the nearest name there is) or `VersionNotFound` (with the versions there are).
    """
    known = _registrations()
    namespace, name, version = parse_env_id(id)
    keys = [key for key in known if parse_env_id(key)[:2] == (namespace, name)]
    if not keys:
        try:
            known = _from_directories(strict=True)
        except ConfigError as error:  # it may be named there: another of that name is not taken for it
            raise ConfigError(f"there is no environment {id!r} here.{_nearest(namespace, name)} But {error}") from None
        keys = [key for key in known if parse_env_id(key)[:2] == (namespace, name)]
    if not keys:
        raise NameNotFound(f"there is no environment {id!r}.{_nearest(namespace, name)}{_not_installed()}")
    newest = max(keys, key=lambda key: parse_env_id(key)[2] or 0)
    if version is None:
        return known[id if id in known else newest]
    id = env_id(namespace, name, version)
    if id not in known:
        raise VersionNotFound(f"there is no version v{version} of that environment: there is {', '.join(sorted(keys))}")
    if id != newest:
        warnings.warn(f"environment {id} is out of date: use {newest}", DeprecationWarning, stacklevel=3)
    return known[id]


def _nearest(namespace: str | None, name: str) -> str:
    """As Gymnasium suggests: the nearest name of the same namespace, and failing that of all."""
    ids = {parse_env_id(key)[:2] for key in list_ids()}
    near = get_close_matches(name, [other for space, other in ids if space == namespace], n=1, cutoff=0.5)
    if near:
        return f" Did you mean {env_id(namespace, near[0], None)!r}?"
    return did_you_mean(env_id(namespace, name, None), [env_id(*id, None) for id in ids]) or _known(list_ids())


def _other_scheme(url: str) -> str:
    scheme = url.partition("://")[0]
    message = f"{scheme}://…: environments are served at http://HOST:PORT/NAME or https://HOST:PORT/NAME (envgym serve)"
    if scheme in ("ws", "wss"):
        message += (
            f"; give a server of ours as http{scheme[2:]}://… A WebSocket is how OpenEnv's servers are stepped, whose "
            "protocol is not spoken here: write an Env that calls OpenEnv's own client"
        )
    return message


def _build(id: str, target: str | type[Any], kwargs: dict[str, Any]) -> EnvSpec:
    cls = load_env_class(target)
    if issubclass(cls, EnvSpec):
        return cls(id, **kwargs)
    spec_class: type[EnvSpec] = cls.spec_class
    return spec_class(id, cls, **kwargs)


def load_env_class(target: str | type[Any]) -> type[Any]:
    """The `Env` or `EnvSpec` class that a file or an import path (`file.py[:Name]`, `package.module:Name`) names; a
    class is its own."""
    if isinstance(target, type):
        return target
    file, name = split_target(target)
    if is_file_target(file):
        for adapter in entry_points("envgym.files").values():
            adapt = load_function(adapter, "adapter of files")
            if (adapted := adapt(Path(file).expanduser().resolve(), name)) is not None:
                return check_class(adapted, target, (EnvSpec,), "environment")
    if set(_IMPORTS.findall(_source(file))) == {"verifiers"}:  # what knows envgym as well, knows what it does
        raise ConfigError(
            f"{target} is written for verifiers, whose environments and tasksets are not spoken here: write an Env "
            "that poses its tasks and calls its rewards (docs/environments.md)"
        )
    return load_class(target, (EnvSpec, Env), "environment")


_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(envgym|verifiers)\b", re.MULTILINE)


def _source(where: str) -> str:
    """The text of a file or module, which is not imported for it; empty where it has none, or cannot be read."""
    try:
        if is_file_target(where):
            path: str | None = where
        else:
            found = importlib.util.find_spec(where)
            path = None if found is None else found.origin
        return Path(path or "").expanduser().read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError, AttributeError):
        return ""


def _registrations() -> dict[str, Registration]:
    """All registrations: those of installed packages, and over them those of this process."""
    installed = entry_points("envgym.envs").items()
    # Somebody's malformed id cannot be asked for, and should not stand in the way of the others.
    return {id: Registration(id, target) for id, target in installed if _ID.fullmatch(id)} | _registered


def _from_directories(*, strict: bool) -> dict[str, Registration]:
    """The registrations of names that are kept elsewhere. `strict` raises `ConfigError` where they cannot be read."""
    kept: dict[str, Registration] = {}
    for target in entry_points("envgym.directories").values():
        kept |= load_function(target, "directory of environments")(strict=strict)
    return {id: registration for id, registration in kept.items() if _ID.fullmatch(id)}


def _known(names: Collection[str]) -> str:
    return f" There is {', '.join(sorted(names))}." if names else ""


def _not_installed() -> str:
    """A hint for those who run from a checkout, where entry points are missing."""
    try:
        importlib.metadata.distribution("envgym")
    except importlib.metadata.PackageNotFoundError:
        return " (envgym is not installed here, so nothing is registered: pip install -e . in its folder)"
    return ""
