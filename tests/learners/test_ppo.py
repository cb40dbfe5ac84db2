"""PPO: what the critic is asked and taught, and the advantages that come of it, against the papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scored_rows import ScoredRow, scored

from envgym.learner import Outputs, pad
from envgym.learners.ppo import PPO, PPOConfig
from envgym.types import Episode, Group, Objective, Outcome, Segment, Task, Turn

CPU = torch.device("cpu")
NAN = float("nan")


def make(**settings):
    return PPO(PPOConfig(name="ppo", **{"advantage_norm": "none", **settings}))


def episode(values, rewards, *, feedback=0, outcome=None, end=NAN, logprobs=None, references=None, split=False):
    """An episode whose turns are given by the values of their tokens' states, lists of numbers each.

    The critic says a state's value at the token before the one that is sampled in it; everywhere else it says NaN.
    `end` is what it says of the last state. Between turns stand `feedback` tokens, or a new row begins (`split`).
    """
    rows, says = [], []
    for of_turn in values:
        if not rows or split:
            rows.append(ScoredRow([Segment("prompt", [1, 2])]))
            says.append([NAN, NAN])
        elif feedback:
            rows[-1].segments.append(Segment("feedback", [3] * feedback))
            says[-1] += [NAN] * feedback
        segment = Segment("action", [7] * len(of_turn), logprobs=[-1.0] * len(of_turn))
        rows[-1].segments.append(segment)
        for value in of_turn:
            says[-1][-1] = value
            says[-1].append(NAN)
    says[-1][-1] = end
    for row, own in zip(rows, says, strict=True):
        row.outputs = {"critic": own}
        row.turns = []
    turns = [(row, segment) for row in rows for segment in row.segments if segment.role == "action"]
    for (row, _), reward in zip(turns, rewards, strict=True):
        row.turns.append(Turn(reward, "stop"))
    if logprobs is not None:
        for (_, segment), own in zip(turns, logprobs, strict=True):
            segment.logprobs = own
        for row in rows:
            row.outputs["reference"] = [NAN] * len(row.token_ids)
        [row] = rows
        places = np.flatnonzero(np.isfinite(row.old_logprobs))
        for place, reference in zip(places, [x for own in references for x in own], strict=True):
            row.outputs["reference"][place] = reference
    return Episode("e", Task("t"), outcome or Outcome.finish(), rows=rows, reward=math.fsum(rewards))


def learned(learner, *episodes):
    """(advantages, returns, old values) of each episode, at its sampled tokens."""
    rows = learner.prepare(scored([Group("g", Task("t"), [one]) for one in episodes]))
    found = {}
    for row in rows:
        for name in ("advantages", "returns", "values"):
            tokens = row.arrays[name][row.loss_weights > 0].tolist()
            found.setdefault(row.episode_index, {}).setdefault(name, []).extend(tokens)
    return [tuple(of[name] for name in ("advantages", "returns", "values")) for of in found.values()]


@pytest.mark.parametrize("feedback", [0, 1, 10, 100])
@pytest.mark.parametrize("split", [False, True])
def test_feedback_takes_no_time(feedback, split):
    """gamma 0.99, lambda 0.95, values 1/2, a reward of 1 at the end of the second turn. By hand:

    d_3 = 1 - 1/2 = 1/2, the others 0.99 / 2 - 1/2 = -0.005, and A_t = d_t + 0.9405 A_{t+1}.
    """
    learner = make(gamma=0.99, gae_lambda=0.95)
    played = episode([[0.5, 0.5], [0.5, 0.5]], [0.0, 1.0], feedback=feedback, split=split)
    [(advantages, returns, values)] = learned(learner, played)
    a3 = 0.5
    a2 = -0.005 + 0.9405 * a3
    a1 = -0.005 + 0.9405 * a2
    a0 = -0.005 + 0.9405 * a1
    assert advantages == pytest.approx([a0, a1, a2, a3], rel=1e-6)
    assert values == [0.5] * 4
    assert returns == pytest.approx([a0 + 0.5, a1 + 0.5, a2 + 0.5, a3 + 0.5], rel=1e-6)


EPISODES = st.lists(st.tuples(st.lists(st.floats(-3, 3), max_size=4), st.floats(-3, 3)), min_size=1, max_size=4).filter(
    lambda turns: any(values for values, _ in turns)
)


@given(EPISODES, st.integers(0, 3), st.booleans(), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans())
def test_advantages_and_returns_are_the_papers(papers, turns, feedback, split, gamma, lam, cut, bootstrap):
    """Per-turn rewards on the last token of their own turn (a turn without tokens pays on the one before it); after a
    cut the value of what would have come counts, if it is asked for."""
    values, rewards = [of for of, _ in turns], [reward for _, reward in turns]
    outcome = Outcome.truncate("turns") if cut else Outcome.finish()
    learner = make(gamma=gamma, gae_lambda=lam, bootstrap_truncated=bootstrap)
    played = episode(values, rewards, feedback=feedback, split=split, outcome=outcome, end=0.7)
    [(advantages, returns, _)] = learned(learner, played)
    flat = [value for of_turn in values for value in of_turn]
    paid, n = np.zeros(len(flat)), 0
    for of_turn, reward in turns:
        n += len(of_turn)
        paid[max(n - 1, 0)] += reward
    expected = papers.gae(paid, flat, 0.7 if cut and bootstrap else 0.0, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, np.add(expected, flat), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outcome", "bootstrap", "last"),
    [
        (Outcome.finish(), False, 0.5),
        (Outcome.finish(), True, 0.5),
        (Outcome.truncate("length"), False, 0.5),
        (Outcome.truncate("length"), True, 0.5 + 3.0),
    ],
)
def test_only_a_truncated_episode_would_have_gone_on(outcome, bootstrap, last):
    """One token, value 1/2, reward 1: an advantage of 1/2, and what the critic says of the state after it, 3."""
    learner = make(bootstrap_truncated=bootstrap)
    [(advantages, _, _)] = learned(learner, episode([[0.5]], [1.0], outcome=outcome, end=3.0))
    assert advantages == [last]


def test_the_kl_is_paid_token_by_token_and_counts_for_what_comes_before():
    """k1 = log 2 and 0, coefficient 0.1, lambda 1: the first token earns 1 - 0.1 log 2, the second 1."""
    learner = make(kl={"coef": 0.1})
    logprobs, references = [[-1.0, -2.0]], [[-1.0 - math.log(2), -2.0]]
    played = episode([[0.0, 0.0]], [1.0], logprobs=logprobs, references=references)
    [(advantages, _, _)] = learned(learner, played)
    assert advantages == pytest.approx([1 - 0.1 * math.log(2), 1.0])


def test_credit_by_episode_pays_everything_at_the_end():
    learner = make(credit="episode", gae_lambda=0.0)
    [(advantages, _, _)] = learned(learner, episode([[0.0], [0.0]], [1.0, 2.0]))
    assert advantages == [0.0, 3.0]
    [(advantages, _, _)] = learned(make(gae_lambda=0.0), episode([[0.0], [0.0]], [1.0, 2.0]))
    assert advantages == [1.0, 2.0]


def test_advantages_are_normalised_but_returns_are_not():
    """Tokens of 1, 1, 4 and 4 against values of 0: mean 2.5, deviation 1.5. What the critic learns stays as it is."""
    learner = make(advantage_norm="batch")
    one, other = learned(learner, episode([[0.0, 0.0]], [1.0]), episode([[0.0, 0.0]], [4.0]))
    assert one[0] == pytest.approx([-1, -1])
    assert other[0] == pytest.approx([1, 1])
    assert (one[1], other[1]) == ([1, 1], [4, 4])


def test_the_critic_is_a_model_of_its_own_that_scores_and_learns():
    roles = make(critic_warmup_steps=7, minibatches=2, entropy_coef=0.1).roles
    assert (roles["critic"].trained, roles["critic"].scored, roles["critic"].head) == (True, True, "scalar")
    assert roles["critic"].frozen_steps == 0
    assert roles["actor"].frozen_steps == 7
    assert (roles["actor"].scored, roles["actor"].entropy) == (True, True)
    assert make().roles["actor"].frozen_steps == 0


def critic_step(learner, rows, now):
    """The critic's loss on one batch of rows, given what it now says of each state; and the gradient there."""
    batch = pad(rows, CPU)
    outputs = torch.full(batch.token_ids.shape, NAN)
    said = torch.tensor(now)
    outputs[:, :-1][batch.loss_weights[:, 1:] > 0] = said
    outputs.requires_grad_()
    loss, metrics = learner.loss("critic", Outputs(values=outputs), batch, learner.loss_normalizers(rows))
    loss.backward()
    assert outputs.grad.isfinite().all()
    gradient = outputs.grad[:, :-1][batch.loss_weights[:, 1:] > 0]
    assert outputs.grad.abs().sum() == gradient.abs().sum()
    return loss.item(), gradient.tolist(), metrics


