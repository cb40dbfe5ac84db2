"""Sealed episodes: what a process that rolls out sends to one that passes them on. Tokens, messages and spans stay
bytes there until they are read, since making their objects is most of the time of receiving an episode of many turns.
"""

from __future__ import annotations

import pickle
from array import array
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .episodes import Answer, Episode, Row, Segment, Span, Turn, token_temperatures
from .images import ImageSpan
from .messages import Message, StopReason

if TYPE_CHECKING:
    from .episodes import FloatArray, IntArray

NAN = array("f", [float("nan")])


class _Tokens(NamedTuple):
    """The segments of a row with T tokens."""

    data: bytes
    """Token ids (int32), weights and log-probabilities (float32, NaN where a segment has none): T of each."""
    outline: bytes
    """Pickled: role, whether there are log-probabilities, versions and images of each segment."""
    lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    turn_ends: tuple[int, ...]
    versions: tuple[int, ...]
    images: tuple[ImageSpan, ...]
    answers: tuple[Answer, ...]


class SealedRow(Row):
    """A row whose segments are bytes. Its arrays are read from them; it is an ordinary row once its segments are
    read."""

    _tokens: _Tokens

    @classmethod
    def seal(cls, row: Row) -> SealedRow:
        parts = row.segments
        arrays: list[array[Any]] = [
            *(part.token_ids for part in parts),
            *(part.loss_weights for part in parts),
            *(NAN * len(part) if part.logprobs is None else part.logprobs for part in parts),
        ]
        outline = [(part.role, part.logprobs is not None, part.versions, part.images) for part in parts]
        sealed: SealedRow = object.__new__(cls)
        vars(sealed).update({field.name: getattr(row, field.name) for field in fields(Row) if field.name != "segments"})
        sealed._tokens = _Tokens(
            b"".join(arrays), pickle.dumps(outline, 5), tuple(map(len, parts)),
            tuple(part.temperature for part in parts), row.turn_ends, row.versions, row.images, row.answers,
        )  # fmt: skip
        return sealed

    @cached_property
    def segments(self) -> list[Segment]:  # type: ignore[override]
        tokens = self._tokens
        size = len(tokens.data) // 3
        parts = [tokens.data[start : start + size] for start in (0, size, 2 * size)]
        ids, weights, logprobs = array("i", parts[0]), array("f", parts[1]), array("f", parts[2])
        result, start = [], 0
        outline = zip(pickle.loads(tokens.outline), tokens.lengths, tokens.temperatures, strict=True)
        for (role, is_sampled, versions, images), length, temperature in outline:
            part = slice(start, start + length)
            sampled = logprobs[part] if is_sampled else None
            result.append(Segment(role, ids[part], weights[part], sampled, versions, temperature, images))
            start += length
        self.segments, self.__class__ = result, Row  # type: ignore[assignment]
        vars(self).pop("_tokens", None)
        return result

    def _array(self, number: int, dtype: str) -> Any:
        import numpy as np

        return np.frombuffer(self._tokens.data, dtype, len(self), 4 * len(self) * number).copy()

    @cached_property
    def token_ids(self) -> IntArray:
        return cast("IntArray", self._array(0, "i4"))

    @cached_property
    def loss_weights(self) -> FloatArray:
        weights = cast("FloatArray", self._array(1, "f4"))
        weights[:1] = 0.0  # as in `Row`
        return weights

    @cached_property
    def old_logprobs(self) -> FloatArray:
        return cast("FloatArray", self._array(2, "f4"))

    @cached_property
    def temperatures(self) -> FloatArray | None:
        return token_temperatures(self._tokens.temperatures, self._tokens.lengths)

    @cached_property
    def images(self) -> tuple[ImageSpan, ...]:
        return self._tokens.images

    @property
    def versions(self) -> tuple[int, ...]:
        return self._tokens.versions

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return self._tokens.turn_ends

    @property
    def answers(self) -> tuple[Answer, ...]:
        return self._tokens.answers

    @property
    def n_action_tokens(self) -> int:
        return sum([length for length, _ in self._tokens.answers])

    def __len__(self) -> int:
        return sum(self._tokens.lengths)

    def __eq__(self, value: object) -> bool:
        return bool(self.segments) and self == value  # by now an ordinary row

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "turns"}
        return _sealed_row, ([turn.reward for turn in self.turns], [turn.stop_reason for turn in self.turns], state)

    def copy_with(self, **attributes: Any) -> Row:
        row = super().copy_with(**attributes)
        if "segments" in attributes:
            row.__class__ = Row
            del vars(row)["_tokens"]
        return row

    def reset_arrays(self) -> None:
        self._drop_arrays()


def _sealed_row(rewards: list[float | None], stops: list[StopReason], state: dict[str, Any]) -> SealedRow:
    row: SealedRow = object.__new__(SealedRow)
    vars(row).update(state, turns=list(map(Turn, rewards, stops)))
    return row


class SealedEpisode(Episode):
    """An episode whose rows are sealed, and whose messages and spans are bytes until they are read."""

    _data = b""
    _messages: list[Message]
    _spans: list[Span]

    @classmethod
    def seal(cls, episode: Episode) -> SealedEpisode:
        rows = [SealedRow.seal(row) if row.segments else row for row in episode.rows]
        values = [rows if name == "rows" else getattr(episode, name) for name in LIGHT]
        return _sealed_episode(pickle.dumps((episode.messages, episode.spans), 5), *values)

    def _open(self) -> None:
        data, self._data = self._data, b""
        if data:
            self._messages, self._spans = pickle.loads(data)

    @property
    def messages(self) -> list[Message]:
        self._open()
        return self._messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._open()
        self._messages = messages

    @property
    def spans(self) -> list[Span]:
        self._open()
        return self._spans

    @spans.setter
    def spans(self, spans: list[Span]) -> None:
        self._open()
        self._spans = spans

    def __eq__(self, value: object) -> bool:
        return Episode(**{field.name: getattr(self, field.name) for field in fields(Episode)}) == value

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._data or pickle.dumps((self.messages, self.spans), 5)
        return _sealed_episode, (data, *[getattr(self, name) for name in LIGHT])


LIGHT = tuple(field.name for field in fields(Episode) if field.name not in ("messages", "spans"))
"""The fields that stay objects."""


def _sealed_episode(data: bytes, *values: Any) -> SealedEpisode:
    episode: SealedEpisode = object.__new__(SealedEpisode)
    for name, value in zip(LIGHT, values, strict=True):
        setattr(episode, name, value)
    episode._data = data
    return episode
