"""Plain files of generations, such as vLLM scripts and lm-eval write, as episodes to score.

A row holds completions, and either a prompt with a reference, as a row of data does, or what identifies a task of the
environment: its id, or its prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envgym.config.schema import StageConfig
from envgym.env import EnvSpec
from envgym.env.data import DataEnvSpec
from envgym.errors import DataError, did_you_mean
from envgym.registry import task_set_of
from envgym.rewards.final_answers import reference
from envgym.tasks import SourceConfig
from envgym.tasks.columns import PROMPT_FIELDS, prompt_key
from envgym.tasks.hub import is_hub_id
from envgym.tasks.rows import Row, Rows, open_rows
from envgym.types import Episode, Message, Outcome, Segment, StopReason, Task, Turn, as_messages
from envgym.types import Row as TokenRow

COMPLETION_FIELDS = (
    "completion", "completions", "generated_text", "generation", "generations", "resps", "model_output", "prediction",
    "outputs", "output", "responses", "response", "text",
)  # fmt: skip
"""Usual names of the field of completions, in order of preference."""
ID_FIELDS = ("task_id", "id", "unique_id", "doc_id")
DOCUMENT = "doc"
"""The field in which lm-eval keeps the row of the data set."""


@dataclass(frozen=True, slots=True)
class GenerationFields:
    """Names of fields. None: the first usual one that the first row has."""

    prompt: str | None = None
    reference: str | None = None
    completion: str | None = None


def holds_generations(path: Path) -> bool:
    """True for a file of rows that are not episodes. Raises `DataError` for an unreadable first row."""
    if not path.is_file():
        return False
    rows = open_rows(path, limit=1)
    return len(rows) > 0 and not {"task", "outcome"} <= rows[0].keys()


class GoldTasks:
    """The tasks of a named task set, by split, and what came of looking tasks of a file up among them: how many have
    another reference (`differing`), and how many a prompt that the task set lacks (`unmatched`)."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]]) -> None:
        self.tasks = tasks
        self.differing = self.unmatched = 0
        self._looked_up: set[int] = set()
        self.by_id: dict[str, Task] = {}
        self.by_prompt: dict[int, list[Task]] = {}
        for task in (*tasks["test"], *tasks["train"]):
            self.by_id.setdefault(task.id, task)
            self.by_prompt.setdefault(prompt_key(task), []).append(task)

    @property
    def covered(self) -> int:
        """The number of held-out tasks that were looked up."""
        return sum(id(task) in self._looked_up for task in self.tasks["test"])

    def find(self, task: Task) -> Task:
        """The task with the prompt of `task`, or `task` itself if there is none."""
        candidates = self.by_prompt.get(prompt_key(task), [])
        gold = next((candidate for candidate in candidates if _agree(candidate, task)), None)
        self.differing += gold is None and bool(candidates)
        self.unmatched += not candidates
        gold = gold or next(iter(candidates), task)
        self._looked_up.add(id(gold))
        return gold


def _agree(gold: Task, task: Task) -> bool:
    """True if a task with the prompt of `gold` has the same reference and, where it has them, the same fields."""
    if task.answer is not None and reference(task.answer) != reference(gold.answer):
        return False
    return all(task.fields[name] == value for name, value in gold.fields.items() if name in task.fields)


async def gold_tasks(stage: StageConfig, source: Path) -> GoldTasks | None:
    """The tasks of the stage's environment if it is a named task set whose files are on this machine; `source`, the
    file to score, is none of them."""
    spec = stage.make_spec()
    if task_set_of(stage.env.name) is None or not isinstance(spec, DataEnvSpec) or spec.config.data is None:
        return None
    paths = {path for path in (spec.config.data.path, spec.config.data.test_path) if path and not is_hub_id(path)}
    return GoldTasks(await _tasks_of(spec)) if paths - {str(source)} else None


async def _tasks_of(spec: EnvSpec) -> dict[str, list[Task]]:
    """The environment's tasks by split."""
    async with spec:
        splits = {split: spec.tasks(split) for split in ("train", "test")}
        return {name: [await tasks.get(n) for n in range(tasks.size or 0)] for name, tasks in splits.items()}


async def generated_episodes(
    stage: StageConfig, path: Path, fields: GenerationFields, gold: GoldTasks | None = None
) -> list[Episode]:
    """An unscored episode for each completion. Rows with the same prompt and reference are one task; that of `gold`,
    if it has the prompt.

    Raises `DataError` for a row without a completion, and for one whose task is neither in it nor in the environment.
    """
    rows = open_rows(path)
    spec = stage.make_spec()
    completion = _completion_field(rows, fields)
    reader = _reader(spec, rows, fields, completion) if isinstance(spec, DataEnvSpec) else None
    read_task = reader or _finder(spec, fields, gold or GoldTasks(await _tasks_of(spec)))
    episodes: list[Episode] = []
    tasks: dict[tuple[int, str], Task] = {}
    counts: Counter[str] = Counter()
    for index, row in enumerate(rows):
        task = read_task(row, rows.location(index), rows.name(index))
        task = gold.find(task) if gold is not None else task
        first = tasks.setdefault((prompt_key(task), repr(task.answer)), task)
        task = replace(task, id=first.id)  # with its row's fields, which may hold other options or tests
        for text in _completions(row, completion, rows.location(index)):
            group = f"generated/{task.id}"
            episodes.append(unscored_episode(spec, task, [Message("assistant", text)], group, counts[group]))
            counts[group] += 1
    return episodes


