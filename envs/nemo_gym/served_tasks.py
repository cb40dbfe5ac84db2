"""Tasks in NeMo-Gym's protocol: as JSONL rows, and as episodes whose actions are `Response` objects.

NeMo-Gym's agents prompt the model with a row's `input`; there is no first observation. So a row stores the first
observation and the tools of a reset. An episode resets the task again, by its place and its seed; the reference answer
is not in the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envgym.agents.external.responses_api import Item, MalformedItem, call_of, input_items, messages_of, tool_items
from envgym.env import CheckedEnv, EnvSpec
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome, InvalidStep
from envgym.hashing import derived_seed
from envgym.rollout.scripted import NO_ACTIONS, PlayedTurn, ScriptedEpisode
from envgym.types import Action, Observation, StopReason, Task, ToolCall, observed_messages

from .protocol import PARAMS

PLACE = "envgym"
"""The field of a row that identifies its task."""
ROUTES = {"seed_session", "verify", "reset", "step", "aggregate_metrics", "run", "v1", "mcp"}
"""Reserved names: NeMo-Gym's agents call a tool at the path of its name."""
SPLITS = {"train": "train", "test": "validation"}
"""NeMo-Gym's names of the splits."""


# -- episodes ---------------------------------------------------------------------------------------------


class ServedEpisode(ScriptedEpisode):
    """An episode whose actions come in requests, on its own instance of the environment.

    An exception of the environment ends the episode without a reward: every later `answer`, and `result`, raises it
    again. Tool calls may be concurrent: `lock` serializes the steps.
    """

    def __init__(self, env: CheckedEnv, task: Task, seed: int) -> None:
        super().__init__(task, seed, NO_ACTIONS)
        self.env = env
        self.lock = asyncio.Lock()
        self.calls = 0
        self.last_used = time.monotonic()

    async def answer(self, action: Action | None) -> PlayedTurn:
        """The environment's answer to an action. None: the policy is out of tokens, and the episode is truncated."""
        if self.error is not None:
            raise self.error
        if action is None:
            self.turns.append(PlayedTurn(Action(""), Observation(), None, False, True, {}))
            return self.turns[-1]
        try:
            return await self.step(self.env, action)
        except Exception as error:  # an environment may raise anything at all
            self.error = error
            raise

    def result(self, row: Mapping[str, Any]) -> Item:
        """Reward, score, metrics and ending, without the fields that `row` has already.

        Raises the exception that ended the episode, and `InvalidOutcome` if the environment gave no reward: that is not
        a reward of zero, and NeMo-Gym's protocol cannot express it.
        """
        if self.error is not None:
            raise self.error
        episode = self.episode()
        if episode.reward is None:
            raise InvalidOutcome("unjudged", "the environment has given no reward: there is no reward to report")
        score = {} if episode.score_is_reward or episode.score is None else {"score": episode.score}
        ending = {"terminated": self.turns[-1].terminated, "truncated": not self.turns[-1].terminated}
        fields = {**episode.metrics, **score, **ending}
        return {name: value for name, value in fields.items() if name not in row} | {"reward": episode.reward}

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the episode is over in any case
            await self.env.close()


def action_of(response: Any) -> Action | None:
    """The policy's turn: the items of a `Response` after the last result of a tool. None if there are none, for example
    when the policy has no tokens left. Raises `InvalidStep` for a malformed `Response`."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if isinstance(output, str) or not isinstance(output, Sequence):
        raise InvalidStep("a response is an object with a list `output`")
    items = [item for item in output if isinstance(item, Mapping)]
    starts = [index + 1 for index, item in enumerate(items) if not _is_from_policy(item)]
    items = items[max(starts, default=0) :]
    try:
        text = "".join(message.text for message in messages_of([i for i in items if i.get("type") != "function_call"]))
    except MalformedItem as error:
        raise InvalidStep(str(error)) from None
    calls = tuple(_call(item) for item in items if item.get("type") == "function_call")
    sampled = [item.get("generation_token_ids") for item in items]
    tokens = [token for token_ids in sampled if isinstance(token_ids, list) for token in token_ids]
    truncated = bool(response.get("incomplete_details"))
    if not items or (truncated and not (text or calls or tokens)):
        return None
    return Action(text, tokens, calls, StopReason.LENGTH if truncated else StopReason.STOP, text if calls else None)


def _is_from_policy(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _call(item: Mapping[str, Any]) -> ToolCall:
    try:
        return call_of(item)
    except MalformedItem as error:  # the environment reports the error to the policy
        return ToolCall(str(item.get("call_id") or ""), str(item.get("name") or ""), error=str(error))


# -- rows -------------------------------------------------------------------------------------------------


class Place(BaseModel):
    """The task of a row: the environment's name, its split, the index there, and the seed of the reset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str
    split: str = Field(pattern="^(train|test)$")
    index: int = Field(ge=0)
    seed: int


