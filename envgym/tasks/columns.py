"""From a row to a task: which field is which, the template, the system message, and what a bad row is told."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from string import Formatter
from typing import Any, TypeVar

from envgym.errors import DataError, did_you_mean
from envgym.types import Message, Task, as_messages

from .config import SourceConfig
from .rows import Row

PROMPT_FIELDS = ("prompt", "question", "problem", "input", "query", "messages")
ANSWER_FIELDS = (
    "answer", "answers", "solution", "label", "target", "ground_truth", "gold", "expected_answer", "output", "response",
)  # fmt: skip
UsualFields = tuple[Sequence[str], Sequence[str]]
"""Names of the prompt's field and of the answer's; the first that the first row has is taken."""
USUAL_FIELDS: UsualFields = (PROMPT_FIELDS, ANSWER_FIELDS)
Form = Callable[[Row, str], Row]
"""An environment's reading of a row that is in another program's form, before fields are read from it: a row with a
prompt, an answer and so on. Gets the row and its place, for a `DataError`."""
Value = TypeVar("Value")
KEYS = 16**15
"""Prompts have keys below this."""


class TaskReader:
    """Makes tasks of a source's rows. The first row it reads decides which of several names a field has.

    `answer_required`: an answer must be there, and be text or a number; else it may be any value, or missing.
    `usual` are the names that the two fields may have where the source gives none. `prefix` goes before every id. A row
    that is read in another `form` is in the task's fields as it stands, whole; its prompt may be empty, as another
    program may say more.
    """

    def __init__(
        self, source: SourceConfig, *, answer_required: bool, prefix: str = "", form: Form | None = None,
        usual: UsualFields = USUAL_FIELDS,
    ) -> None:  # fmt: skip
        self._source = source
        self._form = form
        self._answer_required = answer_required
        self._prefix = prefix
        self._usual_prompts, self._usual_answers = usual
        self._fields: tuple[str | None, str | None] | None = None

    @property
    def reads_whole_rows(self) -> bool:
        """True if a task is all of its row, of which the prompt may say little."""
        return self._form is not None

    def read(self, row: Row, where: str, name: str) -> tuple[Task, int]:
        """The task of `row`, called `name` where no field says, and its prompt's key: that of the prompt as the row has
        it, whatever a template makes of it. `where` is its file and line, for messages."""
        source = self._source
        given, row = row, row if self._form is None else self._form(row, where)
        if self._fields is None:
            self._fields = self._prompt_field(row, where), self._answer_field(row, where)
        prompt_field, answer_field = self._fields
        prompt: str | tuple[Message, ...] = ""
        asked: tuple[Message, ...] = ()
        if prompt_field is not None:
            prompt, asked = _prompt(_value(row, prompt_field, where), prompt_field, where, self._form is not None)
        if source.template is not None:
            prompt = self._fill(source.template, prompt, row, where)
            asked = asked or as_messages(prompt)
        if source.system is not None and (not asked or asked[0].role != "system"):
            prompt = (Message.of("system", source.system), *as_messages(prompt))
        used = {prompt_field, answer_field, source.id, source.difficulty}
        task = Task(
            id=self._prefix + (str(_value(row, source.id, where)) if source.id else name),
            prompt=prompt,
            answer=self._answer(row, answer_field, where),
            fields=given if self._form else {key: value for key, value in row.items() if key not in used},
            difficulty=None if source.difficulty is None else _difficulty(row, source.difficulty, where),
        )
        return task, _key(asked)

    def _prompt_field(self, row: Row, where: str) -> str | None:
        template = self._source.template
        if template is not None and "" not in [name for _, name, _, _ in Formatter().parse(template)]:
            return None  # it names all the fields it is made of
        return _field(row, self._source.prompt, self._usual_prompts, "prompt", where)

    def _answer_field(self, row: Row, where: str) -> str | None:
        names = self._source.answer
        if not names and not self._answer_required and not any(name in row for name in self._usual_answers):
            return None
        return _field(row, names, self._usual_answers, "answer", where)

    def _answer(self, row: Row, name: str | None, where: str) -> Any:
        if name is None:
            return None
        if self._answer_required:
            return _text_or_number(_value(row, name, where), name, where)
        return _finite(_value(row, name, where) if self._source.answer else row.get(name), name, where)

    def _fill(self, template: str, prompt: str | tuple[Message, ...], row: Row, where: str) -> str:
        if not isinstance(prompt, str):
            raise DataError(f"{where}: data.template fills in text, and this prompt is a list of messages")
        try:
            return template.format(prompt, **row)
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{where}: data.template names a field {name!r} that the row has not, only {_list(row)}."
                f"{did_you_mean(name, row)}"
            ) from None
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"{where}: data.template cannot be filled in: {error}") from None


def prompt_key(task: Task) -> int:
    """A number that stands for what `task` asks, the same on every machine; spacing does not count."""
    return _key(as_messages(task.prompt))


def key_of(text: str) -> int:
    """A number that stands for `text`, the same on every machine."""
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:15], 16)


def _key(messages: Iterable[Message]) -> int:
    words = [f"{message.role} {' '.join(message.text.split())}" for message in messages]
    return key_of("\n".join(words))


def _field(row: Row, names: Sequence[str], usual: Sequence[str], role: str, where: str) -> str:
    """The name of a field: the one that is given, or the first of several that the row has."""
    if len(names) == 1:
        return names[0]
    for name in names or usual:
        if name in row:
            return name
    raise DataError(f"{where}: no {role} field; the row has {_list(row)}: say which it is with data.{role}=FIELD")


def _value(row: Row, name: str, where: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: the row has no field {name!r}, only {_list(row)}.{did_you_mean(name, row)}")
    return row[name]


def _prompt(
    value: Any, name: str, where: str, may_be_empty: bool
) -> tuple[str | tuple[Message, ...], tuple[Message, ...]]:
    """The prompt as a task has it, and as messages."""
    try:
        if not isinstance(value, str | list):
            raise TypeError(f"a prompt is text or a list of messages, not {type(value).__name__}")
        messages = as_messages(value)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: field {name!r}: {error}") from None
    if not may_be_empty and not any(message.text.strip() for message in messages):
        raise DataError(f"{where}: field {name!r} is empty")
    return (value if isinstance(value, str) else messages), messages


def _text_or_number(value: Any, name: str, where: str) -> str | int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: field {name!r}: an answer is text or a number, not {type(value).__name__}")
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{where}: field {name!r} is empty")
    return _finite(value, name, where)


def _finite(value: Value, name: str, where: str) -> Value:
    """`value`, if it is not NaN (what other programs write for a missing one) or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: field {name!r}: an answer must be finite, not {value}")
    return value


def _difficulty(row: Row, name: str, where: str) -> float | None:
    value = _value(row, name, where)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: field {name!r}: a difficulty is a finite number, not {value!r:.60}")
    return float(value)


def _list(row: Row) -> str:
    return ", ".join(row) or "no fields"