def unscored_episode(spec: EnvSpec, task: Task, turns: Sequence[Message], group: str, member: int = 0) -> Episode:
    """An episode of recorded assistant's turns, without token ids and without a reward."""
    row = TokenRow([Segment("action", array("i"))], turns=[Turn(None, StopReason.STOP) for _ in turns])
    id = f"{group}:{member:03d}:0"
    episode = Episode(id, task, Outcome.finish(), [row], env=spec.id, group_id=group, member=member)
    messages = list(as_messages(task.prompt))
    # The prompt of a recording may hold the recorded turns.
    prompt = messages[: len(messages) - len(turns)] if messages[-len(turns) :] == [*turns] else messages
    episode.messages = [*prompt, *turns]
    return episode


# -- fields of rows ---------------------------------------------------------------------------------------


def _completion_field(rows: Rows, fields: GenerationFields) -> str:
    """The field of completions. Raises `DataError` if the first row has none."""
    row, names = rows[0], COMPLETION_FIELDS if fields.completion is None else (fields.completion,)
    if usable := [name for name in names if name in row and name != fields.reference]:
        return usable[0]
    hint = did_you_mean(fields.completion, row) if fields.completion else ""
    raise DataError(
        f"{rows.location(0)}: no completion; the row has {', '.join(row)}: name it with --completion FIELD.{hint}"
    )


def _completions(row: Row, name: str, location: str) -> list[str]:
    if name not in row:
        raise DataError(f"{location}: the row has no field {name!r}, only {', '.join(row)}")
    texts = list(_texts(row[name]))
    if not texts:
        raise DataError(f"{location}: field {name!r}: a completion is text, or a list of them, not {row[name]!r:.60}")
    return texts


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value: itself, those of a list (of lists), a mapping's `text`, or a message's `content`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        for name in ("text", "content", "message"):
            yield from _texts(value.get(name))


def _data_row(row: Row, completion: str) -> Row:
    """The row without its completions; of lm-eval's, the row of the data set."""
    document = row.get(DOCUMENT)
    return dict(document) if isinstance(document, Mapping) else {k: v for k, v in row.items() if k != completion}


# -- tasks of rows ----------------------------------------------------------------------------------------

_ReadTask = Callable[[Row, str, str], Task]
"""The task of a row; takes also its location, for errors, and the task's id unless a field has it."""


def _reader(spec: DataEnvSpec, rows: Rows, fields: GenerationFields, completion: str) -> _ReadTask | None:
    """A function that reads tasks from the rows themselves: with the environment's own names of fields or, if the first
    row does not have them, with usual ones. None if the first row holds no task that can be graded."""
    names = {"prompt": fields.prompt, "answer": fields.reference}
    of_user = {name: field for name, field in names.items() if field is not None}
    of_env = spec.config.data.model_dump(include=_READING) if spec.config.data is not None else {}
    for settings in ({**of_env, **of_user}, of_user):
        reader = spec.reader(SourceConfig(**settings))
        try:
            task = reader.read(_data_row(rows[0], completion), rows.location(0), rows.name(0))[0]
            spec.check_task(task)
        except DataError:
            if of_user and settings is of_user:
                raise
            continue
        return lambda row, location, name: reader.read(_data_row(row, completion), location, name)[0]
    return None


_READING = {"prompt", "answer", "answer_pattern", "id", "template", "system"}
"""Settings of `data` that say how a row is read."""


def _finder(spec: EnvSpec, fields: GenerationFields, tasks: GoldTasks) -> _ReadTask:
    """A function that finds the environment's task of a row: by its id, or by its prompt."""

    def find(row: Row, location: str, name: str) -> Task:
        for field in ID_FIELDS:
            if (task := tasks.by_id.get(str(row.get(field)))) is not None:
                return task
        for field in (fields.prompt,) if fields.prompt else PROMPT_FIELDS:
            text = row.get(field)
            if isinstance(text, str) and (candidates := tasks.by_prompt.get(prompt_key(Task("", text)))):
                return candidates[0]
        problem, hint = "the row has neither a prompt with a reference, nor the id or prompt of a task", ""
        if isinstance(spec, DataEnvSpec):
            hint = ": name the fields with --prompt FIELD and --reference FIELD"
        raise DataError(f"{location}: {problem} of {spec.id}. It has {', '.join(row)}{hint}")

    return find
