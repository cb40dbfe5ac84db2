"""Engines: token ids in, token ids out. `base` is the interface; `vllm` and `transformers` implement it."""

from __future__ import annotations

from importlib.util import find_spec

from envgym.errors import missing_package

TARGETS = {"vllm": "envgym.engines.vllm:VLLMEngine", "transformers": "envgym.engines.transformers:TransformersEngine"}
"""Kind of engine -> the class that a runtime starts, which takes an `EngineSpec`."""


def choose_engine(kind: str) -> tuple[str, str]:
    """The target of an engine of `kind` (`auto`, `vllm`, `transformers`) and a note for the user, often empty.

    `auto` takes vLLM if it is installed. Nothing is imported. Raises `MissingDependency` for kind `vllm` without vLLM.
    """
    if kind == "transformers" or (kind == "auto" and find_spec("vllm") is None):
        note = "" if kind == "transformers" else "vLLM is not installed: sampling with transformers, which is slower"
        return TARGETS["transformers"], note
    if find_spec("vllm") is None:
        raise missing_package("vllm", "vllm", "engine.kind=vllm")
    return TARGETS["vllm"], ""
