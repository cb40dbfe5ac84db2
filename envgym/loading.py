"""Finds a class or function that the user named: `file.py`, `file.py:Name` or `package.module:Name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError, EnvgymError, NameNotFound, did_you_mean


@functools.cache  # reading them takes milliseconds, and what is installed stays
def offered(group: str) -> dict[str, str]:
    """name -> `module:attr` (or `module`) of the entry points of installed packages."""
    return {entry_point.name: entry_point.value for entry_point in importlib.metadata.entry_points(group=group)}


def names_file(name: str) -> bool:
    """True if `name` is written as a Python file, with or without `:Name` behind it."""
    return name.endswith(".py") or ".py:" in name


def absolute_target(name: str) -> str:
    """`file.py:Name` with the file as an absolute path, so that the name holds in any working directory."""
    file, name_of_class = split_target(name)
    path = str(Path(file).expanduser().resolve())
    return f"{path}:{name_of_class}" if name_of_class else path


def load_class(target: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    """The class that `target` names, which must be a concrete subclass of one of `bases`.

    A file without `:Name` must define exactly one such class. `noun` is what messages call it ("environment").
    Raises `NameNotFound` where there is no such file, module or class, `ConfigError` where there is
    one that cannot be used.
    """
    where, name = split_target(target)
    module = import_target(where)
    if not name:
        return _only_class(module, where, bases, noun)
    return check_class(_attribute(module, where, name), target, bases, noun)


def load_function(target: str, noun: str) -> Callable[..., Any]:
    """The function that `target` names: `file.py:name` or `package.module:name`. `noun` is what messages call it.

    Raises `NameNotFound` where there is no such file, module or function, `ConfigError` for what is no function.
    """
    where, name = split_target(target)
    if not name:
        raise NameNotFound(f"{target} names no {noun}: write {target}:NAME")
    function: Callable[..., Any] = _attribute(import_target(where), where, name)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{target} is not usable as {noun}: it must be a function")
    return function


def check_class(value: object, target: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    """Return `value` (or what stands for it) if it is a concrete subclass of one of `bases`, else raise
    `ConfigError`."""
    value = class_of(value)
    if not (isinstance(value, type) and issubclass(value, bases)):
        wanted = " or ".join(map(_public_name, bases))
        hint = " (or decorate it with @envgym.reward)" if inspect.isfunction(value) and noun == "environment" else ""
        raise ConfigError(f"{target} is not usable as {noun}: it must be a subclass of {wanted}{hint}")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
        raise ConfigError(f"{target} is not usable as {noun}: it does not define {missing}")
    return value


def _public_name(cls: type) -> str:
    """The import path of a class, without the module that defines it where the package offers it as well."""
    package = cls.__module__.rpartition(".")[0]
    offered = getattr(sys.modules.get(package), cls.__name__, None) is cls
    return f"{package if offered else cls.__module__}.{cls.__name__}"


def class_of(value: object) -> object:
    """The class that a function stands for, where a decorator made it an environment; else `value` itself."""
    return getattr(value, "__environment__", value) if inspect.isfunction(value) else value


def split_target(target: str) -> tuple[str, str]:
    """The file or module that a target names, and what in it; empty where it names none."""
    if target.endswith(".py") or ":" not in target:
        return target, ""
    where, _, name = target.rpartition(":")
    return where, name


def import_target(where: str) -> ModuleType:
    """Import a file (`….py`) or a module. Raises `NameNotFound` or, in one line, `ConfigError`."""
    return _import_file(Path(where).expanduser().resolve()) if where.endswith(".py") else _import_module(where)


def _attribute(module: ModuleType, where: str, name: str) -> Any:
    if not hasattr(module, name):
        raise NameNotFound(f"{where} defines no {name!r}.{did_you_mean(name, vars(module))}")
    return getattr(module, name)


def _only_class(module: ModuleType, where: str, bases: tuple[type, ...], noun: str) -> type[Any]:
    defined = [
        value
        for value in map(class_of, vars(module).values())
        if isinstance(value, type) and issubclass(value, bases) and value.__module__ == module.__name__
    ]
    # An EnvSpec that names its Env class speaks for it, and a class for those it was derived from.
    spoken_for = {getattr(cls, "env_class", None) for cls in defined}
    spoken_for |= {base for cls in defined for base in cls.__mro__[1:]}
    candidates = [cls for cls in dict.fromkeys(defined) if cls not in spoken_for]
    if not candidates:
        wanted = " or ".join(base.__name__ for base in bases)
        hint = ", no function decorated with @envgym.reward" if noun == "environment" else ""
        raise NameNotFound(f"{where} defines no {noun}: no subclass of {wanted} in it{hint}")
    if len(candidates) > 1:
        names = " or ".join(f"{where}:{cls.__name__}" for cls in candidates)
        raise NameNotFound(f"{where} defines more than one {noun}: choose {names}")
    return check_class(candidates[0], f"{where}:{candidates[0].__name__}", bases, noun)


def _import_module(name: str) -> ModuleType:
    _search_in(Path.cwd())  # an installed script, unlike `python -m`, does not look where the user stands
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise NameNotFound(f"there is no Python module {error.name!r}") from None
        raise _one_line(name, None, error) from error
    except (EnvgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, or what a test framework skips with
        raise _one_line(name, None, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NameNotFound(f"there is no file {path}")
    # One file is one module however often it is named: a second copy of its classes would not be equal.
    name = f"envgym_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # only unknown suffixes give None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their own module up while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, EnvgymError | KeyboardInterrupt):
            raise
        raise _one_line(str(path), path, error) from error
    return module


def _search_in(folder: Path) -> None:
    """Let imports find modules in `folder`, after all others, so that nothing installed is shadowed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def users_line(error: BaseException) -> str:
    """`FILE, line N`: the last line of the user's own code that was running when `error` was raised. Empty where none
    was."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def is_users(file: str) -> bool:
    """True for a source file that is no part of envgym, of Python or of an installed package."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return not file.startswith(("<", *(f"{folder}/" for folder in (Path(__file__).parent, *installed))))


def _one_line(target: str, file: Path | None, error: BaseException) -> ConfigError:
    """The error of an import as one line, with the last line of the user's own file that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == str(file)] or frames
    where, line = own[-1].filename, own[-1].lineno
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        where, line, text = error.filename, error.lineno, error.msg
    reason = text.splitlines()[0] if text else ""
    return ConfigError(f"cannot import {target}: {where}, line {line}: {type(error).__name__}: {reason}")
