"""Advantages in a tree of episodes, by hand, and the loss of turns that episodes share."""

import copy

import numpy as np
import pytest
import torch

from envgym.learner import Outputs, pad
from envgym.learners.grpo import GRPO, GRPOConfig
from envgym.learners.rloo import RLOO, RLOOConfig
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn, number_rows

TASK = Task("t")


def episode(name, turns, reward, parent="", parent_turn=0, outcome=None):
    """An episode whose turns have these token ids, with a prompt before and a token of feedback between them."""
    parts = [Segment("prompt", [1, 2])]
    for ids in turns:
        parts += [Segment("action", ids, logprobs=[-0.5] * len(ids)), Segment("feedback", [9])]
    rows = [Row(parts[:-1], turns=[Turn(None, StopReason.STOP)] * len(turns))]
    outcome = outcome or Outcome.finish()
    return Episode(name, TASK, outcome, rows, reward, parent=parent, parent_turn=parent_turn)


def tree():
    """Two turns and three leaves: b and c share their first turn."""
    return [
        episode("a", [[3, 4], [5]], 0.0),
        episode("b", [[6], [7, 8]], 1.0),
        episode("c", [[6], [7, 9, 9]], 0.0, "b", 1),
    ]


def prepare(learner, *groups):
    groups = [Group(f"g{n}", TASK, episodes) for n, episodes in enumerate(groups)]
    return learner.prepare(number_rows(groups))


def grpo(**settings):
    return GRPO(GRPOConfig(name="grpo", advantage_eps=0.0, **{"advantage": "tree", **settings}))


def values_of(row, name="advantages"):
    """The values of each turn's tokens."""
    array = row.loss_weights if name == "weights" else row.arrays[name]
    ends = row.turn_ends
    return [array[end - length : end].tolist() for end, (length, _) in zip(ends, row.answers, strict=True)]


def test_grpo_by_hand():
    """The values of the first turns are 0 and (1 + 0) / 2, so that their mean is 1/4; those of the second turns below
    the branch are 1 and 0. The deviation of the returns 0, 1, 0 is sqrt(1/3)."""
    rows = prepare(grpo(aggregation="token"), tree())
    unit = 3**0.5
    first, second = 0.25 * unit, 0.5 * unit
    assert values_of(rows[0]) == [pytest.approx([-first] * 2), pytest.approx([-first])]  # an only child: one choice
    assert values_of(rows[1]) == [pytest.approx([first]), pytest.approx([second] * 2)]
    assert values_of(rows[2])[1] == pytest.approx([-second] * 3)
    assert [values_of(row, "weights") for row in rows] == [[[1, 1], [1]], [[2], [1, 1]], [[0], [1, 1, 1]]]
    assert np.isnan(rows[2].old_logprobs[:3]).all()
    assert np.isfinite(rows[2].old_logprobs[4:]).all()


def test_rloo_by_hand():
    rows = prepare(RLOO(RLOOConfig(name="rloo", advantage="tree")), tree())
    assert values_of(rows[0]) == [[-0.5] * 2, [-0.5]]
    assert values_of(rows[1]) == [[0.5], [1.0] * 2]
    assert values_of(rows[2])[1] == [-1.0] * 3


