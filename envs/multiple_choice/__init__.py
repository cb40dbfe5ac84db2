"""Questions with lettered options, in one turn: the reward is 1 if the completion chooses the right option, else 0."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase as LETTERS
from typing import Any, Literal

from envgym.env import Env, Info, Recording, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import DataError, did_you_mean, reported_as
from envgym.rewards.final_answers import boxed
from envgym.tasks.columns import ANSWER_FIELDS, PROMPT_FIELDS
from envgym.tasks.config import Names
from envgym.types import Action, Message, Task, add_instruction

Reading = Literal["box", "answer", "first"]

OPTIONS_FIELDS = ("options", "choices", "endings")
ANSWER_KEYS = ("answer_index", "answer_idx", "answerKey", "answer_key", "correct", "correct_answer")
INSTRUCTIONS: dict[Reading, str] = {
    "box": "Put the letter of the right option in \\boxed{}.",
    "answer": 'End with a line of the form "Answer: X", where X is the letter of the right option.',
    "first": "Answer with the letter of the right option.",
}
COMPLETIONS: dict[Reading, str] = {"box": r"\boxed{{{}}}", "answer": "Answer: {}", "first": "{}"}
"""The form of a demonstration, with a place for the letter or the text."""


class MultipleChoiceConfig(DataEnvConfig):
    """Settings of the questions. `data` is needed."""

    options: Names = ()
    """Field of the options: a list of texts, or a list, mapping or text with labels. Several fields: each is one
    option. Unset: the first of the usual names that a row has."""
    shuffle: bool = False
    """The order of the options is random, and the same for all members of a group."""
    read: Reading = "box"
    """The answer's place: in the last `\\boxed{}`, in a last line `Answer: C`, or first in the completion."""
    instruction: str | None = None
    """Added to every question, after the options; empty for none. Unset: one that asks for the form of `read`."""


class MultipleChoiceEnv(Env):
    """Questions with lettered options: the reward is 1 if the completion chooses the right one, else 0."""

    spec: MultipleChoice
    config: MultipleChoiceConfig
    choices: list[str]
    right: int

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        order_seed = self.rng.randrange(2**32) if seed is None else seed
        self.choices, self.right = self.spec.question(self.task, order_seed)
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, self.choices, strict=False)]
        prompt = add_instruction(self.task.prompt, "\n".join(lines))
        instruction = self.config.instruction
        return add_instruction(prompt, INSTRUCTIONS[self.config.read] if instruction is None else instruction), {}

    async def step(self, action: Action) -> StepResult:
        index = choice(action.text, self.choices, self.config.read)
        score, answer = float(index == self.right), None if index is None else LETTERS[index]
        metrics = {"answered": float(index is not None)}
        return (), score, True, False, {"score": score, "answer": answer, "metrics": metrics}


