"""Tasks as the JSONL rows that NeMo-Gym reads, and back.

Its agents ask the model with a row's `input` and know no first observation. So a row is written by posing the task: it
holds the first observation and the tools. A task is posed again by its place and its seed; its answer does not travel.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envgym.env import EnvSpec
from envgym.errors import EnvgymError, InvalidStep
from envgym.hashing import derived_seed
from envgym.responses import MalformedItem, input_items, messages_of, tool_items
from envgym.types import Message, Observation

from .playing import Playing

PLACE = "envgym"
"""The field of a row that says which task it is."""
PARAMS = "responses_create_params"
ROUTES = {"seed_session", "verify", "reset", "step", "aggregate_metrics", "run", "v1", "mcp"}
"""Names that no tool can have: their agents call a tool at the path of its name."""
SPLITS = {"train": "train", "test": "validation"}
"""Our splits, and NeMo-Gym's words for them."""


class Place(BaseModel):
    """Which task a row is: the environment's name, its split, the index there, and the seed it is posed with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str
    split: str = Field(pattern="^(train|test)$")
    index: int = Field(ge=0)
    seed: int


class UnknownRow(InvalidStep):
    """A row that this server did not write, or that no longer says what the environment says."""


def place_of(row: Mapping[str, Any], env: str) -> Place:
    """Which task a row is. Raises `UnknownRow`."""
    try:
        place = Place.model_validate(row.get(PLACE))
    except ValidationError:
        raise UnknownRow(f"the row's {PLACE!r} does not name a task: use the rows that this server wrote") from None
    if place.env != env:
        raise UnknownRow(f"the row is of the environment {place.env!r}, and this server is {env!r}")
    return place


async def pose(spec: EnvSpec, place: Place, row: Mapping[str, Any] | None = None) -> tuple[Playing, Observation]:
    """Pose a task. Where a `row` is given, the first observation must be what it says, or the policy would answer
    another question than it is judged by; what else is in it (a system prompt) may stand between. Raises `UnknownRow`,
    and what the environment raises."""
    try:
        task = await spec.tasks(place.split).get(place.index)
    except IndexError:
        raise UnknownRow(f"{place.split} has no task {place.index}: write the rows anew") from None
    playing = Playing(spec.of(task).make(), task)
    try:
        observation = await playing.reset(place.seed)
        if row is not None:
            asked = iter([(message.role, message.text) for message in _asked(row)])
            if not all((message.role, message.text) in asked for message in said(observation)):
                raise UnknownRow("the environment now says something else than the row: write the rows anew")
        if taken := [tool.name for tool in observation.tools if tool.name in ROUTES]:
            raise InvalidStep(f"{spec.id}: NeMo-Gym cannot call a tool {taken[0]!r}: its servers use that path")
    except BaseException:
        await playing.close()
        raise
    return playing, observation


def _asked(row: Mapping[str, Any]) -> tuple[Message, ...]:
    params = row.get(PARAMS)
    try:
        return messages_of(params.get("input") if isinstance(params, Mapping) else None)
    except MalformedItem as error:
        raise UnknownRow(f"the row's {PARAMS}: {error}") from None


def said(observation: Observation) -> tuple[Message, ...]:
    """What an environment said, as messages; raw text is the user's."""
    return (Message.of("user", observation.text),) if observation.text else observation.messages


async def rows(spec: EnvSpec, name: str, agent: str, split: str, count: int) -> AsyncIterator[dict[str, Any]]:
    """The rows of a split's first `count` tasks, each for the agent server `agent`. Raises `EnvgymError`, also for a
    task that cannot be posed."""
    tasks = spec.tasks(split)
    for index in range(count if tasks.size is None else min(count, tasks.size)):
        task = await tasks.get(index)
        seed = derived_seed(name, split, index) if task.seed is None else task.seed
        place = Place(env=name, split=split, index=index, seed=seed)
        try:
            playing, observation = await pose(spec, place)
            await playing.close()
        except EnvgymError:
            raise
        except Exception as error:  # an environment may raise anything at all
            what = f"{type(error).__name__}: {error}"
            raise InvalidStep(f"environment {spec.id}: {split} task {index} cannot be posed: {what}") from error
        params: dict[str, Any] = {"input": input_items(said(observation))}
        if observation.tools:
            params["tools"] = tool_items(observation.tools)
        yield {
            PARAMS: params,
            PLACE: place.model_dump(),
            "agent_ref": {"type": "responses_api_agents", "name": agent},
        }


async def write_rows(path: Path, rows: AsyncIterator[Mapping[str, Any]]) -> int:
    """Write the rows to a file, whole or not at all; returns how many they are. Without rows no file is left."""
    unfinished = path.with_suffix(".unfinished")
    count = 0
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            async for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        if count:
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
