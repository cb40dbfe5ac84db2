"""Sealed episodes: what a process that rolls out sends to one that passes them on. Tokens, turns, messages and spans
stay bytes there until they are read, since making their objects is most of the time of receiving an episode of many
turns.
"""

from __future__ import annotations

import pickle
from array import array
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .episodes import NO_OUTPUTS, Answer, Episode, Row, Segment, Span, Turn, token_temperatures
from .images import ImageSpan
from .messages import Message

if TYPE_CHECKING:
    from .episodes import FloatArray, IntArray

ONE, ZERO = (array("f", [number]).tobytes() for number in (1, 0))


class _Tokens(NamedTuple):
    """The S segments of a row with T tokens."""

    data: bytes | memoryview
    """Token ids (int32) [T]; their weights (float32) [T], if `has_weights`; log-probabilities (float32) of the segments
    that have some."""
    layout: bytes
    """int32 [3, S]: the length of each segment, whether it is an action, and whether it has log-probabilities."""
    size: int
    has_weights: bool
    """False if all tokens have the weights that a segment has by default."""
    n_action_tokens: int
    turn_counts: tuple[int, int]
    is_neutral: bool
    """True if all temperatures are 1."""
    versions: tuple[int, ...]
    images: tuple[ImageSpan, ...]


_Outline = tuple[list[tuple[Any, ...]], list[float], tuple[int, ...], tuple[Answer, ...], list[Turn]]
"""Role, versions and images of each segment; their temperatures; the ends, answers and values of the turns."""
SEALED = ("_tokens", "_record", "_outline")
"""The attributes of a row that is still sealed."""
NO_SEGMENTS = pickle.dumps(([], [], (), (), []), 5)


