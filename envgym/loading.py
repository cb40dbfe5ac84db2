"""Targets of the user's classes and functions: `file.py`, `file.py:Name` or `package.module:Name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError, EnvgymError, NameNotFound, did_you_mean

MAIN = "__main__"
"""The module of the running script, notebook or interactive session."""
importing: ContextVar[str] = ContextVar("importing", default="")
"""The file or module that `import_target` is executing."""


@functools.cache  # reading them takes milliseconds, and installed packages do not change
def entry_points(group: str) -> dict[str, str]:
    """name -> `module:attr` (or `module`) of the entry points of installed packages."""
    return {entry_point.name: entry_point.value for entry_point in importlib.metadata.entry_points(group=group)}


def target_of_name(group: str, name: str, noun: str, builtin: tuple[str, ...] = ()) -> str:
    """The target of a component's name: `name` itself if it is a file or an import path, else that of the entry point
    `name` of `group`. Raises `NameNotFound`, which lists the names, with those in `builtin`."""
    if is_file_target(name) or ":" in name:
        return name
    targets = entry_points(group)
    if name not in targets:
        hint = did_you_mean(name, [*targets, *builtin]) or list_of([*targets, *builtin])
        raise NameNotFound(f"there is no {noun} {name!r}.{hint}{not_installed()}")
    return targets[name]


def list_of(names: Collection[str]) -> str:
    """A hint with all names; empty without any."""
    return f" There is {', '.join(sorted(names))}." if names else ""


def not_installed() -> str:
    """A hint for runs from a checkout without an installation, where entry points are missing."""
    try:
        importlib.metadata.distribution("envgym")
    except importlib.metadata.PackageNotFoundError:
        return " (envgym is not installed here, so nothing is registered: pip install -e . in its folder)"
    return ""


def is_file_target(name: str) -> bool:
    """True if `name` is the path of a Python file, with or without `:Name`."""
    return name.endswith(".py") or ".py:" in name


def absolute_target(name: str) -> str:
    """`file.py:Name` with an absolute path, which is valid in any working directory."""
    file, class_name = split_target(name)
    path = str(Path(file).expanduser().resolve())
    return f"{path}:{class_name}" if class_name else path


def short_name(name: str) -> str:
    """A component's name in a folder's: its id, its file or module, or in a notebook its own name."""
    location, _, class_name = name.partition(":")
    return class_name if location == MAIN else Path(location).stem


def target_of(value: type | Callable[..., Any]) -> str:
    """The target of a class, function or other callable: `package.module:Name`, or `file.py:Name` outside packages; in
    a notebook or an interactive session `__main__:Name`, which no other process can load.

    Raises `ConfigError` unless it is at the top level of its module, or for an instance of any module."""
    modules = [sys.modules.get(value.__module__)]
    if not (isinstance(value, type) or inspect.isfunction(value)):  # its class's module says nothing of where it is
        modules += list(sys.modules.values())
    tables = [getattr(module, "__dict__", {}) for module in modules]
    locations = [(table, name) for table in tables for name, item in list(table.items()) if item is value]
    if not locations:
        name = getattr(value, "__qualname__", f"{value!r:.60}")
        raise ConfigError(f"{name} is no top-level name of {value.__module__}: define it at the top level of a file")
    variables, name = locations[0]
    if variables.get("__package__"):
        return f"{variables['__spec__'].name}:{name}"
    file = Path(variables.get("__file__") or "")
    return f"{file.resolve() if file.suffix == '.py' and file.is_file() else variables['__name__']}:{name}"


def session_source(target: str) -> str:
    """The source of the notebook cell that defines a class or function of this session (`__main__:Name`). Empty for
    another target, and if Python has not kept it."""
    location, _, name = target.partition(":")
    value = getattr(sys.modules.get(MAIN), name, None) if location == MAIN else None
    codes = [item.__code__ for item in (value, *getattr(value, "__dict__", {}).values()) if inspect.isfunction(item)]
    return "".join(linecache.getlines(codes[0].co_filename)) if codes else ""


def load_class(target: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    """The class that `target` names, which must be a concrete subclass of one of `bases`.

    A file without `:Name` must define exactly one such class. `noun` is its kind in messages ("environment").
    Raises `NameNotFound` for a missing file, module or class, `ConfigError` for an unusable one.
    """
    location, name = split_target(target)
    module = import_target(location)
    if not name:
        return _only_class(module, location, bases, noun)
    return check_class(_attribute(module, location, name), target, bases, noun)


def load_function(target: str, noun: str) -> Callable[..., Any]:
    """The function that `target` names: `file.py:name` or `package.module:name`. `noun` is its kind in messages.

    Raises `NameNotFound` for a missing file, module or function, `ConfigError` for anything but a function.
    """
    location, name = split_target(target)
    if not name:
        raise NameNotFound(f"{target} names no {noun}: write {target}:NAME")
    function: Callable[..., Any] = _attribute(import_target(location), location, name)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{target} is not usable as {noun}: it must be a function")
    return function


def check_class(value: object, target: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    """Return `value` (or its `class_of`) if it is a concrete subclass of one of `bases`, else raise `ConfigError`."""
    value = class_of(value)
    if not (isinstance(value, type) and issubclass(value, bases)):
        base_names = " or ".join(map(_public_name, bases))
        hint = " (or decorate it with @envgym.reward)" if inspect.isfunction(value) and noun == "environment" else ""
        raise ConfigError(f"{target} is not usable as {noun}: it must be a subclass of {base_names}{hint}")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
        raise ConfigError(f"{target} is not usable as {noun}: it does not define {missing}")
    return value


def _public_name(cls: type) -> str:
    """The import path of a class, without the defining module if the package exports it."""
    package = cls.__module__.rpartition(".")[0]
    is_exported = getattr(sys.modules.get(package), cls.__name__, None) is cls
    return f"{package if is_exported else cls.__module__}.{cls.__name__}"


def class_of(value: object) -> object:
    """The environment class of a function that `envgym.reward` decorates; else `value` itself."""
    return getattr(value, "__environment__", value) if inspect.isfunction(value) else value


def split_target(target: str) -> tuple[str, str]:
    """A target's file or module, and the name in it, which may be empty."""
    if target.endswith(".py") or ":" not in target:
        return target, ""
    location, _, name = target.rpartition(":")
    return location, name


