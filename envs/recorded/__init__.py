"""Recorded data: demonstrations, preferences, labelled answers and steps, and plain text, to train on unmodified."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator

from envgym.env import Env, Info, Recording, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError, did_you_mean
from envgym.tasks import Form
from envgym.tasks.columns import FormRow
from envgym.tasks.config import DataConfig, SourceConfig, Template
from envgym.tasks.images import ImageReader
from envgym.tasks.rows import Row
from envgym.types import Action, Message, Observation, Task, ToolSpec
from envgym.types.messages import images_in

from .forms import FIELDS, FormName, Reader, Record


class RecordedConfig(DataEnvConfig):
    form: FormName = "auto"
    """`demonstration`: conversations, or prompts and answers; `preference`: a chosen and a rejected answer; `labelled`:
    an answer that is good or bad; `steps`: an answer in steps, each right or wrong; `text`: plain text; `episodes`:
    episodes that `envgym rollout` and runs save; `prompt`: a prompt alone, for a policy to answer without a reward.
    `auto`: inferred from the fields of the first row."""
    teach: Literal["all", "last"] = "all"
    """The assistant's turns of a conversation to train on: all of them, or the last alone."""
    fields: dict[str, str] = Field({})
    """Names of fields that are not the usual ones: `fields.chosen=better`, `fields.answer=completion_text`."""
    template: Template = None
    """Template of the last message of the prompt: `{}` stands for its text, `{name}` for a field of the row, formats
    included (`{reward:.2f}`)."""
    separator: str = "\n\n"
    """Text between two steps of an answer; it belongs to the step before it."""

    @field_validator("fields")
    @classmethod
    def _are_known(cls, fields: dict[str, str]) -> dict[str, str]:
        for name in fields:
            if name not in FIELDS:
                raise ValueError(f"there is no field {name!r}.{did_you_mean(name, FIELDS)} Known: {', '.join(FIELDS)}")
        return fields


class RecordedEnv(Env):
    """Presents the prompt, and between two turns of the answer the recording's own messages."""

    spec: RecordedSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        record = self.spec.record(self.task)
        variant = record.variants[(options or {}).get("member", 0)] if record.variants else None
        self._feedback = _messages_between_turns(variant.messages) if variant else []
        if record.is_text:
            return Observation(text="".join(message.text for message in record.prompt)), {}
        tools = tuple(_tool(tool) for tool in record.tools)
        return Observation(messages=record.prompt, tools=tools), {}

    async def step(self, action: Action) -> StepResult:
        observation = self._feedback.pop(0) if self._feedback else ()
        return Observation(messages=observation), None, not self._feedback and not observation, False, {}


class RecordedSpec(DataEnvSpec):
    """Recorded data: demonstrations, preferences, labelled answers and steps, or plain text, from files."""

    env_class = RecordedEnv
    Config = RecordedConfig
    config: RecordedConfig
    answer_required = False
    gives_rewards = False

    async def setup(self) -> None:
        config = self.config
        data = config.data or SourceConfig()
        for key in ("images", "image_folder"):
            if any(getattr(source, key) != getattr(data, key) for source in self._sources()):
                raise ConfigError(f"data.sources.NAME.{key} cannot be set for recorded data: set data.{key} for all")
        self._reader = Reader(
            config.form, config.fields, config.teach, config.separator, config.template, ImageReader(data)
        )
        await super().setup()

    async def _load(self, data: DataConfig, held_out_elsewhere: Collection[int] = ()) -> None:
        await super()._load(data, held_out_elsewhere)
        sources = data.resolved_sources().values()
        read = {name for s in sources for name in (s.id, s.difficulty, *s.select, *s.test_select)}
        unread = {key: count for key, count in self._reader.unread.most_common() if key not in read}
        if self._splits is not None:
            columns = f"columns: read {', '.join(sorted(filter(None, self._reader.fields_read)))}"
            columns += f"; not read {', '.join(unread)}" if unread else ""
            self._splits = replace(self._splits, columns=columns)
        if unread and not held_out_elsewhere:
            keys = ", ".join(f"{key} ({count:,})" for key, count in unread.items())
            name = data.path or data.test_path or "the sources"
            logging.getLogger(__name__).warning("%s: nothing reads these keys of its rows: %s", name, keys)

    def _sources(self) -> Iterable[SourceConfig]:
        return self.config.data.resolved_sources().values() if self.config.data is not None else ()

    @property
    def agent(self) -> str:  # type: ignore[override]
        return "single_turn" if self.config.form == "prompt" else "replay"

    @property
    def recordings_per_task(self) -> int:
        return 2 if self._reader.form == "preference" else 1

    def form(self) -> Form:
        def read(row: Row, context: str) -> Row:
            if self._reader.form == "auto":
                self._reader.form = self._reader.guess(row, context)
            parsed = self._reader.parsed(row, context)
            changed = self._reader.images.name_images(parsed, context, self._reader.fields_of_messages(parsed))
            record = self._reader.read(changed, context)
            prompt = {"prompt": list(record.prompt)}
            has_images = images_in([*record.prompt, *(m for variant in record.variants for m in variant.messages)])
            return FormRow(prompt, changed) if has_images else prompt

        return read

    def record(self, task: Task) -> Record:
        return self._reader.read(dict(task.fields), f"task {task.key}")

    def conversations(self, task: Task) -> Sequence[Sequence[Message]]:
        record = self.record(task)
        variants = [variant.messages for variant in record.variants] or [()]
        return [(*record.prompt, *messages) for messages in variants]

    def recording(self, task: Task, seed: int, member: int) -> Recording:
        record = self.record(task)
        variant = record.variants[member]
        turns = [message for message in variant.messages if message.role == "assistant"]
        metrics = {"margin": record.margin} if record.margin else {}
        return Recording(turns, variant.rewards, metrics, is_single_turn=record.is_steps)


def _messages_between_turns(answer: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The messages after each turn of the assistant but the last."""
    groups: list[list[Message]] = []
    for message in answer:
        if message.role == "assistant":
            groups.append([])
        else:
            groups[-1].append(message)
    return [tuple(messages) for messages in groups[:-1]]


def _tool(description: Mapping[str, Any]) -> ToolSpec:
    function = description.get("function", description)
    return ToolSpec(str(function["name"]), str(function.get("description") or ""), function.get("parameters") or {})
