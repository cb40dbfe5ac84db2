"""Episodes that were sent as bytes: equal to what they were, and read only where it is needed."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest

from envgym.episodes.record import from_record, to_record
from envgym.monitoring.metrics import failure_bias, rollout_metrics
from envgym.processes.child import message_parts
from envgym.types import (
    Episode,
    Group,
    ImageSpan,
    Message,
    Objective,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    number_rows,
)
from envgym.types.sealed import SealedEpisode, SealedRow

ARRAYS = ("token_ids", "loss_weights", "old_logprobs", "temperatures")


def episode_of(member=0, **fields):
    rows = [
        Row(
            [
                Segment("prompt", [1, 2, 3], [0.5, 0.0, 0.0], images=(ImageSpan("a" * 64, 1, 2),)),
                Segment("action", [4, 5], [], [-0.5, -1.5], (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), 0.7),
                Segment("feedback", [6]),
                Segment("action", [7], [2.0], [float("nan")], (VersionSpan(4, 0, 1),)),
                Segment("action", [], [], []),
            ],
            turns=[Turn(None, StopReason.STOP), Turn(0.25, StopReason.LENGTH), Turn(0.5, StopReason.STOP)],
        ),
        Row(
            [Segment("prompt", [8]), Segment("action", [9, 10])],
            Objective.CROSS_ENTROPY,
            [Turn(0.25, StopReason.STOP)],
        ),
        Row(
            [
                Segment("prompt", [11, 12]),
                Segment("action", [13, 14], [], [-0.25, -0.75]),
                Segment("feedback", [15]),
                Segment("action", [16], [], [-2.0]),
            ],
            turns=[Turn(0.0, StopReason.STOP), Turn(0.0, StopReason.STOP)],
        ),
    ]
    messages = [Message("user", "?"), Message("assistant", "four <|im_end|>")]
    settings = {"reward": 1.0, "score": 1.0, "metrics": {"x": 2.0}, "fingerprints": {"task": "f"}}
    settings |= {"spans": [("waiting", 1.0, 2.0), ("generating", 2.0, 3.0)], "group_id": "g", "member": member}
    return Episode(
        f"e{member}", Task("t", "?", "4"), Outcome.finish(), rows, messages=messages, **{**settings, **fields}
    )


def sent(episode):
    """The episode as another process gets it."""
    first, *buffers = message_parts(SealedEpisode.seal(copy.deepcopy(episode)))
    assert len(buffers) == len(episode.rows), "tokens are not copied into the message"
    received = pickle.loads(first, buffers=buffers)
    assert type(received) is SealedEpisode
    assert {type(row) for row in received.rows} == {SealedRow}
    return received


def is_sealed(episode):
    return bool(episode._data) and all(type(row) is SealedRow for row in episode.rows)


def test_weights_are_sent_only_where_they_are_no_defaults():
    sizes = [len(row._tokens.data) for row in sent(episode_of()).rows]
    assert sizes == [4 * (7 + 7 + 3), 4 * 3, 4 * (6 + 3)]


def test_a_sealed_episode_is_the_episode():
    episode = episode_of()
    received = sent(episode)
    assert str(to_record(received)) == str(to_record(episode))  # as text: it has a NaN
    assert received.spans == episode.spans
    assert {type(row) for row in received.rows} == {Row}
    assert str(to_record(copy.deepcopy(sent(episode)))) == str(to_record(episode))
    again = sent(received)
    assert str(to_record(again)) == str(to_record(episode))
    assert str(to_record(dataclasses.replace(sent(episode), id="e0"))) == str(to_record(episode))

    plain = from_record(to_record(episode_of()))
    plain.rows[0].segments[3].logprobs[0] = -1.0
    assert sent(plain) == plain
    assert plain == sent(plain)
    assert sent(plain).rows[0] == sent(plain).rows[0]
    other = copy.deepcopy(plain)
    other.messages[0] = Message("user", "!")
    assert sent(other) != plain
    other = copy.deepcopy(plain)
    other.rows[0].segments[0].token_ids[0] = 9
    assert other.rows[0] != sent(plain).rows[0]


def test_what_a_controller_reads_opens_nothing():
    episodes = [episode_of(member) for member in range(2)]
    episodes[1].outcome, episodes[1].reward = Outcome.fail("environment", "broken"), None
    received = [sent(episode) for episode in episodes]
    spells = re.compile("im_end").search
    expected, received[0].n_spelled, received[1].n_spelled = rollout_metrics([group(episodes)], spells=spells), 1, 1
    assert rollout_metrics([group(received)], spells=spells) == pytest.approx(expected, nan_ok=True)
    assert expected["answers/special_tokens"] == 1
    assert failure_bias([group(received)]) == pytest.approx(failure_bias([group(episodes)]), nan_ok=True)
    number_rows([group(received)])
    for a, b in zip(received[0].rows, episodes[0].rows, strict=True):
        for name in ARRAYS:
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None and y is None) or (x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True)), name
        light = ("versions", "images", "turn_ends", "n_action_tokens", "objective", "turns")
        assert [getattr(a, name) for name in light] == [getattr(b, name) for name in light]
        assert len(a) == len(b)
    assert episodes[0].rows[0].turn_ends == (5, 7, 7)
    assert all(map(is_sealed, received))


def group(episodes):
    return Group("g", episodes[0].task, episodes)


def test_a_learner_changes_arrays_and_not_the_record():
    expected = to_record(episode_of())["rows"]
    episode = sent(episode_of())
    row = episode.rows[0]
    row.loss_weights[:] = 0
    row.arrays["advantages"] = np.ones(len(row), np.float32)
    learned = row.copy_with(objective=Objective.CROSS_ENTROPY)
    part = row.without_record()
    assert (type(learned), type(part), part.segments, part.turn_ends) == (SealedRow, SealedRow, [], ())
    assert part.arrays["advantages"].sum() == len(part) == 7
    assert part.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not pickle.loads(pickle.dumps(part)).loss_weights.any()
    assert not pickle.loads(pickle.dumps(row)).loss_weights.any()
    assert str(to_record(pickle.loads(pickle.dumps(episode)))["rows"]) == str(expected)
    number_rows([group([episode])])
    assert row.loss_weights.tolist() == [0, 0, 0, 1, 1, 0, 2]
    assert str(to_record(episode)["rows"]) == str(expected)
    assert str(learned.segments) == str(row.segments)
    assert learned.objective is not row.objective


def test_a_sealed_episode_can_be_changed():
    episode = sent(episode_of())
    episode.messages = [Message("user", "again")]
    episode.spans.append(("score", 3.0, 4.0))
    episode.rows[0].truncate(4)
    episode.rows[1].turns[0].reward = 0.5
    received = pickle.loads(pickle.dumps(episode))
    assert received.messages == [Message("user", "again")]
    assert received.spans[-1] == ("score", 3.0, 4.0)
    assert received.rows[0].token_ids.tolist() == [1, 2, 3, 4]
    assert received.rows[1].turns == [Turn(0.5, StopReason.STOP)]
