"""Names of environments, learners and agents.

Environment ids follow Gymnasium: `namespace/Name-v0`, the namespace and the version optional; a name without a version
means the newest. Gymnasium's own registry is not used: it is one global dictionary of Gymnasium's environments, in a
package that is optional here. Tests compare the grammar and the suggestions with Gymnasium's.

Packages register names by entry points, which are read at the first look-up of a name; a class is imported when it is
used. The groups:

- `envgym.envs`, `envgym.learners`, `envgym.agents`: classes by name.
- `envgym.files`: functions of a file's path and of the name after it (`file.py:Name`, else empty) that return an
  `EnvSpec` subclass or None. They load environment files of other programs, and are called before a file is imported;
  of an import path only for a callable that is no environment.
- `envgym.schemes`: `EnvSpec` subclasses by the scheme of a name (`http`).
- `envgym.task_sets`: modules whose folders hold the files of named task sets (`envgym.tasks.named_sets`).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from .env import CheckedEnv, Env, EnvSpec
from .env.spec import docstring, first_sentence
from .errors import ConfigError, EnvgymError, NameNotFound, VersionNotFound, did_you_mean
from .loading import (
    absolute_target,
    attribute,
    check_class,
    entry_points,
    import_target,
    is_file_target,
    list_of,
    load_class,
    load_function,
    not_installed,
    split_target,
    target_of,
    target_of_name,
)
from .remote_names import NamedEnvironment, read_all, read_usable
from .tasks.named_sets import NamedTaskSet, is_task_set_file, read_task_set, task_set_files

LOCATIONS = {"urls", "listen"}
"""Settings that locate a remote environment under a name that is not registered."""
_ID = re.compile(r"(?:(?P<namespace>[\w:-]+)/)?(?P<name>[\w:.-]+?)(?:-v(?P<version>\d+))?")


@dataclass(frozen=True, slots=True)
class Registration:
    """The environment of an id: a class, or `module:attr` to import when it is used, and its default settings."""

    id: str
    entry_point: str | type
    kwargs: dict[str, Any] = field(default_factory=dict)
    task_set: NamedTaskSet | None = None
    """The named task set of this id. Its environment is registered under another id."""

    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The environment's settings: its defaults, with the caller's `settings` in their place where both have a
        value."""
        return self.task_set.settings(settings) if self.task_set is not None else self.kwargs | settings

    @property
    def summary(self) -> str:
        """A sentence on the environment. Raises `EnvgymError` if it cannot be loaded."""
        cls = load_env_class(self.entry_point)
        return self.task_set.description if self.task_set is not None else first_sentence(docstring(cls))


_registered: dict[str, Registration] = {}


