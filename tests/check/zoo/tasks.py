"""Something is wrong with the description or the tasks."""

import itertools
from typing import Annotated, Any

from healthy import Sums, SumsSpec, tasks_of
from pydantic import BeforeValidator, ConfigDict, field_validator

import envgym


class Opaque:
    def __init__(self, text: str) -> None:
        self.text = text


class UnserialisableSettings(Sums):
    class Config(envgym.EnvConfig):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        size: Annotated[Opaque | None, BeforeValidator(lambda value: value and Opaque(str(value)))] = None


class SettingsThatGrow(Sums):
    """What they are written as is read as something else."""

    class Config(envgym.EnvConfig):
        size: int = 1

        @field_validator("size")
        @classmethod
        def one_more(cls, value: int) -> int:
            return value + 1


class OverlappingSplits(SumsSpec):
    env_class = Sums

    def tasks(self, split):
        tasks = tasks_of("train")
        return envgym.TaskList(tasks[:60] if split == "train" else [renamed(task) for task in tasks[50:]])


def renamed(task):
    """Another id does not make another problem."""
    return envgym.Task(f"test-{task.id}", task.prompt, task.answer)


class DuplicateIds(SumsSpec):
    env_class = Sums

    def tasks(self, split):
        return envgym.TaskList([envgym.Task(f"{task.id[:2]}", task.prompt, task.answer) for task in tasks_of(split)])


class TasksThatChange(SumsSpec):
    """A task is another one when it is asked for again."""

    env_class = Sums
    counter = itertools.count()

    def tasks(self, split):
        class Changing(envgym.TaskList):
            async def get(self, index):
                task = self._tasks[index]
                return envgym.Task(task.id, task.prompt, task.answer, {"read": next(TasksThatChange.counter)})

        return Changing(tasks_of(split))


class TasksThatAreNoData(SumsSpec):
    env_class = Sums

    def tasks(self, split):
        fields: dict[str, Any] = {"check": {1, 2}}
        return envgym.TaskList([envgym.Task(t.id, t.prompt, t.answer, fields) for t in tasks_of(split)])


class TasksWithoutEnd(SumsSpec):
    """They say how many they are, and go on."""

    env_class = Sums

    def tasks(self, split):
        class Circular(envgym.TaskList):
            async def get(self, index):
                return self._tasks[index % len(self._tasks)]

        return Circular(tasks_of(split))


class NoTasks(SumsSpec):
    env_class = Sums

    def tasks(self, split):
        return envgym.TaskList([])


class ChangingFingerprint(SumsSpec):
    env_class = Sums
    counter = itertools.count()

    def fingerprint(self):
        return super().fingerprint() | {"spec": f"{next(self.counter)}"}
