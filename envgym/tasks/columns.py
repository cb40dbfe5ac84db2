"""From a row to a task: its fields, the template, the system message, and the errors of a bad row."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, TypeVar

from envgym.errors import DataError, did_you_mean, extend_message
from envgym.hashing import source_hash, text_hash
from envgym.types import ImagePart, Message, Task, as_messages

from .config import IMAGE_FIELDS, SourceConfig
from .images import MARK, ImageReader, show_images
from .rows import Row, RowLeftOut, parse_json

PROMPT_FIELDS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
MESSAGE_FIELDS = ("messages", "conversations", "conversation", "dialogue")
CONTEXT_FIELDS = ("context", "passage", "body", "paragraph", "article", "background")
PLACES = {"instruction": 0, **dict.fromkeys(CONTEXT_FIELDS, 1), "input": 3}
"""Position of a text field in the prompt, by its name. All other fields, such as a question's, have 2."""
SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
UNSEEN_FIELDS = ("video", "videos", "audio", "audios")
ANSWER_FIELDS = (
    "answer", "answers", "solution", "label", "target", "ground_truth", "gold", "expected_answer", "output", "response",
)  # fmt: skip
NO_ANSWER = "the EnvSpec of an environment that needs no answer has answer_required = False"
FieldNames = tuple[Sequence[str], Sequence[str]]
"""Possible names of the prompt's field and of the answer's. Of several, the first that a source's first row has is
used."""
DEFAULT_FIELDS: FieldNames = (PROMPT_FIELDS, ANSWER_FIELDS)
MOST_KINDS = 1000
"""Names and types of rows that are remembered."""
Form = Callable[[Row, str], Row]
"""Converts a row in another program's form to one with a prompt, an answer and so on. It also gets the row's location,
for a `DataError`."""
Value = TypeVar("Value")
KEYS = 16**15
"""Exclusive upper bound of the keys of prompts."""


class FormRow(dict[str, Any]):
    """A converted row whose task has other `fields` than the row as it was."""

    def __init__(self, row: Row, fields: Row) -> None:
        super().__init__(row)
        self.fields = fields


