from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.learner import pad
from envgym.types import Objective, Row
from envgym.workers.micro_batches import cost, is_padding, micro_batches, padding_samples


def row(length, unit=0, weight=1.0, **arrays):
    weights = np.full(length, weight, np.float32)
    return Row.from_arrays(
        token_ids=np.arange(length),
        loss_weights=weights,
        old_logprobs=np.zeros(length, np.float32),
        objective=Objective.POLICY_GRADIENT,
        arrays=arrays,
        microbatch_key=unit,
        episode_index=unit,
    )


def rows_of(units):
    return [row(length, unit) for unit, lengths in enumerate(units) for length in lengths]


layouts = st.sampled_from(["padded", "packed", "shared"])
units = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=40)


@given(units=units, budget=st.integers(1, 400), n_ranks=st.integers(1, 4), layout=layouts)
@settings(deadline=None)
def test_micro_batches_hold_every_row_once_in_whole_units_within_the_budget(units, budget, n_ranks, layout):
    rows = rows_of(units)
    ranks = micro_batches(rows, budget, n_ranks, layout=layout)
    filled = [batch for share in ranks for batch in share if not is_padding(batch)]

    assert len(ranks) == n_ranks
    assert len({len(share) for share in ranks}) == 1, "every rank makes as many calls"
    assert Counter(id(r) for batch in filled for r in batch) == Counter(id(r) for r in rows)
    for batch in filled:
        assert Counter(r.microbatch_key for r in batch) == {u: len(units[u]) for u in {r.microbatch_key for r in batch}}
        assert (
            cost(batch, layout=layout) <= budget
            or len({r.microbatch_key for r in batch}) == 1
            or max_unit(units, layout) > budget
        )
    repeated = micro_batches(rows, budget, n_ranks, layout=layout)
    assert [[[id(r) for r in b] for b in s if not is_padding(b)] for s in repeated] == [
        [[id(r) for r in b] for b in s if not is_padding(b)] for s in ranks
    ]


@st.composite
def lognormal_units(draw):
    """What sampling gives: log-normal lengths, in rows of their own, pairs or groups."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1, 2, 8]))
    lengths = rng.lognormal(np.log(100), draw(st.floats(0.1, 1.5)), (draw(st.integers(1, 100)), size))
    return lengths.clip(1, 4000).astype(int).tolist()


@given(
    units=lognormal_units(),
    budget=st.integers(100, 8192),
    n_ranks=st.sampled_from([1, 2, 3, 8]),
    layout=st.sampled_from(["padded", "packed"]),
)
@settings(deadline=None)
def test_the_fullest_micro_batch_costs_little_more_than_the_mean_or_what_cannot_be_divided(
    units, budget, n_ranks, layout
):
    ranks = micro_batches(rows_of(units), budget, n_ranks, layout=layout)
    costs = [cost(batch, layout=layout) for share in ranks for batch in share]
    assert max(costs) <= 1.05 * max(np.mean(costs), max_unit(units, layout))


def max_unit(units, layout):
    costs = {"padded": lambda unit: len(unit) * max(unit), "packed": sum, "shared": max}
    return max(map(costs[layout], units))


def test_ranks_share_the_work_evenly_in_few_micro_batches_and_little_is_padded():
    lengths = np.random.default_rng(0).integers(5, 200, 512)
    rows = [row(int(length), unit) for unit, length in enumerate(lengths)]
    for n_ranks in (1, 2, 4):
        for layout in ("padded", "packed"):
            ranks = micro_batches(rows, 8192, n_ranks, layout=layout)
            costs = [sum(cost(batch, layout=layout) for batch in share) for share in ranks]
            assert max(costs) <= 1.02 * min(costs)
            assert sum(costs) <= (1.0 if layout == "packed" else 1.15) * lengths.sum()
            assert len(ranks[0]) <= 1.5 * np.ceil(lengths.sum() / 8192 / n_ranks)


def test_one_more_micro_batch_is_made_where_it_saves_much_padding():
    short_and_long = [row(10, unit) for unit in range(40)] + [row(100, 50)]  # 500 tokens, 4100 if padded together
    [batches] = micro_batches(short_and_long, 2048, 1)
    assert sum(cost(batch, layout="padded") for batch in batches) < 700
    assert len(batches) == 3, "two would cost too unevenly"
    much_alike = [row(90 + unit, unit) for unit in range(11)]
    assert len(micro_batches(much_alike, 8192, 1)[0]) == 1


def test_packed_rows_of_any_lengths_go_together():
    rows = [row(length, unit) for unit, length in enumerate([90, 10, 60, 40])]
    lengths = [sorted(len(r.token_ids) for r in batch) for batch in micro_batches(rows, 100, 1, layout="packed")[0]]
    assert sorted(lengths) == [[10, 90], [40, 60]]


def test_one_micro_batch_is_split_where_there_are_two_ranks():
    rows = [row(10, unit) for unit in range(8)]
    assert [len(share[0]) for share in micro_batches(rows, 8192, 1)] == [8]
    assert [len(share[0]) for share in micro_batches(rows, 8192, 2)] == [4, 4]


def test_too_few_units_are_filled_up_with_silent_copies_of_a_whole_unit():
    rows = [row(9, unit=1), row(7, unit=1), row(30, unit=2)]
    shares = micro_batches(rows, 40, 3)
    assert [len(share) for share in shares] == [1, 1, 1]
    [filler] = [share[0] for share in shares if is_padding(share[0])]
    assert [len(r.token_ids) for r in filler] == [9, 7]
    assert np.isnan(filler[0].old_logprobs).all()
    assert rows[0].loss_weights.all(), "the original keeps its weights"


def test_no_rows_make_no_micro_batches():
    assert micro_batches([], 100, 2) == [[], []]


def test_silenced_rows_are_silent():
    assert is_padding(padding_samples([row(3)]))
    assert not is_padding([row(3, weight=0.0), row(3)])


def test_padding_is_on_the_right_and_counts_for_nothing():
    batch = pad([row(2, 4, a=np.array([1, 2], np.float32)), row(3, 5, a=np.ones(3, np.float32))], torch.device("cpu"))
    assert batch.token_ids.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch.loss_weights.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.old_logprobs[0].isnan().tolist() == [False, False, True]
    assert batch.arrays["a"].tolist() == [[1, 2, 0], [1, 1, 1]]
    assert batch.episodes.tolist() == [4, 5]
    assert pad([row(2)], torch.device("cpu"), length=5).token_ids.shape == (1, 5)