def test_critic_loss_by_hand():
    """Two episodes of tokens with returns 1, 1 and 2 and old values 0. Now 0.4 (near), 0.8 (moved too far: counts as
    0.5) and 2.5 (overshot: 2.5 itself is no worse than 0.5): (0.36 + 0.25 + 2.25) / 2 over three tokens."""
    learner = make()
    episodes = [episode([[0.0, 0.0]], [1.0]), episode([[0.0]], [2.0])]
    rows = learner.prepare(scored([Group("g", Task("t"), [one]) for one in episodes]))
    loss, gradient, metrics = critic_step(learner, rows, [0.4, 0.8, 2.5])
    assert loss == pytest.approx((0.36 + 0.25 + 2.25) / 2 / 3)
    assert gradient == pytest.approx([-0.6 / 3, 0.0, 0.0])
    assert metrics["loss"][0] / metrics["loss"][1] == pytest.approx(loss)
    assert metrics["clip_fraction"] == (2.0, 3.0)
    assert metrics["value/mean"] == (pytest.approx(3.7), 3.0)


@pytest.mark.parametrize(
    ("aggregation", "share"), [("token", [1 / 3, 1 / 3, 1 / 3]), ("sequence", [1 / 4, 1 / 4, 1 / 2])]
)
def test_the_critics_loss_is_aggregated_as_the_policys(aggregation, share):
    learner = make(aggregation=aggregation, value_clip=None)
    episodes = [episode([[0.0, 0.0]], [1.0]), episode([[0.0]], [2.0])]
    rows = learner.prepare(scored([Group("g", Task("t"), [one]) for one in episodes]))
    loss, gradient, _ = critic_step(learner, rows, [0.4, 0.8, 2.5])
    assert loss == pytest.approx(np.dot(share, [0.18, 0.02, 0.125]))
    assert gradient == pytest.approx((np.array(share) * [-0.6, -0.2, 0.5]).tolist())