class TaskReader:
    """Makes tasks of a source's rows. The first row it reads decides which of several names a field has.

    `answer_required`: every row needs an answer, text or a number; else it may be any value, or missing. `field_names`
    are possible names of the two fields, for a source that sets none. `prefix` begins every id. A row in another
    program's `form` is the task's `fields`, unmodified unless a `FormRow` has others; its prompt may be empty, as that
    program may add one.
    """

    def __init__(
        self, source: SourceConfig, *, answer_required: bool, prefix: str = "", form: Form | None = None,
        field_names: FieldNames = DEFAULT_FIELDS,
    ) -> None:  # fmt: skip
        self.source = source
        self.form = form
        self._images = ImageReader(source)
        self._answer_required = answer_required
        self._prefix = prefix
        self._prompt_names, self._answer_names = field_names
        self._fields: tuple[str | None, str | None] | None = None
        self._in_template = {
            name.partition("[")[0] for _, name, _, _ in Formatter().parse(source.template or "") if name
        }
        self._are_plain: dict[tuple[Any, ...], bool] = {}
        """True for names and types of rows of which `key` reads only the prompt and the answer."""
        self.notes: Counter[str] = Counter()
        """Columns that the prompt shows unasked, or does not show, with the number of rows."""
        self.columns = ""
        """Columns of the first row in words, by their use; empty for rows in another program's form."""

    def fingerprint(self) -> str | None:
        """A hash that changes with the reading of rows; None with a form, which may be any code."""
        unused = {"path", "split", "test_path", "test_split", "test_fraction", "weight"}
        settings = self.source.model_dump_json(exclude=unused)
        names = f"{self._answer_required} {self._prompt_names} {self._answer_names}"
        return None if self.form else text_hash(f"{settings} {names} {source_hash([TaskReader, ImageReader, Message])}")

    def facts(self) -> dict[str, Any]:
        """The attributes that reading has set, in JSON types."""
        return {
            "fields": self._fields, "notes": self.notes, "columns": self.columns, "images": self._images.has_read
        }  # fmt: skip

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Set the attributes to those of a reader that has read the same rows."""
        self._fields, self.notes, self.columns = facts["fields"], Counter(facts["notes"]), facts["columns"]
        self._images.has_read = facts["images"]

    def read(self, row: Row, location: str, name: str) -> tuple[Task, int]:
        """The task of `row` and the key of its prompt, without a template or system message. `name` is its id unless
        the source has a field for it; `location` its file and line, for messages and for the paths of images."""
        source, original = self.source, row
        image_field, images = None, list[ImagePart]()
        if self.form is not None:
            row = self.form(row, location)
            original = row.fields if isinstance(row, FormRow) else original
        elif image_field := self._images.field(row, location):
            images = self._images.images(row[image_field], location)
        if self._fields is None:
            self._fields = self._prompt_field(row, location), self._answer_field(row, location)
            if self.form is None:
                self.columns = self._columns_by_use(row, *self._fields)
        prompt_field, answer_field = self._fields
        prompt: str | tuple[Message, ...] = ""
        if prompt_field is not None:
            prompt = self._prompt(row, prompt_field, location, may_be_empty=bool(self.form or images))
        if prompt_field is not None and self.form is None:
            prompt = self._with_context(prompt, row, prompt_field)
        messages = () if prompt_field is None else as_messages(prompt)
        if source.template is not None:
            prompt = self._fill(source.template, prompt, row, location)
            values = (Message(name, str(row[name])) for name in sorted(self._in_template))
            messages = (*messages, *values) if messages else as_messages(prompt)
        if self.form is None and (images or not isinstance(prompt, str) or MARK in prompt):
            are_marks = any(name in original for name in source.images)
            with_images = show_images(as_messages(prompt), images, location, are_marks=are_marks)
            prompt = prompt if isinstance(prompt, str) and not images else with_images
            if source.template is None:
                messages = with_images
            elif images:
                messages = (*messages, Message("images", images))
        system_field = self._system_field(row)
        system = source.system if system_field is None else system_text(row, system_field)
        if system is not None and (not messages or messages[0].role != "system"):
            prompt = (Message("system", system), *as_messages(prompt))
        used_fields = {prompt_field, answer_field, source.id, source.difficulty, image_field}
        task = Task(
            id=self._prefix + (str(_value(row, source.id, location)) if source.id else name),
            prompt=prompt,
            answer=self._answer(row, answer_field, location),
            fields=original if self.form else {key: value for key, value in row.items() if key not in used_fields},
            difficulty=None if source.difficulty is None else _difficulty(row, source.difficulty, location),
        )
        return task, _key(messages)

    def key(self, row: Row) -> int | None:
        """The key of `read` for a row that passes its checks: quickly, for the rows of most files, texts and numbers.
        None for any other row and for one with a mistake, which `read` must read, and for all before the first."""
        prompt_field, answer_field = self._fields or (None, None)
        if prompt_field is None:
            return None
        kinds = (*row, *map(type, row.values()))
        if (is_plain := self._are_plain.get(kinds)) is None and len(self._are_plain) < MOST_KINDS:
            is_plain = self._are_plain[kinds] = self._is_plain(row, prompt_field, answer_field)
        if not is_plain or (text := _normal(row[prompt_field]))[:1] in "[{":  # messages as text, or blank
            return None
        if answer_field is not None and type(row[answer_field]) is str and not row[answer_field].strip():
            return None
        return key_of(f"user {text}")  # as of one message

    def _is_plain(self, row: Row, prompt: str, answer: str | None) -> bool:
        """True if rows with these names and types are texts and numbers, of which `prompt` alone is shown, one text."""
        source, extra_columns = self.source, set(row) - {prompt}
        return (
            self.form is None
            and not (source.template or source.difficulty or source.answer_pattern)
            and source.images == IMAGE_FIELDS
            and type(row.get(prompt)) is str
            and (answer is None or type(row.get(answer)) in (str, int))
            and all(isinstance(value, str | int | float | None) for value in row.values())
            and all(type(name) is str and not name.startswith("$") for name in row)
            and extra_columns.isdisjoint({*SYSTEM_FIELDS, *UNSEEN_FIELDS, *IMAGE_FIELDS})
            and not any(name.lower() in PLACES for name in extra_columns)
        )

    def _system_field(self, row: Row) -> str | None:
        """The field of the row's system message, if it has one."""
        names = [name for name in SYSTEM_FIELDS if name in row and name not in self._in_template]
        return next((name for name in names if system_text(row, name).strip()), None)

    def _columns_by_use(self, row: Row, prompt_field: str | None, answer_field: str | None) -> str:
        prompt = [name for name in row if name in self._in_template]
        if prompt_field is not None:
            is_joined = isinstance(row.get(prompt_field), str) and not (self.source.template or self.source.prompt)
            prompt += fields_of_prompt(row, prompt_field) if is_joined else [prompt_field]
        uses = {
            "prompt": prompt,
            "answer": [answer_field] if answer_field in row else [],
            "images": [image_field] if (image_field := self._images.field(row, "")) else [],
            "system message": [system_field] if (system_field := self._system_field(row)) else [],
            "id": [self.source.id] if self.source.id else [],
            "difficulty": [self.source.difficulty] if self.source.difficulty else [],
        }
        unused = set(row).difference(*uses.values())
        uses["not shown, for the environment alone"] = [name for name in row if name in unused]
        return "columns: " + "; ".join(f"{use} {', '.join(names)}" for use, names in uses.items() if names)

    def _with_context(self, prompt: str | tuple[Message, ...], row: Row, field: str) -> str | tuple[Message, ...]:
        """The prompt with the texts it is about, an instruction and its input, unless settings say what it is."""
        for name in UNSEEN_FIELDS:
            if row.get(name):
                self.notes[f"{name} is not shown: policies get text and images"] += 1
        fields = fields_of_prompt(row, field)
        if len(fields) == 1 or self.source.template is not None:
            return prompt
        if self.source.prompt or not isinstance(prompt, str):
            fields.remove(field)
            self.notes[f"{', '.join(fields)} not in the prompt, which data.template can show"] += 1
            return prompt
        self.notes[f"the prompt is {' and '.join(fields)}; data.prompt={field} makes it {field} alone"] += 1
        return "\n\n".join(row[name] for name in fields)

    def _prompt(self, row: Row, name: str, location: str, *, may_be_empty: bool) -> str | tuple[Message, ...]:
        may_be_text = name not in MESSAGE_FIELDS
        value = parse_json(_value(row, name, location), f"{location}: field {name!r}", may_be_text=may_be_text)
        if self.form is None:
            value = self._images.parts(value, location)
        try:
            if not isinstance(value, str | list):
                raise TypeError(f"a prompt is text or a list of messages, not {type(value).__name__}")
            messages = as_messages(value)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"{location}: field {name!r}: {error}") from None
        if not may_be_empty and not any(message.text.strip() or message.images for message in messages):
            raise DataError(f"{location}: field {name!r} is empty")
        return value if isinstance(value, str) else messages

    def _prompt_field(self, row: Row, location: str) -> str | None:
        template = self.source.template
        if template is not None and "" not in [name for _, name, _, _ in Formatter().parse(template)]:
            return None  # it names every field
        return _field(row, self.source.prompt, self._prompt_names, "prompt", location)

    def _answer_field(self, row: Row, location: str) -> str | None:
        names = self.source.answer
        if not names and not self._answer_required and not any(name in row for name in self._answer_names):
            return None
        return _field(row, names, self._answer_names, "answer", location)

    def _answer(self, row: Row, name: str | None, location: str) -> Any:
        if name is None:
            return None
        if self.source.answer_pattern is not None:
            return _matched(self.source.answer_pattern, _value(row, name, location), name, location)
        if self._answer_required:
            return _text_or_number(_value(row, name, location), name, location)
        return _finite(_value(row, name, location) if self.source.answer else row.get(name), name, location)

    def _fill(self, template: str, prompt: str | tuple[Message, ...], row: Row, location: str) -> str:
        if not isinstance(prompt, str):
            raise DataError(f"{location}: data.template fills in text, and this prompt is a list of messages")
        try:
            return template.format(prompt, **row)
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{location}: data.template names a field {name!r} that the row lacks; it has only {_list(row)}."
                f"{did_you_mean(name, row)}"
            ) from None
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"{location}: data.template cannot be filled in: {error}") from None


