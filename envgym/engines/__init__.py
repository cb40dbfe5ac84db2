"""Engines: token ids in, token ids out. `base` is the interface; `vllm` and `transformers` implement it."""

from __future__ import annotations

from importlib.util import find_spec

from envgym.errors import missing_package

TARGETS = {
    "vllm": "envgym.engines.vllm:VLLMEngine",
    "transformers": "envgym.engines.transformers:TransformersEngine",
}
"""The class that a runtime starts for each kind of engine. Each is made of an `EngineSpec`."""


def choose_engine(kind: str) -> tuple[str, str]:
    """The target of an engine of `kind` (`auto`, `vllm`, `transformers`) and a note to tell the user, often empty.

    `auto` takes vLLM where it is installed. Nothing is imported. Raises `MissingDependency` where `vllm` is asked
    for by name and absent.
    """
    if kind == "transformers" or (kind == "auto" and find_spec("vllm") is None):
        note = "" if kind == "transformers" else "vLLM is not installed: sampling with transformers, which is slower"
        return TARGETS["transformers"], note
    if find_spec("vllm") is None:
        raise missing_package("vllm", "vllm", "engine.kind=vllm")
    return TARGETS["vllm"], ""
