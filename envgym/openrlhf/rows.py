"""Rows in OpenRLHF's form, made of episodes: what `batch_inference` writes and the next program reads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import ConfigError, RunError
from envgym.hub import find_on_hub
from envgym.types import Message, Observation

Row = dict[str, Any]
Process = Callable[[list[Row]], list[Row]]


def write_rows(episodes: Path, out: Path, model: str, process: Process, *, chat: bool) -> int:
    """Write the file `out` of rows, one for each of the episodes that say something, and return their number: `input`,
    `output`, and the `reward` where there is one.

    `model` has the tokenizer whose chat template, with `chat`, makes the input of what was asked. A space breaks up
    what the policy or a tool spelled of its special tokens: whoever reads a row's text would take them for tokens.
    """
    from envgym.episodes.files import read_episodes
    from envgym.render import load_tokenizer, make_renderer
    from envgym.render.spelling import BREAK, mark_after_prompt

    folder = model if Path(model).is_dir() else find_on_hub(model)
    renderer = make_renderer("chat" if chat else "raw", load_tokenizer(folder))
    rows: list[Row] = []
    for episode in read_episodes(episodes):
        *asked, answer = episode.messages or [Message("assistant", "")]
        if episode.failed or not answer.text.strip():  # an empty answer teaches nothing, and is refused as data
            continue
        text = renderer.opening(Observation(messages=renderer.escape(mark_after_prompt(asked))))[0].replace(BREAK, " ")
        reward = {} if episode.reward is None else {"reward": episode.reward}
        output = renderer.speller.escape_policy_text(answer.text).replace(BREAK, " ")
        rows.append({"input": text, "output": output, **reward})
    if not rows:
        raise RunError(f"{episodes}: every episode failed or says nothing: there is no row to write")
    rows = process(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return len(rows)


def post_processor(name: str | None, template: str, *, normalise: bool) -> Process:
    """A post-processor of rows: `rs`, the best answer to each input; `iter_dpo`, the best and the worst (`prompt`,
    `chosen`, `rejected`); `csft`, all answers behind their reward, written by `template`, rewards brought to mean 0 and
    standard deviation 1 with `normalise`; None, the rows as they are. Raises `ConfigError` for another."""
    if missing := [part for part in ("{input}", "{reward}") if part not in template]:
        raise ConfigError(f"batch_inference: --reward_template has no {missing[0]} in it")
    known: dict[str | None, Process] = {
        None: lambda rows: rows, "rs": _best, "iter_dpo": _pairs,
        "csft": lambda rows: _behind_rewards(rows, template, normalise=normalise),
    }  # fmt: skip
    if name not in known:
        raise ConfigError(f"batch_inference: --post_processor is rs, csft or iter_dpo, not {name}")
    return known[name]


def _ranked(rows: list[Row]) -> list[list[Row]]:
    """The rows of each input, the best first; of equals the first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append(row)
    return [sorted(group, key=lambda row: -float(row["reward"])) for group in groups.values()]


def _best(rows: list[Row]) -> list[Row]:
    return [best for best, *_ in _ranked(rows)]


def _pairs(rows: list[Row]) -> list[Row]:
    pairs = [(group[0], group[-1]) for group in _ranked(rows) if group[0]["output"] != group[-1]["output"]]
    return [
        {"prompt": best["input"], "chosen": best["output"], "rejected": worst["output"],
         "chosen_reward": best["reward"], "rejected_reward": worst["reward"]}
        for best, worst in pairs
    ]  # fmt: skip


def _behind_rewards(rows: list[Row], template: str, *, normalise: bool) -> list[Row]:
    rewards = [float(row["reward"]) for row in rows]
    mean, std = (statistics.fmean(rewards), statistics.stdev(rewards)) if normalise else (0.0, 1.0)
    for row, reward in zip(rows, rewards, strict=True):
        row["reward"] = (reward - mean) / std
        row["input"] = template.replace("{reward}", f"{row['reward']:.2f}").replace("{input}", row["input"])
    return rows