def test_explained_variance_by_hand():
    """Returns 1 and 3; values 1 and 2: the rest 0 and 1 has a quarter of the returns' variance."""
    learner = make()
    rows = learner.prepare(scored([Group("g", Task("t"), [episode([[1.0]], [1.0]), episode([[2.0]], [3.0])])]))
    assert learner.metrics(rows)["value/explained_variance"] == pytest.approx(0.75)
    equal = learner.prepare(scored([Group("g", Task("t"), [episode([[1.0]], [1.0])])]))
    assert "value/explained_variance" not in learner.metrics(equal)


@pytest.mark.parametrize(
    ("first", "second", "is_there"),
    [(1.0, 1 + 1e-6, False), (1.0, 1 + 1e-4, False), (1.0, 1.01, True), (0.0, 1e-9, False), (0.0, 1e-4, True)],
)
def test_explained_variance_is_absent_where_returns_hardly_vary(first, second, is_there):
    """The critic is off by 1 in one of two episodes, which is 10^8 times as much as the returns differ, and more."""
    learner = make()
    groups = [Group("g", Task("t"), [episode([[1.0]], [first]), episode([[2.0]], [second])])]
    assert ("value/explained_variance" in learner.metrics(learner.prepare(scored(groups)))) == is_there


def test_a_step_with_a_silent_critic_row():
    """An episode without a token to learn from leaves nothing behind but itself."""
    learner = make(bootstrap_truncated=True)
    empty = episode([[]], [1.0], outcome=Outcome.truncate("length"), end=2.0)
    rows = learner.prepare(scored([Group("g", Task("t"), [empty, episode([[0.0]], [1.0])])]))
    assert [row.arrays["returns"].tolist() for row in rows] == [[0, 0], [0, 0, 1]]
    assert set(rows[0].arrays) == set(rows[1].arrays) == {"advantages", "returns", "values"}
    assert rows[0].objective == Objective.POLICY_GRADIENT
