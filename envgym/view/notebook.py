"""Episodes as HTML, which notebooks show in place of a value's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from envgym.errors import DataError

from .episodes import episode_with_tokens
from .sources import Source

STRONGEST = 2.0
"""The advantage, or the negative log-probability, of the strongest color."""


@dataclass(frozen=True)
class ShownEpisode:
    """An episode of a run or an evaluation. A notebook shows its tokens: sampled ones in color, by their advantage if
    they were trained on, else by their log-probability."""

    record: Mapping[str, Any] = field(repr=False)
    """The episode as it is stored (`envgym.episodes.record`), with the columns of its tokens."""
    id: str
    env: str
    reward: float | None
    score: float | None

    def _repr_html_(self) -> str:
        parts: list[str] = []
        for row in self.record["rows"]:
            advantages = row.get("advantages") or [None] * len(row["ids"])
            texts = row["texts"] or [f"{token} " for token in row["ids"]]
            tokens = list(map(_token_html, texts, row["ids"], row["logprobs"], advantages))
            for image in row.get("images") or ():  # its placeholders are one mark
                start, end = image["start"], image["start"] + image["length"]
                tokens[start:end] = [_token_html("[image]", 0, None, None), *[""] * (end - start - 1)]
            parts += tokens
            parts.append("<hr>")
        return f"<div><b>{escape(repr(self))}</b></div><pre style='white-space:pre-wrap'>{''.join(parts)}</pre>"


def _token_html(text: str, token: int, logprob: float | None, advantage: float | None) -> str:
    if logprob is None:
        return f'<span style="color:gray">{escape(text)}</span>'
    label = f"token {token}, log-probability {logprob:.3f}"
    hue, strength = "33,113,181", -logprob
    if advantage is not None:
        label += f", advantage {advantage:.3f}"
        hue, strength = "35,139,69" if advantage > 0 else "203,24,29", abs(advantage)
    shade = f"rgba({hue},{0.1 + 0.6 * min(1.0, strength / STRONGEST):.2f})"
    return f'<span style="background:{shade}" title="{escape(label)}">{escape(text)}</span>'


def read_episode(folder: Path, kind: str, step: int | None, index: int) -> ShownEpisode:
    """An episode of the run or the evaluation (`kind`) in a folder: by default of its last step. Raises `DataError` if
    there is none of this number."""
    source = Source(folder.name, kind, folder, (folder, folder.resolve()))
    steps = source.files()
    step = max(steps, default=0) if step is None else step
    if step not in steps:
        raise DataError(
            f"{folder} has no episodes of step {step}: there are those of {', '.join(map(str, sorted(steps)))}"
        )
    record = episode_with_tokens(source, step, index)
    return ShownEpisode(record, record["id"], record["env"], record["reward"], record["score"])