def register(
    id: str,
    entry_point: str | type[Env] | type[EnvSpec] | Callable[..., Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Register an environment: an `Env` or `EnvSpec` subclass, a function that `envgym.reward` decorates, or the target
    of an import (`"module:Name"`).

    Its default settings come from `kwargs`, as in Gymnasium, and from `settings`. Registering an id again replaces it,
    with a warning. Raises `ConfigError` for a malformed id, and for a name with and without versions.
    """
    if "max_episode_steps" in settings:
        raise ConfigError("max_episode_steps: the agent limits an episode, by agent.max_turns")
    id = check_new_id(id, _registrations())
    if id in _registered:
        warnings.warn(f"environment {id!r} is registered again, and replaced", stacklevel=2)
    if not isinstance(entry_point, str):
        entry_point = _class_of(entry_point, id)
    _registered[id] = Registration(id, entry_point, {**(kwargs or {}), **settings})


def check_new_id(id: str, registered: Collection[str]) -> str:
    """The id in its normal form, for registration next to the ids `registered`.

    Raises `ConfigError` for a malformed id, and for a name with and without versions.
    """
    namespace, name, version = parse_env_id(id)
    id = env_id(namespace, name, version)
    siblings = [key for key in registered if parse_env_id(key)[:2] == (namespace, name) and key != id]
    if siblings and (version is None or any(parse_env_id(key)[2] is None for key in siblings)):
        raise ConfigError(f"cannot register {id!r} beside {siblings[0]!r}: give all of a name's ids a version, or none")
    return id


def list_ids() -> list[str]:
    """All registered environment ids, sorted, with named task sets, and names (`envgym envs add`) in files that can be
    read."""
    return sorted({*_named_remotely(read_usable()[0]), *task_set_files(), *_registrations()})


def is_installed(id: str) -> bool:
    """True if any version of this name is registered, by a package or by this process.

    Raises `ConfigError` for a malformed id.
    """
    name = parse_env_id(id)[:2]
    return any(parse_env_id(key)[:2] == name for key in _registrations())


def spec(name: str | type[Env] | type[EnvSpec] | Callable[..., Any], /, **kwargs: Any) -> EnvSpec:
    """The spec of the environment `name`, with the settings `kwargs`.

    `name` is an id, a file (`file.py`, `file.py:Class`, `task_set.yaml`), an import path (`package.module:Class`), or a
    URL. A scheme wins over a module of the same name; `python:package.module:Class` is always an import path. A class
    or a reward function may stand for its name.
    Raises `NameNotFound` or `VersionNotFound` for an unknown name, and `ConfigError` for invalid settings.
    """
    if not isinstance(name, str):
        label = getattr(name, "__name__", f"{name!r:.60}")
        return _build(label, _class_of(name, label), kwargs)
    if name.startswith("python:"):
        return _build(name, name.removeprefix("python:"), kwargs)
    scheme, colon, _ = name.partition(":")
    schemes = entry_points("envgym.schemes")
    if colon and scheme in schemes:
        return _build(name, schemes[scheme], kwargs)
    if "://" in name:
        raise ConfigError(_unknown_scheme(name))
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", name):  # a module name does not begin with a digit
        raise ConfigError(f"{name} looks like an address: write http://{name}, or https://{name}")
    if is_file_target(name):
        name = absolute_target(name)
    elif (is_file := is_task_set_file(name)) or ":" not in name or name in _registrations():
        try:
            registration = find(name)
        except (ConfigError, NameNotFound, VersionNotFound):
            if is_file or not kwargs.keys() & LOCATIONS or "http" not in schemes or is_installed(name):
                raise
            return _build(name, schemes["http"], kwargs)
        return _build(registration.id, registration.entry_point, registration.settings(kwargs))
    return _build(name, name, kwargs)


def make(name: str | type[Env] | type[EnvSpec] | Callable[..., Any], /, **kwargs: Any) -> CheckedEnv:
    """A new instance of the environment `name`, with the settings `kwargs`; see `spec` for names.

    It has a spec of its own, which its `close` closes too: use `spec(…).make()` for several instances of one spec.
    """
    env = spec(name, **kwargs).make()
    env.owns_spec = True
    return env


def spec_from_json(text: str) -> EnvSpec:
    """Build a spec from its description (`EnvSpec.to_json`); the two are equal."""
    try:
        description = json.loads(text)
        name, kwargs = description["id"], description.get("kwargs", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not an environment's description ({error!r}): {text:.80}") from None
    return spec(name, **kwargs)


EnvSpec.from_json = spec_from_json


def write_description(spec: EnvSpec, folder: Path, parent: str = "") -> None:
    """Write the description of an environment into a folder, as `environment.json`. An environment in a file has that
    beside it: the description names the file, after `parent`. Nothing is written, no folder is made, for a spec that
    cannot be described."""
    description = json.loads(spec.to_json())
    folder.mkdir(exist_ok=True)
    if is_file_target(spec.id):
        file, target = split_target(spec.id)
        shutil.copy(file, folder)
        description["id"] = f"{parent}{Path(file).name}:{target}".removesuffix(":")
    (folder / "environment.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_component(kind: Literal["learner", "agent"], name: str) -> type:
    """The `Learner` or `Agent` class of a name: an id, `file.py[:Class]` or `package.module:Class`."""
    from . import agent, learner

    base: type = learner.Learner if kind == "learner" else agent.Agent
    cls: Any = load_class(target_of_name(f"envgym.{kind}s", name, kind), (base,), kind)
    if kind == "agent" and "name" in cls.Config.model_fields:
        raise ConfigError(f"agent {name}: a setting cannot be called name, which selects the agent: rename it")
    component: type = cls
    return component


def parse_env_id(id: str) -> tuple[str | None, str, int | None]:
    """Split an id into (namespace, name, version), as Gymnasium does. Raises `ConfigError` for a malformed one."""
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError(f"malformed environment id {id!r}: ids look like [namespace/]name[-v0]")
    namespace, name, version = match.group("namespace", "name", "version")
    return namespace, name, None if version is None else int(version)


def env_id(namespace: str | None, name: str, version: int | None) -> str:
    """The id with these parts; the inverse of `parse_env_id`."""
    return (f"{namespace}/" if namespace is not None else "") + name + (f"-v{version}" if version is not None else "")


def find(id: str) -> Registration:
    """The registration of `id`. No version means the newest; an older one gives a `DeprecationWarning`.

    `id` may also be the file of a task set. Raises `NameNotFound` (with the closest name) or `VersionNotFound` (with
    the registered versions).
    """
    if is_task_set_file(id):
        return _of_task_set(Path(id).expanduser().resolve())
    registrations = _registrations()
    namespace, name, version = parse_env_id(id)
    keys = [key for key in registrations if parse_env_id(key)[:2] == (namespace, name)]
    if not keys and id in (files := task_set_files()):
        return _of_task_set(files[id], id)
    if not keys:
        try:
            registrations = _named_remotely(read_all())
        except ConfigError as error:  # the name may be in an unreadable file, so this is no NameNotFound
            raise ConfigError(f"there is no environment {id!r} here.{_suggest(namespace, name)} But {error}") from None
        keys = [key for key in registrations if parse_env_id(key)[:2] == (namespace, name)]
    if not keys:
        raise NameNotFound(f"there is no environment {id!r}.{_suggest(namespace, name)}{not_installed()}")
    latest = max(keys, key=lambda key: parse_env_id(key)[2] or 0)
    if version is None:
        return registrations[id if id in registrations else latest]
    id = env_id(namespace, name, version)
    if id not in registrations:
        raise VersionNotFound(f"there is no version v{version} of that environment: there is {', '.join(sorted(keys))}")
    if id != latest:
        warnings.warn(f"environment {id} is out of date: use {latest}", DeprecationWarning, stacklevel=3)
    return registrations[id]


def task_set_of(name: str) -> NamedTaskSet | None:
    """The named task set called `name`; None if there is none."""
    try:
        return find(name).task_set
    except EnvgymError:  # a path, a URL or an unknown name, whose error comes with its settings
        return None


def _suggest(namespace: str | None, name: str) -> str:
    """A hint: the file of that name, or the closest name of the same namespace, or else of all, as Gymnasium's."""
    if namespace is None and Path(f"{name}.py").is_file():
        return f" Did you mean the file {name}.py?"
    ids = {parse_env_id(key)[:2] for key in list_ids()}
    names = [candidate for space, candidate in ids if space == namespace]
    if matches := get_close_matches(name, names, n=1, cutoff=0.5):
        return f" Did you mean {env_id(namespace, matches[0], None)!r}?"
    return did_you_mean(env_id(namespace, name, None), [env_id(*id, None) for id in ids]) or list_of(list_ids())


def _unknown_scheme(url: str) -> str:
    scheme = url.partition("://")[0]
    message = f"{scheme}://…: environments are served at http://HOST:PORT/NAME or https://HOST:PORT/NAME (envgym serve)"
    if scheme in ("ws", "wss"):
        address = f"http{scheme[2:]}://…"
        message += f"; write {address} for a server of envgym"
        for name, target in entry_points("envgym.schemes").items():
            if not name.startswith("http") and load_env_class(target).address == "URL":
                message += f", {name}:{address} for one of {name}"
    return message


def _build(id: str, target: str | type[Any], kwargs: dict[str, Any]) -> EnvSpec:
    cls = load_env_class(target)
    if issubclass(cls, EnvSpec):
        return cls(id, **kwargs)
    spec_class: type[EnvSpec] = cls.spec_class
    return spec_class(id, cls, **kwargs)


def load_env_class(target: str | type[Any]) -> type[Any]:
    """The `Env` or `EnvSpec` class of a file or an import path (`file.py[:Name]`, `package.module:Name`); a class is
    returned unchanged."""
    if isinstance(target, type):
        return target
    file, name = split_target(target)
    path = Path(file).expanduser().resolve() if is_file_target(file) else _file_of_callable(file, name)
    if path is not None:
        for adapter in entry_points("envgym.files").values():
            adapt = load_function(adapter, "adapter of files")
            if (spec_class := adapt(path, name)) is not None:
                return check_class(spec_class, target, (EnvSpec,), "environment")
    return load_class(target, (EnvSpec, Env), "environment")


def _class_of(value: Any, label: str) -> type[Any]:
    """The environment class that `value` is or has, or that an adapter knows for the callable."""
    target = ""
    if _is_bare_callable(value):
        with contextlib.suppress(ConfigError):  # without a target no adapter can be asked
            target = target_of(value)
    return load_env_class(target) if target else check_class(value, label, (EnvSpec, Env), "environment")


def _file_of_callable(location: str, name: str) -> Path | None:
    """The file of an imported module in which `name` is a callable that is no environment, for the adapters."""
    module = import_target(location) if name else None
    file = getattr(module, "__file__", None)
    return Path(file) if file and _is_bare_callable(attribute(module, name)) else None


def _is_bare_callable(value: object) -> bool:
    return callable(value) and not isinstance(value, type) and not hasattr(value, "__environment__")


def _registrations() -> dict[str, Registration]:
    """All registrations of installed packages and of this process, whose take precedence."""
    installed = entry_points("envgym.envs").items()
    # A malformed id of a package is skipped: it cannot be named, and must not break the others.
    return {id: Registration(id, target) for id, target in installed if _ID.fullmatch(id)} | _registered


def _of_task_set(path: Path, id: str | None = None) -> Registration:
    """The registration of a named task set. Raises `NameNotFound` if its environment is not installed."""
    task_set = read_task_set(path)
    env = str(task_set.env["name"])
    if is_file_target(env):
        return Registration(id or str(path), str(path.parent / env), task_set=task_set)
    try:
        entry_point = env if ":" in env else find(env).entry_point
    except (NameNotFound, VersionNotFound):
        raise NameNotFound(f"task set {task_set.name} needs environment {env}, which is not installed") from None
    return Registration(id or str(path), entry_point, task_set=task_set)


def _named_remotely(names: Mapping[str, NamedEnvironment]) -> dict[str, Registration]:
    """The registrations of remote environments' names (`envgym envs add`)."""
    if "http" not in entry_points("envgym.schemes"):
        return {}
    return {name: registration_of(name, entry) for name, entry in names.items() if _ID.fullmatch(name)}


def registration_of(name: str, entry: NamedEnvironment) -> Registration:
    """The registration of a remote environment's name, which stands for a single URL of another scheme than http."""
    schemes, settings = entry_points("envgym.schemes"), entry.settings()
    scheme = entry.urls[0].partition(":")[0]
    if scheme not in schemes or scheme in ("http", "https") or len(entry.urls) > 1:
        return Registration(name, schemes["http"], settings)
    del settings["urls"]
    return Registration(entry.urls[0], schemes[scheme], settings)