def system_text(row: Row, name: str) -> str:
    """The system message in a field of the row, which holds text or parts of it. Empty without one."""
    value = row.get(name)
    texts = [part.get("text") for part in value if isinstance(part, dict)] if isinstance(value, list) else [value]
    return "".join(text for text in texts if isinstance(text, str))


def fields_of_prompt(row: Row, field: str) -> list[str]:
    """The fields whose texts make the prompt, in their order: an instruction, the context, the prompt's own `field`, an
    input."""
    texts = {name for name, text in row.items() if name.lower() in PLACES and isinstance(text, str) and text.strip()}
    return sorted({*texts, field}, key=lambda name: (PLACES.get(name.lower(), 2), name))


def reason_to_skip(source: SourceConfig, location: str, error: RowLeftOut | DataError) -> str:
    """The reason for which a row is left out: of a mistake in it the kind, if the source skips such rows. Else the
    error is raised, and also says which setting skips them."""
    if isinstance(error, RowLeftOut):
        return str(error)
    if source.bad_rows == "error":
        raise extend_message(error, "data.bad_rows=skip leaves such rows out") from None
    # The kind is the error without the row's place and values.
    kind = re.split(r", not |, only |; | in ['\"]| at (?:column|byte) ", str(error).removeprefix(f"{location}: "))[0]
    return re.sub(r"\d[\d,.]*", "…", kind)


