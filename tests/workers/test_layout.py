from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.learner import LearnRow
from envgym.types import Objective
from envgym.workers.layout import is_silent, micro_batches, pad, padded_tokens, silenced


def row(length, unit=0, weight=1.0, **arrays):
    weights = np.full(length, weight, np.float32)
    return LearnRow(
        token_ids=np.arange(length),
        weights=weights,
        old_logprobs=np.zeros(length, np.float32),
        objective=Objective.POLICY_GRADIENT,
        arrays=arrays,
        unit=unit,
        episode=unit,
    )


units = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=40)


@given(units=units, budget=st.integers(1, 400), n_ranks=st.integers(1, 4))
@settings(deadline=None)
def test_micro_batches_hold_every_row_once_in_whole_units_within_the_budget(units, budget, n_ranks):
    rows = [row(length, unit) for unit, lengths in enumerate(units) for length in lengths]
    ranks = micro_batches(rows, budget, n_ranks)
    real = [batch for share in ranks for batch in share if not is_silent(batch)]

    assert len(ranks) == n_ranks
    assert len({len(share) for share in ranks}) == 1, "every rank makes as many calls"
    assert Counter(id(r) for batch in real for r in batch) == Counter(id(r) for r in rows)
    for batch in real:
        assert Counter(r.unit for r in batch) == {u: len(units[u]) for u in {r.unit for r in batch}}
        assert padded_tokens(batch) <= budget or len({r.unit for r in batch}) == 1
    again = micro_batches(rows, budget, n_ranks)
    assert [[[id(r) for r in b] for b in s if not is_silent(b)] for s in again] == [
        [[id(r) for r in b] for b in s if not is_silent(b)] for s in ranks
    ]


def test_ranks_share_the_work_evenly_and_little_is_padded():
    lengths = np.random.default_rng(0).integers(5, 200, 512)
    rows = [row(int(length), unit) for unit, length in enumerate(lengths)]
    for n_ranks in (1, 2, 4):
        ranks = micro_batches(rows, 8192, n_ranks)
        costs = [sum(padded_tokens(batch) for batch in share) for share in ranks]
        assert max(costs) <= 1.1 * min(costs)
        assert sum(costs) <= 1.15 * lengths.sum()


def test_one_micro_batch_is_split_where_there_are_two_ranks():
    rows = [row(10, unit) for unit in range(8)]
    assert [len(share[0]) for share in micro_batches(rows, 8192, 1)] == [8]
    assert [len(share[0]) for share in micro_batches(rows, 8192, 2)] == [4, 4]


def test_too_few_units_are_filled_up_with_silent_copies_of_a_whole_unit():
    rows = [row(9, unit=1), row(7, unit=1), row(30, unit=2)]
    shares = micro_batches(rows, 40, 3)
    assert [len(share) for share in shares] == [1, 1, 1]
    [filler] = [share[0] for share in shares if is_silent(share[0])]
    assert [len(r.token_ids) for r in filler] == [9, 7]
    assert np.isnan(filler[0].old_logprobs).all()
    assert rows[0].weights.all(), "the original keeps its weights"


def test_no_rows_make_no_micro_batches():
    assert micro_batches([], 100, 2) == [[], []]


def test_silenced_rows_are_silent():
    assert is_silent(silenced([row(3)]))
    assert not is_silent([row(3, weight=0.0), row(3)])


def test_padding_is_on_the_right_and_counts_for_nothing():
    batch = pad([row(2, 4, a=np.array([1, 2], np.float32)), row(3, 5, a=np.ones(3, np.float32))], torch.device("cpu"))
    assert batch.token_ids.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch.weights.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.old_logprobs[0].isnan().tolist() == [False, False, True]
    assert batch.arrays["a"].tolist() == [[1, 2, 0], [1, 1, 1]]
    assert batch.episodes.tolist() == [4, 5]
    assert pad([row(2)], torch.device("cpu"), length=5).token_ids.shape == (1, 5)
