"""Rows of recorded data as recordings: the forms that people keep demonstrations, preferences and labels in."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from envgym.env.checked import MOST_CHARACTERS
from envgym.errors import DataError
from envgym.tasks.rows import Row
from envgym.types import Message, as_messages

FormName = Literal["auto", "demonstration", "preference", "labelled", "steps", "text", "episodes", "prompt"]

FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialogue"),
    "prompt": ("prompt", "question", "instruction", "problem", "query", "context"),
    "input": ("input",),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "answer": ("response", "completion", "answer", "output", "solution", "target", "chosen"),
    "chosen": ("chosen", "chosen_response", "response_chosen", "preferred", "accepted"),
    "rejected": ("rejected", "rejected_response", "response_rejected", "dispreferred", "negative"),
    "margin": ("margin",),
    "label": ("label", "labels", "rating", "is_good"),
    "steps": ("completions", "steps", "process"),
    "step_labels": ("labels", "step_labels", "ratings"),
    "text": ("text", "content", "document"),
    "tools": ("tools",),
    "reward": ("reward", "score"),
}
"""Usual names of fields, the likeliest first."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant",
         "function_response": "tool", "observation": "tool"}  # fmt: skip
"""Roles by the names that ShareGPT and others have for them."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One recorded answer: the assistant's turns with what stands between them, and what the answer is worth."""

    messages: tuple[Message, ...]
    """From the assistant's first turn that is taught to its last."""
    rewards: tuple[float | None, ...] = ()
    """One for each of the assistant's turns; empty: none."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row as it is taught: what is asked, and one or several answers, each a member of the task's group."""

    prompt: tuple[Message, ...]
    variants: tuple[Variant, ...]
    margin: float = 0.0
    tools: tuple[Mapping[str, Any], ...] = ()
    is_text: bool = False
    """The only answer is plain text, taught whole."""
    is_steps: bool = False
    """The turns of an answer are pieces of one text."""


