"""Rows in OpenRLHF's form, made of episodes: what `batch_inference` writes and the next program reads."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import ConfigError, RunError
from envgym.types import Observation

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The file `out` of rows, one for each of the `episodes` that say something: `input`, `output`, and the `reward`
    where there is one.

    `model` has the tokenizer whose chat template, with `chat`, makes the input of what was asked. Post-processors:
    `rs`, the best answer to each input; `iter_dpo`, the best and the worst (`prompt`, `chosen`, `rejected`); `csft`,
    all answers behind their reward, written by `template`. `normalise`: rewards for the latter have mean 0 and standard
    deviation 1.
    """

    episodes: Path
    out: Path
    model: str
    chat: bool
    post_processor: str | None
    normalise: bool
    template: str

    def __post_init__(self) -> None:
        if self.post_processor not in (None, "rs", "csft", "iter_dpo"):
            raise ConfigError(f"batch_inference: --post_processor is rs, csft or iter_dpo, not {self.post_processor}")
        if missing := [name for name in ("{input}", "{reward}") if name not in self.template]:
            raise ConfigError(f"batch_inference: --reward_template has no {missing[0]} in it")

    def write(self) -> int:
        """Write the file and return the number of rows."""
        from envgym.episodes.files import read_episodes
        from envgym.render import load_tokenizer, make_renderer

        renderer = make_renderer("chat" if self.chat else "raw", load_tokenizer(self.model))
        rows: list[Row] = []
        for episode in read_episodes(self.episodes):
            *asked, answer = episode.messages
            if episode.failed or not answer.text.strip():  # an empty answer teaches nothing, and is refused as data
                continue
            text = renderer.opening(Observation(messages=tuple(asked)))[0]
            reward = {} if episode.reward is None else {"reward": episode.reward}
            rows.append({"input": text, "output": answer.text, **reward})
        if not rows:
            raise RunError(f"{self.episodes}: every episode failed or says nothing: there is no row to write")
        rows = self._processed(rows)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        return len(rows)

    def _processed(self, rows: list[Row]) -> list[Row]:
        if self.post_processor is None:
            return rows
        if self.post_processor == "csft":
            return self._conditional(rows)
        ranked: dict[str, list[Row]] = {}
        for row in rows:
            ranked.setdefault(row["input"], []).append(row)
        best = {text: max(own, key=lambda row: float(row["reward"])) for text, own in ranked.items()}
        if self.post_processor == "rs":
            return list(best.values())
        worst = {text: min(own, key=lambda row: float(row["reward"])) for text, own in ranked.items()}
        return [
            {"prompt": text, "chosen": best[text]["output"], "rejected": worst[text]["output"],
             "chosen_reward": best[text]["reward"], "rejected_reward": worst[text]["reward"]}
            for text in ranked if best[text]["output"] != worst[text]["output"]
        ]  # fmt: skip

    def _conditional(self, rows: list[Row]) -> list[Row]:
        rewards = [float(row["reward"]) for row in rows]
        mean, std = (statistics.fmean(rewards), statistics.stdev(rewards)) if self.normalise else (0.0, 1.0)
        for row, reward in zip(rows, rewards, strict=True):
            row["reward"] = (reward - mean) / std
            written = self.template.replace("{reward}", f"{row['reward']:.2f}")
            row["input"] = written.replace("{input}", row["input"])
        return rows