def test_a_branch_of_a_branch_and_several_at_one_turn():
    episodes = [
        episode("a", [[3], [3], [3]], 1.0),
        episode("b", [[4], [4], [4]], 0.0),
        episode("c", [[3], [5], [5]], 0.5, "a", 1),
        episode("d", [[3], [6], [6]], 0.0, "a", 1),
        episode("e", [[3], [5], [7]], 0.1, "c", 2),
        episode("f", [[4], [4], [8]], 0.0, "b", 2),
    ]
    rows = prepare(RLOO(RLOOConfig(name="rloo", advantage="tree")), episodes)
    of_c = (0.5 + 0.1) / 2
    below_a = (1.0 + 0.5 + 0.0 + 0.1) / 4
    expected = {
        "a": [below_a - 0.0, 1.0 - (of_c + 0.0) / 2, 1.0 - (of_c + 0.0) / 2],
        "b": [0.0 - below_a, -below_a, 0.0],
        "c": [below_a, of_c - 0.5, 0.4],
        "d": [below_a, 0.0 - (1.0 + of_c) / 2, -(1.0 + of_c) / 2],
        "e": [below_a, of_c - 0.5, -0.4],
        "f": [-below_a, -below_a, 0.0],
    }
    for of_episode, row in zip(episodes, rows, strict=True):
        assert np.concatenate(values_of(row)) == pytest.approx(expected[of_episode.id]), of_episode.id
    weights = {
        e.id: [w for turn in values_of(row, "weights") for w in turn] for e, row in zip(episodes, rows, strict=True)
    }
    assert weights == {
        "a": [4, 1, 1], "b": [2, 2, 1], "c": [0, 2, 1], "d": [0, 1, 1], "e": [0, 0, 1], "f": [0, 0, 1]
    }  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_is_that_of_all_copies(aggregation):
    """By hand: what each sampled token adds to the gradient by its log-probability, with the weights of the copies."""
    learner = grpo(aggregation=aggregation, policy_loss="reinforce", constant_length=7)
    rows = prepare(learner, tree())
    batch = pad(rows, torch.device("cpu"))
    logprobs = batch.old_logprobs.nan_to_num(-0.5).requires_grad_()
    outputs = Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, _ = learner.loss("actor", outputs, batch, learner.loss_normalizers(rows))
    loss.backward()
    unit = 3**0.5
    first, second = 0.25 * unit, 0.5 * unit
    # tokens of the turns:      a: 3 of 3                  b: 1 + 2           c: 1 + 3
    shares = {
        "token": {"a": 1 / 10, "b": 1 / 10, "c": 1 / 10},
        "sequence": {"a": 1 / 9, "b": 1 / 9, "c": 1 / 12},
        "constant": dict.fromkeys("abc", 1 / 21),
    }[aggregation]
    expected = torch.zeros_like(logprobs)
    expected[0, 2:4] = expected[0, 5] = first * shares["a"]
    expected[1, 2] = -first * (shares["b"] + shares["c"])  # the shared turn, once
    expected[1, 4:6] = -second * shares["b"]
    expected[2, 4:7] = second * shares["c"]
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("settings", [{}, {"aggregation": "token"}, {"kl": {"coef": 0.1, "applied_to": "reward"}}])
@pytest.mark.parametrize("kind", [(GRPO, GRPOConfig), (RLOO, RLOOConfig)])
def test_without_branches_a_tree_is_a_group(kind, settings):
    learner_class, config_class = kind
    if "kl" in settings:
        settings = {"kl": config_class(name="x").kl.model_copy(update=settings["kl"])}
    rng = np.random.default_rng(0)
    episodes = [
        episode(str(n), [rng.integers(3, 9, rng.integers(1, 4)).tolist() for _ in range(rng.integers(1, 5))], reward)
        for n, reward in enumerate(rng.random(6).round(2).tolist())
    ]
    episodes.append(Episode("empty", TASK, Outcome.finish(), [], 0.7))
    results = []
    for advantage in ("group", "tree"):
        copies = copy.deepcopy(episodes)
        for each in copies:
            for row in each.rows:
                row.arrays["reference"] = np.linspace(-1, 0, len(row), dtype=np.float32)
        learner = learner_class(config_class(name="x", advantage=advantage, **settings))
        rows = prepare(learner, copies)
        results.append([(row.arrays["advantages"].tobytes(), row.loss_weights.tobytes()) for row in rows])
        assert learner.returns is not None
    assert results[0] == results[1]


def test_what_is_shared_is_learned_if_only_a_branch_is():
    """With the overlong filter, a truncated parent is not trained on."""
    episodes = tree()
    episodes[1].outcome = Outcome.truncate("length")
    rows = prepare(grpo(aggregation="token", shaping={"overlong_filter": True}), episodes)
    assert values_of(rows[1], "weights") == [[1], [0, 0]]
    assert values_of(rows[1])[0] == pytest.approx([0.25 * 3**0.5])
    assert values_of(rows[2], "weights") == [[0], [1, 1, 1]]


def test_a_parent_that_is_not_in_the_group_leaves_the_turn_to_its_branches():
    episodes = [*tree(), episode("d", [[6], [2]], 1.0, "b", 1)]
    del episodes[1]
    rows = prepare(RLOO(RLOOConfig(name="rloo", advantage="tree")), episodes)
    assert values_of(rows[1]) == [[0.5], [-1.0] * 3]
    assert values_of(rows[2]) == [[0.5], [1.0]]
    assert [values_of(row, "weights")[0] for row in rows] == [[1, 1], [2], [0]]


def test_equal_returns_have_no_advantage():
    episodes = tree()
    for each in episodes:
        each.reward = 0.1
    for row in prepare(grpo(), episodes):
        assert not row.arrays["advantages"].any()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"credit": "turn"}, "leave credit at episode"),
        ({"gamma": 0.9}, "leave gamma at 1"),
    ],
)
def test_what_a_tree_decides_by_itself(settings, says):
    with pytest.raises(ValueError, match=says):
        GRPOConfig(name="grpo", advantage="tree", **settings)