@dataclass(slots=True)
class Reader:
    """Reads rows of one form. `names` gives fields other names than the usual ones; `teach` is as in `RecordedConfig`.

    Raises `DataError` with the row's place for one that cannot be taught.
    """

    form: FormName
    names: Mapping[str, str]
    teach: Literal["all", "last"]
    separator: str
    template: str | None = None

    def read(self, row: Row, where: str) -> Record:
        form = self.form if self.form != "auto" else self.guess(row, where)
        read: Callable[[Row, str], Record] = getattr(self, f"_{form}")
        try:
            record = read(row, where)
            parts = (record.prompt, *(variant.messages for variant in record.variants))
            if (length := sum(len(message.text) for messages in parts for message in messages)) > MOST_CHARACTERS:
                raise DataError(f"{where}: the row has {length:,} characters, more than the {MOST_CHARACTERS:,} it may")
            return record if self.template is None else replace(record, prompt=self._filled(record.prompt, row, where))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"{where}: {error}") from None

    def guess(self, row: Row, where: str) -> FormName:
        """The form that a row has, by its fields."""
        if self._name("chosen", row) and self._name("rejected", row):
            return "preference"
        if (
            self._name("steps", row)
            and isinstance(row[self._name("steps", row)], list)
            and self._name("step_labels", row)
        ):
            return "steps"
        if "outcome" in row and "messages" in row:
            return "episodes"
        asks = self._name("messages", row) or self._name("prompt", row)
        if asks and self._name("label", row) and self._name("answer", row):
            return "labelled"
        if asks:
            return "demonstration"
        if self._name("text", row):
            return "text"
        raise DataError(
            f"{where}: no known form of recorded data; the row has {', '.join(row) or 'no fields'}: say which it is "
            "with env.form, and name its fields with env.fields.NAME=FIELD (see docs/recorded.md)"
        )

    # -- the forms --------------------------------------------------------------------------------------------

    def _demonstration(self, row: Row, where: str) -> Record:
        if name := self._name("messages", row):
            messages = _messages(row[name], where)
        else:
            messages = (*self._asked(row, where), *_messages_of(row[self._needed("answer", row, where)], where))
        return self._taught(messages, where, tools=self._tools(row, where))

    def _preference(self, row: Row, where: str) -> Record:
        chosen, rejected = (_messages_of(row[self._needed(side, row, where)], where) for side in ("chosen", "rejected"))
        prompt = self._asked(row, where) if self._name("prompt", row) or self._name("messages", row) else ()
        if not prompt:  # the two begin with what was asked
            same = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        elif chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if chosen == rejected:
            raise DataError(f"{where}: the chosen answer is the rejected one: there is nothing to prefer")
        margin = row[name] if (name := self._name("margin", row)) else 0.0
        variants = tuple(
            Variant(_ends_with_answer(side, where), (*[None] * (_n_turns(side) - 1), reward))
            for side, reward in ((chosen, 1.0), (rejected, 0.0))
        )
        return Record(_prompt(prompt, where), variants, _number(margin, "margin", where), self._tools(row, where))

    def _labelled(self, row: Row, where: str) -> Record:
        name = self._needed("label", row, where)
        label = row[name]
        if not isinstance(label, bool) and label not in (0, 1):
            raise DataError(f"{where}: field {name!r}: a label is true or false, not {_shown(label)}")
        demonstrated = self._demonstration({key: value for key, value in row.items() if key != name}, where)
        return _with_rewards(demonstrated, float(label))

    def _steps(self, row: Row, where: str) -> Record:
        steps, labels = (row[self._needed(name, row, where)] for name in ("steps", "step_labels"))
        asked = None
        if isinstance(steps, str):  # one text, in which the separator ends each step
            *steps, _ = steps.split(self.separator)
            if steps and not self._name("prompt", row):  # the question stands before the first
                asked, steps[0] = (Message.of("user", steps[0]),), self.separator
        if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
            raise DataError(f"{where}: steps and their labels are lists of the same length")
        texts = [f"{_text(step, 'a step', where).removesuffix(self.separator)}{self.separator}" for step in steps]
        rewards = tuple(None if label is None else _share(label, where) for label in labels)
        if not any(reward is not None for reward in rewards):
            raise DataError(f"{where}: no step has a label")
        answer = Variant(tuple(Message.of("assistant", text) for text in texts), rewards)
        return Record(_prompt(asked or self._asked(row, where), where), (answer,), is_steps=True)

    def _prompt(self, row: Row, where: str) -> Record:
        return Record(_prompt(self._asked(row, where), where), ())

    def _text(self, row: Row, where: str) -> Record:
        text = _text(row[self._needed("text", row, where)], "the text", where)
        return Record((), (Variant((Message.of("assistant", text),)),), is_text=True)

    def _episodes(self, row: Row, where: str) -> Record:
        if row["outcome"]["status"] == "failed":
            raise DataError(f"{where}: the episode failed: leave it out, there is nothing to learn from")
        messages = _messages(row["messages"], where)
        first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
        theirs = (replace(message, from_others=True) for message in messages[first:])  # a policy's, and what answers it
        record = self._taught((*messages[:first], *theirs), where, tools=())
        return record if row.get("reward") is None else _with_rewards(record, _number(row["reward"], "reward", where))

    def _filled(self, prompt: tuple[Message, ...], row: Row, where: str) -> tuple[Message, ...]:
        """The prompt with its last message as the template makes it."""
        *before, last = prompt
        try:
            text = str(self.template).format(last.text, **row)
        except KeyError as error:
            name = error.args[0]
            raise DataError(f"{where}: env.template names a field {name!r} that the row has not") from None
        return (*before, replace(Message.of(last.role, text), from_others=last.from_others))

    # -- what they share ---------------------------------------------------------------------------------------

    def _taught(self, messages: Sequence[Message], where: str, *, tools: tuple[Mapping[str, Any], ...]) -> Record:
        """A conversation cut where teaching begins: at the assistant's first turn, or at its last."""
        messages = tuple(messages)
        while messages and messages[-1].role != "assistant":  # nobody answered it
            messages = messages[:-1]
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise DataError(f"{where}: there is no turn of the assistant to teach")
        start = turns[0] if self.teach == "all" else turns[-1]
        return Record(
            _prompt(messages[:start], where), (Variant(_ends_with_answer(messages[start:], where)),), tools=tools
        )

    def _asked(self, row: Row, where: str) -> tuple[Message, ...]:
        """The prompt of a row that has it apart from the answer."""
        if (name := self._name("messages", row)) and not self._name("prompt", row):
            return _messages(row[name], where)
        name = self._needed("prompt", row, where)
        asked = _messages_of(row[name], where, role="user")
        if (extra := self._name("input", row)) and isinstance(row[extra], str) and row[extra].strip():  # Alpaca
            asked = (Message.of("user", f"{asked[-1].text}\n\n{row[extra]}"),)
        if (history := self._name("history", row)) and isinstance(row[history], list):
            before = [(Message.of("user", one), Message.of("assistant", two)) for one, two in row[history]]
            asked = (*(message for pair in before for message in pair), *asked)
        if (system := self._name("system", row)) and isinstance(row[system], str) and row[system]:
            asked = (Message.of("system", row[system]), *asked)
        return asked

    def _tools(self, row: Row, where: str) -> tuple[Mapping[str, Any], ...]:
        name = self._name("tools", row)
        value = row[name] if name else None
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
            raise DataError(f"{where}: field {name!r}: tools are a list of their descriptions")
        return tuple(value)

    def _name(self, of: str, row: Row) -> str:
        """The field's name in this row; empty where it has none."""
        if own := self.names.get(of):
            return own if own in row else ""
        return next((name for name in FIELDS[of] if name in row), "")

    def _needed(self, of: str, row: Row, where: str) -> str:
        if name := self._name(of, row):
            return name
        known = self.names.get(of) or " or ".join(FIELDS[of][:3])
        raise DataError(
            f"{where}: no field {known}; the row has {', '.join(row) or 'no fields'}: name it with "
            f"env.fields.{of}=FIELD"
        )


