"""Engines: token ids in, token ids out (`envgym.engine`). `vllm`, `transformers` and those of other packages are hosted
in processes of their own; `openai` is any API, which takes messages."""

from __future__ import annotations

from importlib.util import find_spec

from envgym.engine import HostedEngine
from envgym.errors import ConfigError
from envgym.loading import load_class, target_of_name

from .spec import EngineSpec


def choose_engine(kind: str) -> tuple[str, str]:
    """The target of the class of a hosted engine, which takes an `EngineSpec`, and a note for the user, often empty.

    `kind` is an entry point of the group `envgym.engines`, `file.py:Name`, an import path, or `auto`: vLLM if it is
    installed. Nothing is imported. Raises `NameNotFound` for an unknown name.
    """
    note = ""
    if kind == "auto":
        kind = "vllm" if find_spec("vllm") is not None else "transformers"
        note = "" if kind == "vllm" else "vLLM is not installed: sampling with transformers, which is slower"
    return target_of_name("envgym.engines", kind, "engine", ("auto", "openai")), note


def make_engine(target: str, spec: EngineSpec) -> HostedEngine:
    """Make the engine of a class, in its process: the specification is the constructor's only argument. Raises
    `ConfigError` without the methods of `HostedEngine`, but for `connect` and those that this specification does not
    need."""
    engine: HostedEngine = load_class(target, (object,), "engine")(spec)
    calls = {"connect": False, "load_adapter": spec.lora_rank, "sleep": spec.sleeps, "wake": spec.sleeps}
    names = [name for name in dir(HostedEngine) if calls.get(name, not name.startswith("_"))]
    # The second: a subclass of the protocol inherits methods that do nothing.
    if missing := [n for n in names if getattr(engine, n, None) in (None, getattr(HostedEngine, n).__get__(engine))]:
        raise ConfigError(f"{target} is not usable as engine: it does not define {', '.join(missing)}")
    return engine
