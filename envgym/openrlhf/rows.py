"""OpenRLHF's rows from episodes: the output of `batch_inference`, which the next program reads."""

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


def write_rows(episodes: Path, file: Path, model: str, process: Process, *, chat: bool) -> tuple[int, int]:
    """Write the episodes as rows to `file`: `input`, `output`, and `reward` if the episode has one. `process` changes
    the rows first.

    Episodes that failed or have an empty completion are left out. Returns the number of rows in the file, and of the
    episodes left out. With `chat` the chat template of the tokenizer of `model` renders the input. A space breaks up
    special tokens that the policy or a tool spelled out, since programs that read the rows would take them for tokens.
    Raises `RunError` if no episode is left.
    """
    from envgym.episodes.files import read_episodes
    from envgym.render import load_tokenizer, make_renderer
    from envgym.render.spelling import BREAK, mark_after_prompt

    folder = model if Path(model).is_dir() else find_on_hub(model)
    renderer = make_renderer("chat" if chat else "raw", load_tokenizer(folder))
    rows: list[Row] = []
    all_episodes = read_episodes(episodes)
    for episode in all_episodes:
        *prompt, completion = episode.messages or [Message("assistant", "")]
        if episode.failed or not completion.text.strip():  # data with an empty completion raises an error
            continue
        text = renderer.opening(Observation(messages=renderer.escape(mark_after_prompt(prompt))))[0].replace(BREAK, " ")
        reward = {} if episode.reward is None else {"reward": episode.reward}
        output = renderer.speller.escape_policy_text(completion.text).replace(BREAK, " ")
        rows.append({"input": text, "output": output, **reward})
    if not rows:
        raise RunError(f"{episodes}: every episode failed or has an empty completion: there is no row to write")
    n_left_out = len(all_episodes) - len(rows)
    rows = process(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return len(rows), n_left_out


def post_processor(name: str | None, template: str, *, normalize: bool) -> Process:
    """The post-processor of this name. None leaves the rows as they are.

    `rs` keeps the best completion of each input. `iter_dpo` makes a pair (`prompt`, `chosen`, `rejected`) of the best
    and the worst completion of each input whose rewards differ. `csft` writes each row's reward into its input by
    `template`; with `normalize` it first normalises the rewards to mean 0 and standard deviation 1. Raises
    `ConfigError` for another name, and for a template without `{input}` or `{reward}`.
    """
    if missing := [part for part in ("{input}", "{reward}") if part not in template]:
        raise ConfigError(f"batch_inference: --reward_template has no {missing[0]} in it")
    processors: dict[str | None, Process] = {
        None: lambda rows: rows, "rs": lambda rows: [best for best, *_ in _rank_rows(rows)], "iter_dpo": _pairs,
        "csft": lambda rows: _add_rewards(rows, template, normalize=normalize),
    }  # fmt: skip
    if name not in processors:
        raise ConfigError(f"batch_inference: --post_processor is rs, csft or iter_dpo, not {name}")
    return processors[name]


def _rank_rows(rows: list[Row]) -> list[list[Row]]:
    """The rows of each input, the best first; equals in their order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append(row)
    return [sorted(group, key=lambda row: -float(row["reward"])) for group in groups.values()]


def _pairs(rows: list[Row]) -> list[Row]:
    pairs = [(group[0], group[-1]) for group in _rank_rows(rows) if group[0]["reward"] != group[-1]["reward"]]
    return [
        {"prompt": best["input"], "chosen": best["output"], "rejected": worst["output"],
         "chosen_reward": best["reward"], "rejected_reward": worst["reward"]}
        for best, worst in pairs
    ]  # fmt: skip


def _add_rewards(rows: list[Row], template: str, *, normalize: bool) -> list[Row]:
    rewards = [float(row["reward"]) for row in rows]
    mean, std = 0.0, 1.0
    if normalize:
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    for row, reward in zip(rows, rewards, strict=True):
        row["reward"] = (reward - mean) / (std or 1.0)  # equal rewards have none
        row["input"] = template.replace("{reward}", f"{row['reward']:.2f}").replace("{input}", row["input"])
    return rows
