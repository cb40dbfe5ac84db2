"""Any callable as a function: an instance of a class, a bound method, a `functools.partial`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from envgym.errors import ConfigError


def as_function(value: Any) -> Callable[..., Any]:
    """`value` if it is a function; else a function that calls it, with its name, docstring and parameters.

    What a `functools.partial` binds by name stays bound: a field of the data with that name does not replace it.
    Raises `ConfigError` for a class, and for what cannot be called or hides its parameters.
    """
    if inspect.isfunction(value):
        return value
    if isinstance(value, type) or not callable(value):
        hint = f": write an instance, {value.__name__}(…)" if isinstance(value, type) else ""
        raise ConfigError(f"envgym.reward takes a function, or a list of them, not {value!r:.60}{hint}")
    bound = value.keywords if isinstance(value, functools.partial) else {}
    inner = value.func if isinstance(value, functools.partial) else value
    name = getattr(inner, "__name__", type(inner).__name__)
    try:
        signature = inspect.signature(value)
    except ValueError:  # of a function written in C
        raise ConfigError(f"the parameters of {name} cannot be read: call it in a function of your own") from None
    signature = signature.replace(parameters=[item for item in signature.parameters.values() if item.name not in bound])
    if any(base.__name__ in ("ORM", "AsyncORM") for base in type(inner).__mro__):
        first, *remaining = signature.parameters.values()
        signature = signature.replace(parameters=[first.replace(name="completions"), *remaining])
        value = _of_swift(value)

    def function(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs | bound)

    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        return await value(*args, **kwargs | bound)

    is_async = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
    wrapper: Any = asynchronous if is_async else function
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper.__doc__, wrapper.__signature__ = inner.__doc__, signature
    function_of_value: Callable[..., Any] = wrapper
    return function_of_value


def _of_swift(value: Callable[..., Any]) -> Callable[..., Any]:
    """A call of ms-swift's reward class as its trainer does it: the completions' texts come first, under any name, and
    their token ids as `response_token_ids`."""

    def call(completions: Any, *, completion_ids: Any = None, **columns: Any) -> Any:
        if completion_ids is not None:  # where it takes any argument
            columns["response_token_ids"] = completion_ids
        return value([item if isinstance(item, str) else item[-1]["content"] for item in completions], **columns)

    return call
