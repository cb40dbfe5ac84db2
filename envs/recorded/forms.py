"""Rows of recorded data as recordings: the usual forms of demonstrations, preferences and labels."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, Literal

from envgym.errors import DataError
from envgym.tasks.columns import MESSAGE_FIELDS, SYSTEM_FIELDS, fields_of_prompt, system_text
from envgym.tasks.config import SourceConfig
from envgym.tasks.images import ImageReader, show_images
from envgym.tasks.rows import Row, RowLeftOut, parse_json
from envgym.types import ImagePart, Message, as_messages
from envgym.types.conversations import THOUGHTS
from envgym.types.messages import MAX_CHARACTERS

from .flags import unlearned_parts, unread_keys, weight_of

FormName = Literal["auto", "demonstration", "preference", "labelled", "steps", "text", "episodes", "prompt"]

FIELDS: dict[str, tuple[str, ...]] = {
    "messages": MESSAGE_FIELDS,
    "prompt": ("prompt", "question", "instruction", "problem", "query", "context"),
    "input": ("input",),
    "system": SYSTEM_FIELDS,
    "history": ("history",),
    "answer": ("response", "completion", "answer", "output", "solution", "target", "chosen"),
    "chosen": ("chosen", "chosen_response", "response_chosen", "preferred", "accepted", "preferred_output", "answer"),
    "rejected": ("rejected", "rejected_response", "response_rejected", "dispreferred", "negative",
                 "non_preferred_output", "rejected_messages"),
    "margin": ("margin",),
    "label": ("label", "labels", "rating", "is_good", "kto_tag"),
    "steps": ("completions", "steps", "process"),
    "step_labels": ("labels", "step_labels", "ratings"),
    "text": ("text", "content", "document", "segments"),
    "tools": ("tools", "functions"),
    "reward": ("reward", "score"),
}  # fmt: skip
"""Usual names of fields, the most common first."""
MESSAGE_KEYS = (
    "role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", "from_others",
    "train_detail", *THOUGHTS,
)  # fmt: skip
"""Keys of a message that are read, beside the flags of what is to be learned."""
TURN = re.compile(
    r"((^|\n)[^\w\n]*|[>\]])(assistant|answer|response|model|bot|gpt|ai|a)(<\|\w+\|>|[^\w\s]+|(?=\n))\n*"
    r"|\bassistant:|\[/INST\]|<[|｜]assistant[|｜]>\n*",
    re.IGNORECASE,
)
"""Marks at which the assistant's turn begins in a text: `Assistant:`, `<|assistant|>`, `### Response:`, `[/INST]`, …"""
OF_MESSAGES = ("prompt", "answer", "chosen", "rejected", "messages", "tools", "history")
"""Fields that may hold messages, or lists, as JSON text; it must be JSON in the last three."""
NOTHING_TO_LEARN = "they say that nothing in them is to be learned"


@dataclass(frozen=True, slots=True)
class Variant:
    """One recorded answer: the assistant's turns, the messages between them, and their rewards."""

    messages: tuple[Message, ...]
    """From the first of the assistant's turns to train on to the last."""
    rewards: tuple[float | None, ...] = ()
    """One per turn of the assistant; empty: none."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row to train on: the prompt, and one or several answers, each a member of the task's group."""

    prompt: tuple[Message, ...]
    variants: tuple[Variant, ...]
    margin: float = 0.0
    tools: tuple[Mapping[str, Any], ...] = ()
    is_text: bool = False
    """True if prompt and answers are pieces of plain text, without a chat template."""
    is_steps: bool = False
    """True if the turns of an answer are pieces of one text."""


