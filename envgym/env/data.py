"""Environments whose tasks come from the user's data."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import ClassVar

from envgym.errors import ConfigError
from envgym.tasks.columns import DEFAULT_FIELDS, FieldNames, Form, TaskReader
from envgym.tasks.config import DataConfig, SourceConfig
from envgym.tasks.split import TaskSplits, load_tasks
from envgym.tasks.task_set import TaskSet
from envgym.types import Observation, Task

from .few_shot import Example, check_examples, play_examples, with_examples
from .protocol import EnvConfig
from .spec import EnvSpec


class DataEnvConfig(EnvConfig):
    """Settings of an environment that takes `data`."""

    data: DataConfig | None = None
    """Tasks from files, folders or generators."""


class DataEnvSpec(EnvSpec):
    """An environment that reads its tasks from `data`, or takes its `default_tasks` without data.

    A subclass that overrides `setup` or `teardown` calls the overridden method.
    """

    Config = DataEnvConfig
    config: DataEnvConfig
    answer_required: ClassVar[bool] = True
    """True if every row must have an answer, text or a number; else it may be any value, or missing (None)."""
    field_names: ClassVar[FieldNames] = DEFAULT_FIELDS
    """Possible names of the prompt's field and of the answer's, if the settings name none."""

    fixed_tasks: TaskSet | None = None
    """Tasks that stand in every split in place of the data's, such as those of saved episodes."""

    _splits: TaskSplits | None = None
    _examples: asyncio.Task[list[Example]] | None = None

    async def setup(self) -> None:
        if self.config.data is not None and self.fixed_tasks is None:
            await self._load(self.config.data)
            self.shows_examples = self.config.data.few_shot > 0
            if self.shows_examples:
                check_examples(self.id, self.config.data, await self._tasks_of_examples(self.config.data))
            for split in ("train", "test"):
                if (tasks := self.tasks(split)).size != 0:
                    self.check_task(await tasks.get(0))

    async def _load(self, data: DataConfig, held_out_elsewhere: Collection[int] = ()) -> None:
        self._splits, self._examples = await self._read_splits(data, held_out_elsewhere), None

    async def _read_splits(self, data: DataConfig, held_out_elsewhere: Collection[int]) -> TaskSplits:
        return await asyncio.to_thread(
            load_tasks, data, answer_required=self.answer_required, form=self.form(), field_names=self.field_names,
            held_out_elsewhere=held_out_elsewhere,
        )  # fmt: skip

    async def _tasks_of_examples(self, data: DataConfig) -> TaskSet:
        """The tasks that examples are taken from, of which none is held out."""
        assert self._splits is not None  # set by setup
        if data.few_shot_select and data.path:
            return (await self._read_splits(data.of_examples(), self._splits.held_out)).train
        return self._splits.train

    async def with_examples(self, observation: Observation, task: Task) -> Observation:
        data = self.config.data
        if data is None or not data.few_shot or self._splits is None:
            return observation
        if self._examples is None:
            self._examples = asyncio.create_task(self._play_examples(data))
        return with_examples(observation, await asyncio.shield(self._examples), task, data.few_shot)

    async def _play_examples(self, data: DataConfig) -> list[Example]:
        return await play_examples(self, data, await self._tasks_of_examples(data))

    @property
    def columns(self) -> str:
        """The columns of its data in words, by their use; empty without data."""
        n_examples = self.config.data.few_shot if self.config.data is not None else 0
        examples = f"; before every prompt: {n_examples} training tasks with answers" if n_examples else ""
        return self._splits.columns + examples if self._splits is not None else ""

    @property
    def is_held_out(self) -> bool:
        """True if its data has no path to train on: all tasks are held out."""
        data = self.config.data
        return data is not None and not data.path and not data.sources and self.fixed_tasks is None

    @property
    def held_out_prompts(self) -> frozenset[int]:
        """Keys of the held-out prompts in its data."""
        return self._splits.held_out if self._splits is not None else frozenset()

    async def drop_held_out(self, prompts: Collection[int]) -> None:
        """Remove the tasks with these prompts, which other environments of the run hold out, from training. Logs their
        number."""
        if self.config.data is not None and self._splits is not None and self._splits.train.size:
            await self._load(self.config.data, prompts)

    async def teardown(self) -> None:
        self._splits = self._examples = None

    def tasks(self, split: str) -> TaskSet:
        if split not in ("train", "test"):
            raise ConfigError(f"environment {self.id} has the splits train and test, not {split!r}")
        if self.fixed_tasks is not None:
            return self.fixed_tasks
        if self.config.data is None:
            return self.default_tasks(split)
        if self._splits is None:
            raise RuntimeError("tasks are read from data by setup, which has not run")
        return self._splits.train if split == "train" else self._splits.test

    def reader(self, source: SourceConfig) -> TaskReader:
        """A reader of rows as tasks of this environment."""
        return TaskReader(source, answer_required=self.answer_required, form=self.form(), field_names=self.field_names)

    def check_task(self, task: Task) -> None:
        """Raise `DataError` for a task that cannot be graded because of a field that the reader does not check. `setup`
        calls this with the first task of each split, before a model is loaded."""

    def form(self) -> Form | None:
        """The converter of rows in another program's form; the unconverted rows become the tasks' fields. None: rows
        have envgym's form."""
        return None

    def default_tasks(self, split: str) -> TaskSet:
        """The tasks of a split, `train` or `test`, of an environment without data."""
        raise ConfigError(f"environment {self.id} has no default tasks: give it some with data.path=FILE")
