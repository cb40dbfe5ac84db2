"""The files that a page of the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path


def blocks_of(text: str, language: str) -> list[str]:
    """The blocks of a language on a page, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def write_named_blocks(text: str, language: str, folder: Path) -> list[str]:
    """Write the blocks whose first line, a comment, names a file, and return the others."""
    others = []
    for block in blocks_of(text, language):
        if name := re.match(r"# (\S+\.(?:py|yaml))\n", block):
            (folder / name.group(1)).write_text(block)
        else:
            others.append(block)
    return others