class UnknownRow(InvalidStep):
    """A row that this server did not write, or that no longer agrees with the environment."""


def place_of(row: Mapping[str, Any], env: str) -> Place:
    """The place of a row's task. Raises `UnknownRow`."""
    try:
        place = Place.model_validate(row.get(PLACE))
    except ValidationError:
        raise UnknownRow(f"the row's {PLACE!r} does not name a task: use the rows that this server wrote") from None
    if place.env != env:
        raise UnknownRow(f"the row is of the environment {place.env!r}, and this server is {env!r}")
    return place


async def pose(spec: EnvSpec, place: Place, row: Mapping[str, Any] | None = None) -> tuple[ServedEpisode, Observation]:
    """Start an episode of a task. The messages of the first observation must be in the `row`, if given, or the policy
    would answer another question than the graded one; other messages (a system prompt) may be between them.

    Raises `UnknownRow`, and the environment's own exceptions.
    """
    try:
        task = await spec.tasks(place.split).get(place.index)
    except IndexError:
        raise UnknownRow(f"{place.split} has no task {place.index}: write the rows again") from None
    episode = ServedEpisode(spec.spec_for(task).make(), task, place.seed)
    try:
        observation = await episode.reset(episode.env)
        if row is not None:
            row_messages = iter(_messages(row))
            if not all((message.role, message.text) in row_messages for message in observed_messages(observation)):
                raise UnknownRow("the first observation differs from the row's: write the rows again")
        if reserved := [tool.name for tool in observation.tools if tool.name in ROUTES]:
            raise InvalidStep(f"{spec.id}: NeMo-Gym cannot call a tool {reserved[0]!r}: its servers use that path")
    except BaseException:
        await episode.close()
        raise
    return episode, observation


def _messages(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    params = row.get(PARAMS)
    try:
        messages = messages_of(params.get("input") if isinstance(params, Mapping) else None)
    except MalformedItem as error:
        raise UnknownRow(f"the row's {PARAMS}: {error}") from None
    return [(message.role, message.text) for message in messages]


async def rows(spec: EnvSpec, name: str, split: str, count: int) -> AsyncIterator[dict[str, Any]]:
    """The rows of a split's first `count` tasks, for the agent server `NAME_agent`. Raises `EnvgymError`, also for a
    task whose reset fails."""
    tasks = spec.tasks(split)
    for index in range(count if tasks.size is None else min(count, tasks.size)):
        task = await tasks.get(index)
        seed = derived_seed(name, split, index) if task.seed is None else task.seed
        place = Place(env=name, split=split, index=index, seed=seed)
        try:
            episode, observation = await pose(spec, place)
            await episode.close()
        except EnvgymError:
            raise
        except Exception as error:  # an environment may raise anything at all
            message = f"environment {spec.id}: {split} task {index} cannot be reset: {type(error).__name__}: {error}"
            raise InvalidStep(message) from error
        params: dict[str, Any] = {"input": input_items(observed_messages(observation))}
        if observation.tools:
            params["tools"] = tool_items(observation.tools)
        agent = {"type": "responses_api_agents", "name": f"{name}_agent"}
        yield {PARAMS: params, PLACE: place.model_dump(), "agent_ref": agent}


async def write_rows(spec: EnvSpec, name: str, folder: Path, count: int) -> list[tuple[str, Path]]:
    """Write the rows of each split to a file, all or none. Returns NeMo-Gym's names of the splits with tasks, and their
    files. Raises `EnvgymError`, also if neither split has tasks."""
    files: list[tuple[str, Path]] = []
    missing: ConfigError | None = None
    for split, word in SPLITS.items():
        path = folder.absolute() / f"{name}_{word}.jsonl"
        path.unlink(missing_ok=True)  # of an earlier server
        try:
            spec.tasks(split)
        except ConfigError as error:  # for example without held-out data; the other split is still useful
            missing = error
            continue
        lines = [json.dumps(row, ensure_ascii=False) + "\n" async for row in rows(spec, name, split, count)]
        if lines:
            path.write_text("".join(lines), encoding="utf-8")
            files.append((word, path))
    if missing is not None and not files:
        raise missing
    return files