class SealedRow(Row):
    """A row whose segments are bytes. Its arrays are read from them; it is an ordinary row once its segments are
    read."""

    _tokens: _Tokens
    _record: bytes
    """The pickled `_Outline`."""

    @classmethod
    def seal(cls, row: Row) -> SealedRow:
        parts = row.segments
        lengths, acts = [len(part) for part in parts], [part.role == "action" for part in parts]
        weights = b"".join([part.loss_weights for part in parts])
        default = b"".join([(ONE if is_action else ZERO) * n for n, is_action in zip(lengths, acts, strict=True)])
        has_weights = weights != default
        data: list[Any] = [part.token_ids for part in parts]
        data += [weights] if has_weights else []
        data += [part.logprobs for part in parts if part.logprobs is not None]
        layout = array("i", [*lengths, *acts, *(part.logprobs is not None for part in parts)])
        segments = [(part.role, part.versions, part.images) for part in parts]
        temperatures = [part.temperature for part in parts]
        outline: _Outline = segments, temperatures, row.turn_ends, row.answers, row.turns
        is_neutral = all(temperature == 1 for temperature in temperatures)
        values = [(field, getattr(row, field.name)) for field in fields(Row) if field.name not in ("segments", "turns")]
        return _sealed_row(
            {field.name: value for field, value in values if value is not field.default},
            pickle.dumps(outline, 5), b"".join(data), layout.tobytes(), len(row), has_weights, row.n_action_tokens,
            row.turn_counts, is_neutral, row.versions, row.images,
        )  # fmt: skip

    @cached_property
    def _outline(self) -> _Outline:
        return cast(_Outline, pickle.loads(self._record))

    @cached_property
    def segments(self) -> list[Segment]:  # type: ignore[override]
        records, temperatures, *_ = self._outline
        if not records:  # a row without a record
            return []
        lengths, _, are_sampled = self._layout.tolist()
        data, size = bytes(self._tokens.data), 4 * self._tokens.size
        ids, weights, logprobs = array("i", data[:size]), array("f"), array("f", data[size:])
        if self._tokens.has_weights:
            weights, logprobs = logprobs[: len(ids)], logprobs[len(ids) :]
        result, start, n_sampled = list[Segment](), 0, 0
        for (role, versions, images), temperature, length, is_sampled in zip(
            records, temperatures, lengths, are_sampled, strict=True
        ):
            part, sampled = slice(start, start + length), None
            if is_sampled:
                sampled = logprobs[n_sampled : n_sampled + length]
                n_sampled += length
            result.append(Segment(role, ids[part], weights[part], sampled, versions, temperature, images))
            start += length
        _ = self.turns
        self._open(result)
        return result

    def _open(self, segments: list[Segment]) -> None:
        vars(self).update(segments=segments)
        self.__class__ = Row  # type: ignore[assignment]
        for name in SEALED:
            vars(self).pop(name, None)

    @cached_property
    def turns(self) -> list[Turn]:  # type: ignore[override]
        return self._outline[4]

    @property
    def turn_counts(self) -> tuple[int, int]:
        return super().turn_counts if "turns" in vars(self) else self._tokens.turn_counts

    @property
    def _layout(self) -> IntArray:
        import numpy as np

        return np.frombuffer(self._tokens.layout, np.int32).reshape(3, -1)

    @cached_property
    def token_ids(self) -> IntArray:
        import numpy as np

        return np.frombuffer(self._tokens.data, np.int32, self._tokens.size).copy()

    @cached_property
    def loss_weights(self) -> FloatArray:
        import numpy as np

        if self._tokens.has_weights:
            weights = np.frombuffer(self._tokens.data, np.float32, self._tokens.size, 4 * self._tokens.size).copy()
        else:
            lengths, acts, _ = self._layout
            weights = acts.astype(np.float32).repeat(lengths)
        weights[:1] = 0.0  # as in `Row`
        return weights

    @cached_property
    def old_logprobs(self) -> FloatArray:
        import numpy as np

        lengths, _, are_sampled = self._layout
        result = np.full(self._tokens.size, np.nan, np.float32)
        offset = 4 * self._tokens.size * (1 + self._tokens.has_weights)
        result[are_sampled.repeat(lengths) > 0] = np.frombuffer(self._tokens.data, np.float32, offset=offset)
        return result

    @cached_property
    def temperatures(self) -> FloatArray | None:
        return None if self._tokens.is_neutral else token_temperatures(self._outline[1], self._layout[0])

    @cached_property
    def images(self) -> tuple[ImageSpan, ...]:
        return self._tokens.images

    @property
    def versions(self) -> tuple[int, ...]:
        return self._tokens.versions

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return self._outline[2]

    @property
    def answers(self) -> tuple[Answer, ...]:
        return self._outline[3]

    @property
    def n_action_tokens(self) -> int:
        return self._tokens.n_action_tokens

    def __len__(self) -> int:
        return self._tokens.size

    def __eq__(self, value: object) -> bool:
        return bool(self.segments) and self == value  # by now an ordinary row

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name not in SEALED}
        data, *tokens = self._tokens
        return _sealed_row, (state, self._record, pickle.PickleBuffer(data) if protocol >= 5 else bytes(data), *tokens)

    def copy_with(self, **attributes: Any) -> Row:
        _ = self.turns if "segments" in attributes else ()
        row = super().copy_with(**attributes)
        if "segments" in attributes:
            cast(SealedRow, row)._open(row.segments)
        return row

    def without_record(self, **attributes: Any) -> Row:
        """Its arrays stay bytes, unless they were read."""
        _ = self.temperatures  # they are part of the record
        row = self.copy_with(_record=NO_SEGMENTS, turns=[], **NO_OUTPUTS, **attributes)
        vars(row).pop("_outline", None)
        return row

    def reset_arrays(self) -> None:
        self._drop_arrays()


def _sealed_row(state: dict[str, Any], record: bytes, *tokens: Any) -> SealedRow:
    row: SealedRow = object.__new__(SealedRow)
    vars(row).update(state, _record=record, _tokens=_Tokens._make(tokens))
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
        return _sealed_episode, (data, *_light_values(self))


LIGHT = tuple(field.name for field in fields(Episode) if field.name not in ("messages", "spans"))
"""The fields that stay objects."""
_light_values = attrgetter(*LIGHT)


def _sealed_episode(data: bytes, *values: Any) -> SealedEpisode:
    episode: SealedEpisode = object.__new__(SealedEpisode)
    for name, value in zip(LIGHT, values, strict=True):
        setattr(episode, name, value)
    episode._data = data
    return episode