def prompt_key(task: Task) -> int:
    """A number that identifies the task's prompt, the same on every machine; spacing does not count."""
    return _key(as_messages(task.prompt))


def key_of(text: str) -> int:
    """A number that identifies `text`, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]) >> 4


def _normal(text: str) -> str:
    """`text` with single spaces between its words, and none around them."""
    if "  " not in text and text.isprintable():  # no other space is printable, and to split takes three times as long
        return text.strip()
    return " ".join(text.split())


def _key(messages: Iterable[Message]) -> int:
    lines = []
    for message in messages:
        names = [f" {image.sha256}" for image in message.images]
        lines.append(f"{message.role} {_normal(message.text)}{''.join(names)}")
    return key_of("\n".join(lines))


def _field(row: Row, names: Sequence[str], defaults: Sequence[str], role: str, location: str) -> str:
    """The name of a field: the only one in `names`, or the first of several that the row has."""
    if len(names) == 1:
        return names[0]
    for name in names or defaults:
        if name in row:
            return name
    hint = f" ({NO_ANSWER})" if role == "answer" else ""
    raise DataError(f"{location}: no {role} field; the row has {_list(row)}: name it with data.{role}=FIELD{hint}")


def _value(row: Row, name: str, location: str) -> Any:
    if name not in row:
        raise DataError(f"{location}: the row has no field {name!r}, only {_list(row)}.{did_you_mean(name, row)}")
    return row[name]


def _text_or_number(value: Any, name: str, location: str) -> str | int | float:
    if isinstance(value, list) and value and all(isinstance(item, str | int | float) for item in value):
        value = value[0] if len(value) == 1 else ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        hint = f" ({NO_ANSWER})" if value is None else ""
        raise DataError(f"{location}: field {name!r}: an answer is text or a number, not {type(value).__name__}{hint}")
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{location}: field {name!r} is empty")
    return _finite(value, name, location)


def _matched(pattern: str, value: Any, name: str, location: str) -> str:
    """The text of the group of `pattern` in an answer."""
    match = re.search(pattern, str(value))
    if match is None or not (match[1] or "").strip():
        raise DataError(f"{location}: field {name!r}: data.answer_pattern finds no answer in {value!r:.60}")
    return match[1].strip()


def _finite(value: Value, name: str, location: str) -> Value:
    """`value`, unless it is infinite or NaN, which other programs write for a missing value."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{location}: field {name!r}: an answer must be finite, not {value}")
    return value


def _difficulty(row: Row, name: str, location: str) -> float | None:
    value = _value(row, name, location)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{location}: field {name!r}: a difficulty is a finite number, not {value!r:.60}")
    return float(value)


def _list(row: Row) -> str:
    return ", ".join(row) or "no fields"
