"""Reading the rules of an environment out of its class's documentation."""

from __future__ import annotations

import inspect
import re

SECTIONS = ("description", "action space", "observation space", "reward", "rewards", "goal")
"""The sections of Gymnasium's own pages that a player needs; the others are for programmers."""
LONGEST = 4000
"""Characters of a documentation without such sections that are still shown."""


def documented_rules(cls: type) -> str:
    """The parts of a class's docstring that say how to play, or all of it; empty where it has none."""
    text = _plain(inspect.cleandoc(cls.__doc__ or ""))
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    kept = [f"{title}\n{body.strip()}" for title, body in sections if title.strip().lower() in SECTIONS]
    return "\n\n".join(kept) if kept else text[:LONGEST].strip()


def _plain(text: str) -> str:
    text = re.sub(r"!\[[^\[\]]*\]\([^()]+\)", "", text).replace("<sup>", "^")
    text = re.sub(r"</?\w[^<>]*>", "", text)
    return re.sub(r"\[([^\[\]]+)\]\([^()]+\)", r"\1", text)