class MultipleChoice(DataEnvSpec):
    """The questions, with their options and the right one."""

    env_class = MultipleChoiceEnv
    Config = MultipleChoiceConfig
    config: MultipleChoiceConfig
    answer_required = False  # an index, a label or a text: `right_option` checks it
    field_names = (PROMPT_FIELDS, (*ANSWER_FIELDS, *ANSWER_KEYS))

    def check_task(self, task: Task) -> None:
        self.question(task, 0)

    def question(self, task: Task, seed: int) -> tuple[list[str], int]:
        """The options of a task in the order that its reset with `seed` shows, and the index of the right one.

        Raises `DataError` if it has no options, or the answer is not clearly one of them.
        """
        with reported_as(DataError, f"task {task.key}", cause=DataError):
            options, right = self._read(task)
        if not self.config.shuffle:
            return options, right
        order = random.Random(f"{task.key} {seed}").sample(range(len(options)), len(options))
        return [options[index] for index in order], order.index(right)

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The right answer in the form of `read`: its letter, or its text if the order is random, which is right
        whatever seed the reset gets. A text that would be read as something else is replaced by the letter that it has
        after a reset with `seed`."""
        options, right = self.question(task, seed)
        completion = COMPLETIONS[self.config.read].format(options[right])
        if self.config.shuffle and choice(completion, options, self.config.read) == right:
            return [completion]
        return [COMPLETIONS[self.config.read].format(LETTERS[right])]

    def recording(self, task: Task, seed: int, member: int) -> Recording:
        """The letter of the right answer: a replay resets the environment with the same seed."""
        _, right = self.question(task, seed)
        return Recording([COMPLETIONS[self.config.read].format(LETTERS[right])])

    def _read(self, task: Task) -> tuple[list[str], int]:
        """The options of a task in the order of its row, and the index of the right one."""
        fields = task.fields
        names = self.config.options or [name for name in OPTIONS_FIELDS if fields.get(name) is not None][:1]
        if not names:
            raise DataError(f"no options in {', '.join(OPTIONS_FIELDS)}: say where they are with env.options=FIELD")
        missing = [name for name in names if name not in fields]
        if len(names) > 1 and len(missing) == 1 and self._may_hold_the_answer(missing[0]):
            # The answer, which is not among a task's fields.
            return checked([fields.get(name, task.answer) for name in names]), names.index(missing[0])
        if missing:
            hint = f"the row has {', '.join(fields) or 'no others'}.{did_you_mean(missing[0], fields)}"
            raise DataError(f"no field {missing[0]!r} of env.options; {hint}")
        labels, values = labelled(fields[names[0]]) if len(names) == 1 else ([], [fields[name] for name in names])
        options = checked(values)
        return options, right_option(task.answer, labels, options)

    def _may_hold_the_answer(self, name: str) -> bool:
        """False for a field that is certainly not that of the answers."""
        data = self.config.data
        if data is None:  # tasks from elsewhere, such as saved episodes
            return True
        return any(name in (source.answer or self.field_names[1]) for source in data.resolved_sources().values())


# -- options and answers of rows -------------------------------------------------------------------------


def labelled(value: Any) -> tuple[list[str], list[Any]]:
    """The labels (none for a plain list) and the texts of options in one field: a list of texts or of mappings with
    `label` and `text`, a mapping of the lists `label` and `text` or of labels to texts, or a text `A) … B) …`.

    Raises `DataError` for anything else.
    """
    if isinstance(value, str):
        value = split_text(value)
    elif isinstance(value, Mapping) and isinstance(value.get("text"), list):
        pairs = itertools.zip_longest(value.get("label") or [], value["text"])  # a missing text is an error below
        value = [{"label": label, "text": text} for label, text in pairs]
    elif isinstance(value, Mapping):
        value = [{"label": label, "text": text} for label, text in value.items()]
    if not isinstance(value, list):
        raise DataError(f"options are a list, a mapping or a text, not {value!r:.60}")
    if value and all(isinstance(item, Mapping) for item in value):
        labels = [item["label"] for item in value if item.get("label") is not None]
        if len(labels) not in (0, len(value)):
            raise DataError(f"{len(value)} options have {len(labels)} labels")
        return [str(label).strip() for label in labels], [item.get("text") for item in value]
    return [], unmarked(value) or value


def split_text(text: str) -> list[str]:
    """The parts of `A) … B) …`, each with its mark; they may also be marked `(A)`, `A.` or `A:`. Raises `DataError`."""
    if mark := re.match(r"(\(?)A([).:])\s", text := text.strip()):
        opening, closing = map(re.escape, mark.groups())
        for gap in (r"\s+", r"\s*\n\s*"):  # marks inside an option do not begin its line
            parts = re.split(rf"{gap}(?={opening}[B-Z]{closing}\s)", text)
            if len(parts) > 1 and unmarked(parts):
                return parts
    raise DataError(f"the options {text!r:.60} are not marked A) … B) … in order; a list of them needs no marks")


def unmarked(options: Sequence[Any]) -> list[str] | None:
    """Options without their marks `A)`, `B)`, …, or None unless all have them in order."""
    marks = [re.match(rf"\(?{letter}[).:]\s*", str(option)) for letter, option in zip(LETTERS, options, strict=False)]
    texts = [mark.string[mark.end() :] for mark in marks if mark]
    return texts if len(texts) == len(options) else None


def checked(options: Sequence[Any]) -> list[str]:
    """Options as texts. Raises `DataError` unless they are 2 to 26 texts or numbers."""
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"there are {len(options)} options; a question has 2 to {len(LETTERS)}")
    for option in options:
        if isinstance(option, bool) or not isinstance(option, str | int | float) or not str(option).strip():
            raise DataError(f"an option is a text or a number, not {option!r:.60}")
    return [str(option).strip() for option in options]


def right_option(answer: Any, labels: Sequence[str], options: Sequence[str]) -> int:
    """The index of the option that a row's answer names: by index (an integer, from 0), label or text.

    Raises `DataError` if it names none or several.
    """
    if isinstance(answer, int) and not isinstance(answer, bool):
        indices = {answer} & set(range(len(options)))
        indices |= {index for index, label in enumerate(labels) if label == str(answer)}  # labels from 1: which is it?
    else:
        text = answer.strip() if isinstance(answer, str) else ""
        label = text.strip("().: ")
        if not any(map(str.isalpha, labels)):
            labels = [*labels, *LETTERS[: len(options)]]  # an answer `B` where the labels are numbers or missing
        indices = {index % len(options) for index, name in enumerate(labels) if name == label}
        indices = indices or {index for index, option in enumerate(options) if option == text}
        indices = indices or {index % len(options) for index, name in enumerate(labels) if name == label.upper()}
    if len(indices) == 1:
        return indices.pop()
    problem = f"names {len(indices)} options" if indices else "is no index from 0, label or text of an option"
    raise DataError(f"the answer {answer!r:.60} {problem}; they are {', '.join(f'{text!r:.30}' for text in options)}")


# -- reading completions ---------------------------------------------------------------------------------

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\$|\*\*|`|\\[()]")
_LABEL = re.compile(r"\(?\s?([A-Za-z])\s?\)?[.:)]?")
_LABEL_AND_TEXT = re.compile(r"\(?([A-Za-z])[.:)]+\s*(.+)")
_ANSWER = re.compile(r"[\s*_#>]*(?:(?:the|my)\s+)?(?:(?:final|correct|right)\s+)?answer[\s*_]*:(.*)", re.IGNORECASE)
_FIRST = re.compile(r"\(?([A-Z])(?=\s*\n|\s*$|[.):,])[.):,\s]*")  # a space alone may follow the article "A"
_SECOND = re.compile(r"(?:(?:or|and)\s+|[/&]\s*)?\(?([A-Z])(?=\s*(?:$|\n|[.):,/&]|(?:or|and)\b))")


def choice(text: str, options: Sequence[str], read: Reading) -> int | None:
    """The index of the option that a completion chooses, or None if it chooses none or several."""
    if read == "first":
        return first_letter(text, options)
    if read == "box":  # boxes joined by `or` are one answer, which is no option
        return chosen(boxed(text, allow_several=True) or "", options)
    line = _ANSWER.fullmatch(text.rstrip().rpartition("\n")[2])
    return chosen(line[1], options) if line else None


def first_letter(text: str, options: Sequence[str]) -> int | None:
    """The index of the capital letter that a completion begins with, or of the option whose text it is. None if the
    letter is part of a sentence, or another option follows it."""
    text = _without_markup(text).strip()
    mark = _FIRST.match(text)
    if mark is None:
        indices = with_text(text, options)
        return indices[0] if len(indices) == 1 else None
    index, tail = LETTERS.index(mark[1]), text[mark.end() :]
    texts = with_text(tail.partition("\n")[0], options)
    if texts:
        return index if index in texts else None
    second = _SECOND.match(tail)
    is_hedge = second is not None and second[1] != mark[1] and second[1] in LETTERS[: len(options)]
    return None if is_hedge or index >= len(options) else index


def chosen(text: str, options: Sequence[str]) -> int | None:
    """The index of the option that an answer is: its letter, its text, or both. None for anything else, such as two
    letters or the letter of one option with the text of another."""
    text = text.strip()
    label = _LABEL.fullmatch(plain(text))
    index = LETTERS.index(label[1].upper()) if label else len(options)
    if label and label[1].isupper() and index < len(options):
        return index
    if indices := with_text(text, options):
        return indices[0] if len(indices) == 1 else None
    if index < len(options):
        return index
    pair = _LABEL_AND_TEXT.fullmatch(plain(text))
    index = LETTERS.index(pair[1].upper()) if pair else len(options)
    return index if pair and index in with_text(pair[2], options) else None


def with_text(text: str, options: Sequence[str]) -> list[int]:
    """The indices of the options with a text: exactly, else without markup, else also without regard to case."""
    for form in (str.strip, plain, lambda text: plain(text).casefold()):
        key = form(text)  # of a period alone, nothing
        if indices := [index for index, option in enumerate(options) if key and form(option) == key]:
            return indices
    return []


def plain(text: str) -> str:
    """A text without emphasis, dollar signs, LaTeX's commands for text, line breaks and periods at its end."""
    return " ".join(_without_markup(text).split()).strip(" *_").rstrip(". ")


def _without_markup(text: str) -> str:
    for _ in range(2):  # one command in another
        text = _WRAPPER.sub(r"\1", text)
    return _MARKUP.sub("", text)
