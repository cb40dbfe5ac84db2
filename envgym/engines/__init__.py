"""Engines: token ids in, token ids out (`envgym.engine`). `vllm`, `transformers` and those of other packages are hosted
in processes of their own; `openai` is any API, which takes messages."""

from __future__ import annotations

from importlib.util import find_spec

from envgym.loading import target_of_name


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
