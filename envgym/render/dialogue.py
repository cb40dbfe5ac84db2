"""One episode's conversation as tokens: observations and completions, turn by turn."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from envgym.types import Message, Observation, ToolCall, ToolSpec

from .renderer import Renderer
from .tool_calls import Reading


@dataclass(frozen=True, slots=True)
class Extension:
    """The tokens of an observation: to append to the token sequence, or with `fork` the prompt of a new sequence."""

    token_ids: list[int]
    fork: bool = False


class Dialogue(ABC):
    """One episode's conversation: `start`, then `add_policy_turn` (or `add_demonstration`) and `add_observation`
    alternately.

    `messages` is the readable conversation so far. Observations of raw text are appended without a template's marks.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.messages: list[Message] = []
        self.tools: tuple[ToolSpec, ...] = ()
        self.content = ""
        """The text of the policy's last turn before its tool calls; the whole text without calls."""
        self._last: int | None = None
        """The last token, which determines the encoding of the text after it."""
        self._call_ids: set[str] = set()

    def start(self, observation: Observation) -> list[int]:
        """Begin with the first observation. Returns its token ids, up to where the policy's turn begins."""
        self.tools = observation.tools
        escaped = replace(observation, messages=self.renderer.escape(observation.messages))
        text, token_ids = self.renderer.opening(escaped)
        self._on_begin(escaped, text)
        self._append_observation(observation, token_ids)
        return list(token_ids)

    def add_policy_turn(self, token_ids: Sequence[int]) -> Message:
        """Add the token ids of the policy's turn and return it as a message. Its calls are parsed if tools are offered;
        unreadable calls have an `error`."""
        reading = self._read(self.renderer.decode_after(self._body(token_ids))) if self.tools else Reading("")
        reading = replace(reading, calls=self._with_ids(reading.calls))
        message = self._append_turn(token_ids, reading if reading.calls else None)
        self.content = reading.content if reading.calls else message.text
        return message

    def add_demonstration(self, turn: str | Message) -> list[int]:
        """Add a recorded turn of the assistant in place of the policy's and return its token ids, with the end-of-turn
        token."""
        recorded = Message("assistant", turn) if isinstance(turn, str) else turn
        recorded = replace(recorded, tool_calls=self._with_ids(recorded.tool_calls))
        token_ids = self.renderer.encode_after(self._last, self._demonstration(*self.renderer.escape([recorded])))
        self._append_turn(token_ids, Reading(recorded.text, recorded.tool_calls))
        return token_ids

    def add_observation(self, observation: Observation) -> Extension:
        """Add the environment's observation, up to where the policy's next turn begins.

        Raises `InvalidStep` if it cannot be rendered, `TurnRefused` if the policy's completion is the reason.
        """
        self.tools = observation.tools or self.tools
        if observation.text is not None:
            extension = Extension(self.renderer.encode_after(self._last, observation.text))
            self._on_text(observation.text)
        else:
            mark = self.renderer.others_answer
            messages = [replace(message, from_others=mark or message.from_others) for message in observation.messages]
            extension = self._extend(replace(observation, messages=self.renderer.escape(messages)))
        self._append_observation(observation, extension.token_ids)
        return extension

    # -- overridden by the kinds --------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, text: str) -> Reading:
        """Parse the tool calls of a completion, given with its special tokens."""

    @abstractmethod
    def _demonstration(self, turn: Message) -> str:
        """The text of an assistant's turn, with its end-of-turn."""

    @abstractmethod
    def _on_policy_turn(self, message: Message, token_ids: Sequence[int], reading: Reading | None) -> None:
        """Called after the policy's turn; `reading` is its parsed text, if any."""

    @abstractmethod
    def _extend(self, observation: Observation) -> Extension:
        """Render new messages."""

    def _on_begin(self, observation: Observation, text: str) -> None:
        """Called at the start of the conversation with its text."""

    def _on_text(self, text: str) -> None:
        """Called after raw text was appended."""

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _append_turn(self, token_ids: Sequence[int], reading: Reading | None) -> Message:
        text = self.renderer.text(self._body(token_ids))
        message = Message("assistant", text, reading.calls if reading else ())
        self._on_policy_turn(message, token_ids, reading)
        self.messages.append(message)
        self._last = token_ids[-1] if token_ids else self._last
        return message

    def _append_observation(self, observation: Observation, token_ids: Sequence[int]) -> None:
        raw = observation.text
        messages = observation.messages if raw is None else [Message("user", raw)] if raw else []
        self.messages.extend(messages)
        self._last = token_ids[-1] if token_ids else self._last

    def _body(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A turn without its end-of-turn token."""
        return token_ids[:-1] if token_ids and self.renderer.ends_turn(token_ids[-1]) else token_ids

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls with ids that are unique in this conversation and valid in every template: nine letters or digits.
        A call with such an id keeps it."""
        result = []
        for call in calls:
            candidates = chain([call.id], (f"call{number:05d}" for number in count(len(self._call_ids))))
            call_id = next(i for i in candidates if re.fullmatch("[a-zA-Z0-9]{9}", i) and i not in self._call_ids)
            self._call_ids.add(call_id)
            result.append(replace(call, id=call_id))
        return tuple(result)
