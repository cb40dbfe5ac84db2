"""`envgym envs try` of recorded data: the tokens of a recording, and which of them are trained on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.known_settings import parse_words
from envgym.config.resolve import resolve
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome, printable
from envgym.types import Row, Task

from .show import choose_task

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.agent import Agent
    from envgym.env import EnvSpec

TRAINED, CONTEXT = "bold green", "dim"
QUANTILES = (("median", 0.5), ("90%", 0.9), ("99%", 0.99), ("longest", 1.0))
MEASURED = 1000
"""Number of tasks to measure."""
OPEN, CLOSE = "⟦", "⟧"
"""Marks around trained tokens, for terminals without colours."""


async def preview(env: str, words: Sequence[str], task: tuple[str, int] | None, seed: int, console: Console) -> None:
    """Show every recording of a task as tokens, those that a run would train on in colour.

    Raises `ConfigError` if a recording has no trained token, or if all tokens of one with a prompt are trained.
    """
    from envgym.jobs.components import make_agent
    from envgym.jobs.models import fetch_model
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    settings = parse_words(words, {"env": env})
    config = resolve({"kind": "rollout", **settings, "env": {"name": env, **settings.get("env", {})}})
    stage = config.stages[-1]
    with open_display() as display:
        model = await fetch_model(stage.model, config, display, make_model)
    agent = make_agent(stage, model)
    async with stage.make_spec() as spec:
        split, chosen_task = await choose_task(spec, seed, task)
        key = printable(chosen_task.key)
        console.print(f"{spec.id}, {split} task {key}, tokens of {Path(model).name}", style=CONTEXT)
        console.print(await _lengths(spec, agent, split, seed), style=CONTEXT)
        for member in range(spec.recordings_per_task):
            await _show(spec, agent, chosen_task, seed, member, console)


async def _lengths(spec: EnvSpec, agent: Agent, split: str, seed: int) -> str:
    """The quantiles of the rows' lengths in tokens, and the number of rows longer than `agent.max_tokens`. A large
    split is sampled at `MEASURED` evenly spaced tasks; recordings with errors are skipped."""
    config, tasks = agent.config.model_copy(update={"max_tokens": None}), spec.tasks(split)
    unlimited, lengths = type(agent)(agent.renderer, config), []
    numbers = range(0, tasks.index_bound, -(-tasks.index_bound // MEASURED))
    for number, member in itertools.product(numbers, range(spec.recordings_per_task)):
        with contextlib.suppress(EnvgymError):  # `_show` reports the error of the chosen task
            task = await tasks.get(number)
            async with spec.spec_for(task).make() as env:
                episode = await unlimited.replay(env, task, seed=seed, recording_index=member)
                lengths += [len(row) for row in episode.rows]
    lengths.sort()
    quantiles = ", ".join(f"{name} {lengths[int(q * (len(lengths) - 1))]:,}" for name, q in QUANTILES if lengths)
    limit = getattr(agent.config, "max_tokens", None)
    n_long = sum(limit is not None and length > limit for length in lengths)
    too_long = f"{n_long} are longer than agent.max_tokens={limit}" if limit else "agent.max_tokens is unset"
    return (
        f"{len(lengths):,} rows of {len(numbers):,} of {tasks.index_bound:,} tasks, in tokens: {quantiles}; {too_long}"
    )


async def _show(spec: EnvSpec, agent: Agent, task: Task, seed: int, member: int, console: Console) -> None:
    async with spec.spec_for(task).make() as env:
        try:
            episode = await agent.replay(env, task, seed=seed, recording_index=member)
        except InvalidOutcome as error:
            raise ConfigError(str(error)) from None
    n_learned = 0
    reward = "" if episode.reward is None else f", reward {episode.reward:g}"
    for row in episode.rows:
        weights = [weight for segment in row.segments for weight in segment.loss_weights]
        n_trained = sum(weight > 0 for weight in weights)
        text = f"recording {member + 1}: {n_trained} of {len(weights)} tokens are trained on{reward}"
        console.print(text, style="bold")
        _show_row(row, agent, console)
        n_learned += n_trained
        if n_trained == len(weights) and task.prompt and episode.messages[0].text:
            raise ConfigError(f"task {task.key}: every token would be trained on, the question too")
    if not n_learned:
        raise ConfigError(f"task {task.key}: no token would be trained on")


def _show_row(row: Row, agent: Agent, console: Console) -> None:
    tokens = [
        (token, weight > 0)
        for segment in row.segments
        for token, weight in zip(segment.token_ids, segment.loss_weights, strict=True)
    ]
    for is_trained, run in itertools.groupby(tokens, key=lambda pair: pair[1]):
        text = agent.renderer.tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        text = printable(text)
        console.print(f"{OPEN}{text}{CLOSE}" if is_trained else text, style=TRAINED if is_trained else CONTEXT, end="")
    console.print()