def import_target(location: str) -> ModuleType:
    """Import a file (`….py`) or a module. Raises `NameNotFound` or, in one line, `ConfigError`."""
    token = importing.set(location)
    try:
        is_file = location.endswith(".py")
        return _import_file(Path(location).expanduser().resolve()) if is_file else _import_module(location)
    finally:
        importing.reset(token)


def _attribute(module: ModuleType, location: str, name: str) -> Any:
    if (value := attribute(module, name)) is None:
        if location == MAIN:
            raise NameNotFound(
                f"{name} was defined in a notebook or an interactive session and exists only there: define it in a file"
            )
        raise NameNotFound(f"{location} defines no {name!r}.{did_you_mean(name, vars(module))}")
    return value


def attribute(module: Any, name: str) -> Any:
    """The value of a dotted name (`Graders.exact`) in a module, or None without one."""
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), module)


def _only_class(module: ModuleType, location: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    defined = [
        value
        for value in map(class_of, vars(module).values())
        if isinstance(value, type) and issubclass(value, bases) and value.__module__ == module.__name__
    ]
    # An EnvSpec represents its Env class, and a class its bases.
    represented = {getattr(cls, "env_class", None) for cls in defined}
    represented |= {base for cls in defined for base in cls.__mro__[1:]}
    candidates = [cls for cls in dict.fromkeys(defined) if cls not in represented]
    if not candidates:
        base_names = " or ".join(base.__name__ for base in bases)
        hint = ", no function decorated with @envgym.reward" if noun == "environment" else ""
        raise NameNotFound(f"{location} defines no {noun}: no subclass of {base_names} in it{hint}")
    if len(candidates) > 1:
        variables = [(name, class_of(value)) for name, value in vars(module).items()]
        names = " or ".join(f"{location}:{name}" for cls in candidates for name, item in variables if item is cls)
        raise NameNotFound(f"{location} defines more than one {noun}: choose {names}")
    return check_class(candidates[0], f"{location}:{candidates[0].__name__}", bases, noun)


def _import_module(name: str) -> ModuleType:
    _search_in(Path.cwd())  # unlike `python -m`, an installed script does not search the working directory
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            points = importlib.metadata.entry_points(module=name)
            hint = "".join(f", which {p.dist and p.dist.name} names as its {p.group} {p.name!r}" for p in points)
            raise NameNotFound(f"there is no Python module {error.name!r}{hint}") from None
        raise _import_error(name, None, error) from error
    except (EnvgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, or a test framework's skip
        raise _import_error(name, None, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NameNotFound(f"there is no file {path}")
    # A file is one module, whatever imported it: a second copy of its classes would not be equal.
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__dict__", {}).get("__file__"))
        if file.endswith(path.name) and Path(file).resolve() == path:
            return module
    name = f"envgym_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # only unknown suffixes give None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up their module during its execution
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, EnvgymError | KeyboardInterrupt):
            raise
        raise _import_error(str(path), path, error) from error
    return module


def _search_in(folder: Path) -> None:
    """Append `folder` to the import path, so that no installed module is shadowed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def user_line(error: BaseException) -> str:
    """`FILE, line N`: the innermost line of the user's code in the traceback of `error`. Empty without one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def is_user_file(file: str) -> bool:
    """True for a source file outside envgym, Python and the installed packages."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return not file.startswith(("<", *(f"{folder}/" for folder in (Path(__file__).parent, *installed))))


def _import_error(target: str, path: Path | None, error: BaseException) -> ConfigError:
    """An error during an import as one line, with the innermost line of the imported file."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames
    file, line = frames[-1].filename, frames[-1].lineno
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        file, line, text = error.filename, error.lineno, error.msg
    reason = text.splitlines()[0] if text else ""
    return ConfigError(f"cannot import {target}: {file}, line {line}: {type(error).__name__}: {reason}")
