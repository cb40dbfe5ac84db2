"""`envgym envs try` of recorded data: which tokens a recording has, and which of them are taught."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.resolve import resolve
from envgym.config.words import parse_words
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome, printable
from envgym.types import Row, Task

from .show import choose_task

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.agent import Agent
    from envgym.env import EnvSpec

TAUGHT, NOT_TAUGHT = "bold green", "dim"
QUANTILES = (("median", 0.5), ("90%", 0.9), ("99%", 0.99), ("longest", 1.0))
MEASURED = 1000
"""Tasks whose rows are measured."""
OPEN, CLOSE = "⟦", "⟧"
"""Marks around what is taught, for those who see no colours."""


async def preview(env: str, words: Sequence[str], task: tuple[str, int] | None, seed: int, console: Console) -> None:
    """Show every recording of a task as the tokens that a run would train on, those that are taught in colour.

    Raises `ConfigError` where none of a recording is taught, or all of it though something was asked.
    """
    from envgym.launch.components import make_agent
    from envgym.launch.models import fetch_model
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    settings = parse_words(words)
    config = resolve({"do": "rollout", **settings, "env": {"name": env, **settings.get("env", {})}})
    stage = config.stages[-1]
    with open_display() as display:
        model = await fetch_model(stage.model, config, display, make_model)
    agent = make_agent(stage, model)
    async with stage.make_spec() as spec:
        split, chosen = await choose_task(spec, seed, task)
        console.print(f"{spec.id}, {split} task {chosen.key}, tokens of {Path(model).name}", style=NOT_TAUGHT)
        console.print(await _lengths(spec, agent, split, seed), style=NOT_TAUGHT)
        for member in range(spec.recordings):
            await _show(spec, agent, chosen, seed, member, console)


async def _lengths(spec: EnvSpec, agent: Agent, split: str, seed: int) -> str:
    """The quantiles of the rows' lengths in tokens, and the number that is longer than `agent.max_tokens`; of a large
    split, those of `MEASURED` tasks spread over it. What cannot be taught is left out."""
    config, tasks = agent.config.model_copy(update={"max_tokens": None}), spec.tasks(split)
    whole, lengths = type(agent)(agent.renderer, config), []
    numbers = range(0, tasks.reach, -(-tasks.reach // MEASURED))
    for number, member in itertools.product(numbers, range(spec.recordings)):
        with contextlib.suppress(EnvgymError):  # of the task that is shown it is said
            task = await tasks.get(number)
            async with spec.of(task).make() as env:
                lengths += [len(row) for row in (await whole.replay(env, task, seed=seed, member=member)).rows]
    lengths.sort()
    quantiles = ", ".join(f"{name} {lengths[int(q * (len(lengths) - 1))]:,}" for name, q in QUANTILES if lengths)
    limit = getattr(agent.config, "max_tokens", None)
    n_long = sum(limit is not None and length > limit for length in lengths)
    too_long = f"{n_long} are longer than agent.max_tokens={limit}" if limit else "agent.max_tokens is unset"
    return f"{len(lengths):,} rows of {len(numbers):,} of {tasks.reach:,} tasks, in tokens: {quantiles}; {too_long}"


async def _show(spec: EnvSpec, agent: Agent, task: Task, seed: int, member: int, console: Console) -> None:
    async with spec.of(task).make() as env:
        try:
            episode = await agent.replay(env, task, seed=seed, member=member)
        except InvalidOutcome as error:
            raise ConfigError(str(error)) from None
    worth = "" if episode.reward is None else f", reward {episode.reward:g}"
    for row in episode.rows:
        weights = [weight for segment in row.segments for weight in segment.loss_weights]
        n_taught = sum(weight > 0 for weight in weights)
        console.print(f"recording {member + 1}: {n_taught} of {len(weights)} tokens are taught{worth}", style="bold")
        _show_row(row, agent, console)
        if not n_taught:
            raise ConfigError(f"task {task.key}: no token would be taught")
        if n_taught == len(weights) and task.prompt and episode.messages[0].text:
            raise ConfigError(f"task {task.key}: every token would be taught, the question too")


def _show_row(row: Row, agent: Agent, console: Console) -> None:
    tokens = [
        (token, weight > 0)
        for segment in row.segments
        for token, weight in zip(segment.token_ids, segment.loss_weights, strict=True)
    ]
    for taught, run in itertools.groupby(tokens, key=lambda one: one[1]):
        text = agent.renderer.tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        text = printable(text)
        console.print(f"{OPEN}{text}{CLOSE}" if taught else text, style=TAUGHT if taught else NOT_TAUGHT, end="")
    console.print()
