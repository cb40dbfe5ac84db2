"""A row as learners and workers see it: arrays over its tokens, which are not the record."""

import pickle
from array import array

import numpy as np
import pytest

from envgym.episodes.record import to_record
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task, Turn, VersionSpan, number_rows

NAN = np.nan


def made():
    segments = [
        Segment("prompt", [1, 2]),
        Segment("action", [3, 4], logprobs=[-0.5, -1.0], versions=(VersionSpan(7, 0, 2),), temperature=0.5),
        Segment("feedback", [5]),
        Segment("action", [6], [0.25], [-2.0], (VersionSpan(6, 0, 1),), 0.5),
    ]
    return Row(segments, turns=[Turn(None, "stop"), Turn(1.0, "length")])


def test_its_arrays_are_those_of_its_segments():
    row = made()
    assert (row.token_ids.dtype, row.token_ids.tolist()) == (np.int32, [1, 2, 3, 4, 5, 6])
    assert (row.loss_weights.dtype, row.loss_weights.tolist()) == (np.float32, [0, 0, 1, 1, 0, 0.25])
    np.testing.assert_array_equal(row.old_logprobs, np.float32([NAN, NAN, -0.5, -1, NAN, -2]))
    assert row.old_logprobs.dtype == np.float32
    assert row.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 0.5]
    assert (row.versions, row.n_action_tokens, len(row)) == ((6, 7), 3, 6)
    assert Row([Segment("action", [8, 9])]).loss_weights.tolist() == [0, 1]  # nothing predicts the first token


def test_a_learner_changes_no_record():
    """The episode may be in writing while its rows are trained on."""
    row = made()
    episode = Episode("e", Task("t"), Outcome.finish(), [row])
    record = to_record(episode)
    row.loss_weights[:] = 0
    row.old_logprobs[:] = 0
    row.arrays["advantages"] = np.ones(6, np.float32)
    trained = row.copy_with(objective=Objective.LABEL, microbatch_key=3)
    trained.drop_sampling_info()
    assert to_record(episode) == record
    assert (row.objective, trained.objective) == (Objective.POLICY_GRADIENT, Objective.LABEL)
    assert trained.arrays is row.arrays
    assert (trained.loss_weights.any(), trained.temperatures) == (False, None)
    assert row.temperatures is not None


def test_a_shorter_row_has_shorter_arrays():
    row = made()
    assert len(row.token_ids) == 6
    row.truncate(3)
    assert (row.token_ids.tolist(), len(row), len(row.turns)) == ([1, 2, 3], 3, 1)


def test_arrays_that_were_read_during_the_episode_are_made_again_for_training():
    row = Row([Segment("prompt", [1, 2])])
    assert (row.token_ids.tolist(), row.loss_weights.tolist()) == ([1, 2], [0, 0])
    row.segments.append(Segment("action", [3]))
    number_rows([Group("g", Task("t"), [Episode("e", Task("t"), Outcome.finish(), [row])])])
    assert (row.token_ids.tolist(), row.loss_weights.tolist()) == ([1, 2, 3], [0, 0, 1])


def test_a_worker_gets_the_arrays_alone():
    row = made()
    row.first_outputs = np.ones(6, np.float32)
    sent = pickle.loads(pickle.dumps(row.without_record(arrays={})))
    assert (sent.segments, sent.turns, sent.first_outputs, len(sent)) == ([], [], None, 6)
    assert sent.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sent.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 0.5]
    assert len(row.segments) == 4
    assert row.first_outputs is not None


def test_episodes_and_groups_of_a_step_are_numbered():
    """All rows of an episode share a micro-batch."""
    episodes = [Episode("e", Task("t"), Outcome.finish(), [made() for _ in range(n)]) for n in (2, 0, 1)]
    number_rows([Group("a", Task("t"), episodes[:2]), Group("b", Task("t"), episodes[2:])])
    rows = [row for episode in episodes for row in episode.rows]
    assert [row.episode_index for row in rows] == [row.microbatch_key for row in rows] == [0, 0, 2]
    assert [row.group_index for row in rows] == [0, 0, 1]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_segment_takes_any_numbers(kind):
    segment = Segment("action", kind([1, 2]), logprobs=kind([-1.0, -2.0]))
    assert (segment.token_ids, segment.logprobs) == (array("i", [1, 2]), array("f", [-1, -2]))