def _with_rewards(record: Record, reward: float) -> Record:
    """The same with a reward for the last turn."""
    (variant,) = record.variants
    rewards = (*[None] * (_n_turns(variant.messages) - 1), reward)
    return Record(record.prompt, (Variant(variant.messages, rewards),), record.margin, record.tools)


def _n_turns(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    """Messages in OpenAI's form or in ShareGPT's (`from` and `value`)."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: a conversation is a list of messages, not {value!r:.60}")
    return as_messages([_message(item) for item in value])


def _message(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    role = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    return {**item, "role": ROLES.get(str(role), role), "content": content}


def _messages_of(value: Any, where: str, role: str = "assistant") -> tuple[Message, ...]:
    """Text that `role` says, or messages as they are."""
    if isinstance(value, str):
        return (Message.of(role, _text(value, f"what the {role} says", where)),)
    return _messages(value, where)


def _prompt(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    if not any(message.text.strip() for message in messages):
        raise DataError(f"{where}: nothing is asked: there is no text before the assistant's first turn")
    return tuple(messages)


def _ends_with_answer(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Messages whose first and last are the assistant's, and whose turns all say something."""
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        raise DataError(f"{where}: an answer begins and ends with a turn of the assistant")
    for before, after in itertools.pairwise(messages):
        if before.role == after.role == "assistant":
            raise DataError(f"{where}: two turns of the assistant follow each other")
    if any(m.role == "assistant" and not m.text.strip() and not m.tool_calls for m in messages):
        raise DataError(f"{where}: an answer is empty")
    return tuple(messages)


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is text, not {type(value).__name__}")
    if not value.strip():
        raise DataError(f"{where}: {what} is empty")
    return value


def _number(value: Any, what: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: the {what} is a finite number, not {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    """A value that a message refuses; where it is text that spells a label or a number, what to write for it."""
    spelled = value.strip().lower() if isinstance(value, str) else ""
    if re.fullmatch(r"true|false|-?[\d.]+", spelled):
        return f"the text {value!r}: write {spelled} without quotation marks (CSV has only text: take JSON lines)"
    return f"{value!r:.60}"


def _share(value: Any, where: str) -> float:
    """A label of a step: right or wrong, + or -, 1 or 0 (-1 for some), or a probability between."""
    value = {"+": True, "-": False}.get(value, value) if isinstance(value, str) else value
    number = float(value) if isinstance(value, bool) else max(0.0, _number(value, "label", where))
    if number > 1:
        raise DataError(f"{where}: a step's label is a probability, or right or wrong, not {value!r:.60}")
    return number
