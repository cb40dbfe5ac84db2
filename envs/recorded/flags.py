"""Flags in rows that say which turns are to be learned, and keys that nothing reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from envgym.types.conversations import texts_of

FLAGS = ("weight", "loss_weight", "loss_scale", "loss", "train", "training", "trainable", "masked")
"""Keys for the weight in the loss, a number from 0, or true or false: OpenAI's and Mistral's `weight`, LLaMA-Factory's
`loss_weight`, ms-swift's `loss` and `loss_scale`, axolotl's `train` and `training`, Tinker's `trainable`; torchtune's
`masked` is true if a text is not to be learned."""


def weight_of(item: Mapping[str, Any]) -> float:
    """The weight of a message in the loss, the product of its flags; 1 without any."""
    flags = {name: flag for name in FLAGS if (flag := _flag(item.get(name))) is not None}
    if "masked" in flags:
        flags["masked"] = float(not flags["masked"])
    flags["train_detail"] = any(part["train"] for part in item.get("train_detail") or [{"train": True}])
    return math.prod(flags.values())


def unlearned_parts(item: Mapping[str, Any], content: Any) -> tuple[tuple[int, int], ...]:
    """The parts of a message's `content` that axolotl's `train_detail` says are not to be learned, as in
    `Message.unlearned`. The end that it gives is the part's last character."""
    unlearned = [part for part in item.get("train_detail") or () if not part["train"]]
    length = sum(map(len, texts_of(content))) if unlearned else 0
    return tuple((part["begin_offset"] - length, part["end_offset"] + 1 - length) for part in unlearned)


def unread_keys(item: Mapping[str, Any], excluded: Collection[str]) -> list[str]:
    """The keys of a row or message with a value that are neither `excluded` nor flags."""
    return [
        str(key)
        for key, value in item.items()
        if key not in excluded and value not in (None, "", [], {}) and not (key in FLAGS and _flag(value) is not None)
    ]


def _flag(value: Any) -> float | None:
    """The value of a flag, which CSV files have as text; None if it is no weight."""
    if isinstance(value, str):
        value = {"true": 1.0, "false": 0.0, "0": 0.0, "1": 1.0}.get(value.strip().lower())
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None