@dataclass(slots=True)
class Reader:
    """Reads rows of one form. `names` gives fields other names than the usual ones; `teach` is as in `RecordedConfig`.

    Raises `DataError`, with the row's place, for a row that cannot be trained on.
    """

    form: FormName
    names: Mapping[str, str]
    teach: Literal["all", "last"]
    separator: str
    template: str | None = None
    images: ImageReader = field(default_factory=lambda: ImageReader(SourceConfig()))
    unread: Counter[str] = field(default_factory=Counter)
    """Number of the rows, and messages, with a key that nothing reads, by the key: `source`, `message.mood`."""
    fields_read: set[str] = field(default_factory=set)
    """Fields of the current row that were read."""

    def read(self, original: Row, context: str) -> Record:
        """The record of a row. Raises `DataError` for a row of another form, `RowLeftOut` for one with nothing to
        learn."""
        row = self.parsed(original, context)
        image_field = self.images.field(row, context)
        images = self.images.images(row.pop(image_field), context) if image_field else []
        are_marks = any(name in original for name in self.images.source.images)
        row |= {name: self.images.parts(row[name], context) for name in self.fields_of_messages(row)}
        form = self.form if self.form != "auto" else self.guess(row, context)
        read: Callable[[Row, str], Record] = getattr(self, f"_{form}")
        self.fields_read = {name.partition("[")[0] for _, name, _, _ in Formatter().parse(self.template or "") if name}
        try:
            record = self._show(read(row, context), images, context, are_marks=are_marks)
            if form != "episodes":
                self._heed_flags(row, record)
            parts = (record.prompt, *(variant.messages for variant in record.variants))
            if (length := sum(len(message.text) for messages in parts for message in messages)) > MAX_CHARACTERS:
                raise DataError(f"{context}: the row has {length:,} characters, over the limit of {MAX_CHARACTERS:,}")
            return record if self.template is None else replace(record, prompt=self._fill(record.prompt, row, context))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"{context}: {error}") from None

    def parsed(self, row: Row, context: str) -> Row:
        """A new row with the messages of a row that has them as JSON text."""
        row = dict(row)
        if isinstance(row.get("input"), Mapping):  # the prompt of OpenAI's preferences
            row |= row.pop("input")
        for field_name in OF_MESSAGES:
            if isinstance(row.get(name := self._name(field_name, row)), str):
                may_be_text = field_name in OF_MESSAGES[:4]
                row[name] = parse_json(row[name], f"{context}: field {name!r}", may_be_text=may_be_text)
        return row

    def fields_of_messages(self, row: Row) -> list[str]:
        """The names of the row's fields that may hold messages."""
        names = (self._name(field, row) for field in OF_MESSAGES if field != "tools")
        return list(dict.fromkeys(name for name in names if name))

    def _show(self, record: Record, images: Sequence[ImagePart], context: str, *, are_marks: bool) -> Record:
        """The record with the images of a row's column at their places, in each of its answers' conversations."""
        if record.is_text:
            if images:
                raise DataError(f"{context}: plain text has no images: leave them out with data.images=null")
            return record
        n_prompt, variants, prompt = len(record.prompt), [], record.prompt
        for variant in record.variants or (Variant(()),):
            messages = (*record.prompt, *variant.messages)
            messages = show_images(messages, images, context, are_marks=are_marks)
            prompt = messages[:n_prompt]
            variants.append(replace(variant, messages=messages[n_prompt:]))
        return replace(record, prompt=prompt, variants=tuple(variants) if record.variants else ())

    def _heed_flags(self, row: Row, record: Record) -> None:
        """Count the keys that nothing reads. Raises `RowLeftOut` if the row, or an answer, is not to be learned."""
        self.unread.update(unread_keys(row, self.fields_read))
        for name in self.fields_read & row.keys():
            for item in row[name] if isinstance(row[name], list) else ():
                if isinstance(item, Mapping) and item.keys() & {"role", "from"}:
                    self.unread.update(f"message.{key}" for key in unread_keys(item, MESSAGE_KEYS))
        turns = [[m.weight for m in variant.messages if m.role == "assistant"] for variant in record.variants]
        if weight_of(row) == 0 or not all(any(weights) for weights in turns):
            raise RowLeftOut(NOTHING_TO_LEARN)

    def guess(self, row: Row, context: str) -> FormName:
        """Infer the form of a row from its fields."""
        if self._name("rejected", row) and (self._name("chosen", row) or self._name("messages", row)):
            return "preference"
        steps = self._name("steps", row)
        if steps and isinstance(row[steps], list) and self._name("step_labels", row):
            return "steps"
        if "outcome" in row and "messages" in row:
            return "episodes"
        prompt = self._name("messages", row) or self._name("prompt", row)
        if prompt and self._name("label", row) and self._name("answer", row):
            return "labelled"
        if prompt:
            return "demonstration"
        if self._name("text", row):
            return "text"
        raise DataError(
            f"{context}: no known form of recorded data; the row has {', '.join(row) or 'no fields'}: say which it is "
            "with env.form, and name its fields with env.fields.NAME=FIELD (see docs/training/offline_methods.md)"
        )

    # -- the forms --------------------------------------------------------------------------------------------

    def _demonstration(self, row: Row, context: str) -> Record:
        is_named = self.names.get("prompt") and self.names.get("answer") and not self.names.get("messages")
        if (name := self._name("messages", row)) and not is_named:
            messages = self._with_system(_messages(row[name], f"{context}: field {name!r}"), row)
        else:
            answer = row[self._require("answer", row, context)]
            messages = (*self._read_prompt(row, context), *_messages_of(answer, context))
        return self._split(messages, context, tools=self._tools(row, context))

    def _preference(self, row: Row, context: str) -> Record:
        """Two answers, chosen (reward 1) and rejected (0), to a prompt that may be their common beginning."""
        if not self._name("chosen", row) and (name := self._name("messages", row)):
            row = row | {"chosen": row[name][-1:], name: row[name][:-1]}  # ms-swift's: the end of the conversation
        names = [self._require(side, row, context) for side in ("chosen", "rejected")]
        chosen, rejected = (_messages_of(row[name], context) for name in names)
        prompt = self._read_prompt(row, context) if self._name("prompt", row) or self._name("messages", row) else ()
        is_text = not prompt and all(isinstance(row[name], str) for name in names)
        if is_text:
            prompt, chosen, rejected = _split_texts(chosen[0].text, rejected[0].text)
        elif not prompt:  # both begin with the prompt
            n_shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
            prompt, chosen, rejected = chosen[:n_shared], chosen[n_shared:], rejected[n_shared:]
        else:
            chosen, rejected = (s[len(prompt) :] if s[: len(prompt)] == prompt else s for s in (chosen, rejected))
        if chosen == rejected:
            raise DataError(f"{context}: the chosen answer is the rejected one: there is nothing to prefer")
        margin = row[name] if (name := self._name("margin", row)) and row[name] is not None else 0.0
        variants = tuple(
            Variant(_checked_answer(side, context), (*[None] * (_n_turns(side) - 1), reward))
            for side, reward in ((chosen, 1.0), (rejected, 0.0))
        )
        prompt = _prompt(prompt, context) if prompt else ()  # two whole texts
        return Record(prompt, variants, _number(margin, "margin", context), self._tools(row, context), is_text)

    def _labelled(self, row: Row, context: str) -> Record:
        name = self._require("label", row, context)
        label = row[name]
        if not isinstance(label, bool) and label not in (0, 1):
            raise DataError(f"{context}: field {name!r}: a label is true or false, not {_quoted(label)}")
        demonstrated = self._demonstration({key: value for key, value in row.items() if key != name}, context)
        return _with_rewards(demonstrated, float(label))

    def _steps(self, row: Row, context: str) -> Record:
        """An answer in steps, with a reward per labelled step."""
        steps, labels = (row[self._require(name, row, context)] for name in ("steps", "step_labels"))
        prompt = None
        if isinstance(steps, str):  # one text, in which the separator ends each step
            *steps, _ = steps.split(self.separator)
            if steps and not self._name("prompt", row):  # the question stands before the first
                prompt, steps[0] = (Message("user", steps[0]),), self.separator
        if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
            raise DataError(f"{context}: steps and their labels are lists of the same length")
        texts = [f"{_text(step, 'a step', context).removesuffix(self.separator)}{self.separator}" for step in steps]
        rewards = tuple(None if label is None else _step_reward(label, context) for label in labels)
        if not any(reward is not None for reward in rewards):
            raise DataError(f"{context}: no step has a label")
        answer = Variant(tuple(Message("assistant", text) for text in texts), rewards)
        return Record(_prompt(prompt or self._read_prompt(row, context), context), (answer,), is_steps=True)

    def _prompt(self, row: Row, context: str) -> Record:
        return Record(_prompt(self._read_prompt(row, context), context), ())

    def _text(self, row: Row, context: str) -> Record:
        value = row[self._require("text", row, context)]
        pieces = value if isinstance(value, list) else [{"text": value, "label": True}]  # axolotl's segments
        texts = [_text(piece["text"], "the text", context) for piece in pieces]
        ends = itertools.accumulate(map(len, texts), initial=-sum(map(len, texts)))
        unlearned = tuple(p for piece, p in zip(pieces, itertools.pairwise(ends), strict=True) if not piece["label"])
        return Record((), (Variant((Message("assistant", "".join(texts), unlearned=unlearned),)),), is_text=True)

    def _episodes(self, row: Row, context: str) -> Record:
        """An episode that envgym saved. The policy's turns count as text by others."""
        if row["outcome"]["status"] == "failed":
            raise DataError(f"{context}: the episode failed: remove it, there is nothing to train on")
        messages = _messages(row["messages"], context)
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        # A policy's turns, and the environment's answers to them.
        exchange = (replace(message, from_others=True) for message in messages[first:])
        record = self._split((*messages[:first], *exchange), context, tools=())
        return record if row.get("reward") is None else _with_rewards(record, _number(row["reward"], "reward", context))

    def _fill(self, prompt: tuple[Message, ...], row: Row, context: str) -> tuple[Message, ...]:
        """Render the last message of the prompt by the template."""
        *messages, last = prompt
        if last.images:
            raise DataError(f"{context}: env.template fills in text, and the prompt's last message has an image")
        try:
            text = str(self.template).format(last.text, **row)
        except KeyError as error:
            name = error.args[0]
            raise DataError(f"{context}: env.template names a field {name!r} that the row does not have") from None
        return (*messages, replace(Message(last.role, text), from_others=last.from_others))

    # -- shared parts -----------------------------------------------------------------------------------------

    def _split(self, messages: Sequence[Message], context: str, *, tools: tuple[Mapping[str, Any], ...]) -> Record:
        """Split a conversation before the first turn to train on: the assistant's first, or its last."""
        messages = tuple(messages)
        while messages and messages[-1].role != "assistant":  # unanswered
            messages = messages[:-1]
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise DataError(f"{context}: there is no turn of the assistant to train on")
        learned = [index for index in (turns if self.teach == "all" else turns[-1:]) if messages[index].weight]
        if not learned:
            raise RowLeftOut(NOTHING_TO_LEARN)
        start = learned[0]
        answer = Variant(_checked_answer(messages[start : learned[-1] + 1], context))
        return Record(_prompt(messages[:start], context), (answer,), tools=tools)

    def _read_prompt(self, row: Row, context: str) -> tuple[Message, ...]:
        """The prompt of a row whose answer is in another field."""
        if (name := self._name("messages", row)) and not self._name("prompt", row):
            return self._with_system(_messages(row[name], f"{context}: field {name!r}"), row)
        name = self._require("prompt", row, context)
        prompt = _messages_of(row[name], context, role="user")
        if self.names.get("prompt"):  # it is the whole prompt
            return prompt
        renamed = self._name("input", row)
        texts = row | {"input": row[renamed]} if renamed else row
        fields = fields_of_prompt(texts, name)
        if len(fields) > 1:
            self.fields_read.update(fields)
            *first, last = prompt
            place = fields.index(name)
            prefix = "".join(f"{texts[field]}\n\n" for field in fields[:place])
            suffix = "".join(f"\n\n{texts[field]}" for field in fields[place + 1 :])
            parts = [part for part in (prefix, *last.content, suffix) if part]
            prompt = (*first, Message("user", parts if last.images else prefix + last.text + suffix))
        if (history := self._name("history", row)) and isinstance(row[history], list):
            pairs = [(Message("user", query), Message("assistant", reply)) for query, reply in row[history]]
            prompt = (*itertools.chain.from_iterable(pairs), *prompt)
        return self._with_system(prompt, row)

    def _with_system(self, messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
        """The messages after the system prompt in a field of the row, unless they have one."""
        text = system_text(row, self._name("system", row))
        return (Message("system", text), *messages) if text.strip() and messages[0].role != "system" else messages

    def _tools(self, row: Row, context: str) -> tuple[Mapping[str, Any], ...]:
        """The tools in a row; empty if it has none."""
        name = self._name("tools", row)
        value = row[name] if name else None
        if value in (None, ""):
            return ()
        if isinstance(value, list):  # each may be text that holds JSON
            parsed = (parse_json(tool, f"{context}: field {name!r}") for tool in value)
            value = list(itertools.chain.from_iterable(t if isinstance(t, list) else [t] for t in parsed))
        if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
            raise DataError(f"{context}: field {name!r}: tools are a list of their descriptions")
        return tuple(value)

    def _name(self, field: str, row: Row) -> str:
        """The field's name in this row; empty if the row does not have it."""
        names = (self.names[field],) if self.names.get(field) else FIELDS[field]
        name = next((name for name in names if name in row), "")
        self.fields_read.add(name)
        return name

    def _require(self, field: str, row: Row, context: str) -> str:
        """The name of the field in the row. Raises `DataError` if the row lacks it."""
        if name := self._name(field, row):
            return name
        names = self.names.get(field) or " or ".join(FIELDS[field][:3])
        raise DataError(
            f"{context}: no field {names}; the row has {', '.join(row) or 'no fields'}: name it with "
            f"env.fields.{field}=FIELD"
        )


def _with_rewards(record: Record, reward: float) -> Record:
    """The record with a reward for its last turn."""
    (variant,) = record.variants
    rewards = (*[None] * (_n_turns(variant.messages) - 1), reward)
    return Record(record.prompt, (Variant(variant.messages, rewards),), record.margin, record.tools)


def _n_turns(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _messages(value: Any, context: str) -> tuple[Message, ...]:
    """Messages in OpenAI's form or in ShareGPT's (`from` and `value`)."""
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list) or not value:
        raise DataError(f"{context}: a conversation is a list of messages, not {value!r:.60}")
    try:
        return as_messages([_message(item) for item in value])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{context}: {error}") from None


def _message(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    role = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    return dict(item, role=role, content=content, weight=weight_of(item), unlearned=unlearned_parts(item, content))


def _split_texts(chosen: str, rejected: str) -> tuple[tuple[Message, ...], ...]:
    """Two texts as their common beginning, a prompt, and two answers.

    The beginning ends with the last mark of the assistant's turn in it, else with a line, else with a word.
    """
    shortest = min(len(chosen.rstrip()), len(rejected.rstrip())) - 1  # no answer is empty
    end = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    common = chosen[:end]
    ends = [match.end() for match in TURN.finditer(common)] or [common.rfind("\n") + 1 or common.rfind(" ")]
    end = max(0, ends[-1])
    prompt = (Message("user", common[:end]),) if common[:end].strip() else ()
    return prompt, (Message("assistant", chosen[end:]),), (Message("assistant", rejected[end:]),)


def _messages_of(value: Any, context: str, role: str = "assistant") -> tuple[Message, ...]:
    """Text as a message of `role`, or messages."""
    if isinstance(value, str):
        return (Message(role, _text(value, f"the text of the {role}", context)),)
    return _messages(value, context)


def _prompt(messages: Sequence[Message], context: str) -> tuple[Message, ...]:
    if not any(message.text.strip() or message.images for message in messages):
        raise DataError(f"{context}: the prompt is empty: there is nothing before the assistant's first turn")
    return tuple(messages)


def _checked_answer(messages: Sequence[Message], context: str) -> tuple[Message, ...]:
    """The messages. Raises `DataError` unless the first and last are the assistant's, none of its turns is empty, and
    no two follow each other."""
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        raise DataError(f"{context}: an answer begins and ends with a turn of the assistant")
    for message, next_message in itertools.pairwise(messages):
        if message.role == next_message.role == "assistant":
            raise DataError(f"{context}: two turns of the assistant follow each other")
    if any(m.role == "assistant" and not m.text.strip() and not m.tool_calls for m in messages):
        raise DataError(f"{context}: an answer is empty")
    return tuple(messages)


def _text(value: Any, subject: str, context: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{context}: {subject} is text, not {type(value).__name__}")
    if not value.strip():
        raise DataError(f"{context}: {subject} is empty")
    return value


def _number(value: Any, subject: str, context: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{context}: the {subject} is a finite number, not {_quoted(value)}")
    return float(value)


def _quoted(value: Any) -> str:
    """A rejected value, for a message; with the spelling to use, if it is the text of a label or a number."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if re.fullmatch(r"true|false|-?[\d.]+", text):
        return f"the text {value!r}: write {text} without quotation marks (CSV has only text: take JSON lines)"
    return f"{value!r:.60}"


def _step_reward(value: Any, context: str) -> float:
    """The reward in the label of a step: true or false, + or -, 1 or 0 (or -1), or a probability."""
    value = {"+": True, "-": False}.get(value, value) if isinstance(value, str) else value
    number = float(value) if isinstance(value, bool) else max(0.0, _number(value, "label", context))
    if number > 1:
        raise DataError(f"{context}: a step's label is a probability, or right or wrong, not {value!r:.60}")
    return number
