"""The numbers that tell whether learning is healthy, and the KL coefficient that follows one of them."""

import math

import numpy as np
import pytest
import torch
from scored_rows import ScoredRow, scored

from envgym.learner import Outputs, pad
from envgym.learners.policy_gradient import mean_kl
from envgym.registry import load_component
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task, Turn
from envgym.workers.micro_batches import merge_metrics

CPU = torch.device("cpu")


def make(name="grpo", **settings):
    kind = load_component("learner", name)
    return kind(kind.Config(name=name, **settings))


def row(ratios, *, advantages=None, sampled=None, reference=None, unit=0):
    """A row of a prompt token and a token for each ratio to the old policy; the model says -1 throughout."""
    n = len(ratios)

    def tokens(values):
        return np.array([np.nan, *values], np.float32)

    old = tokens(-1 - np.log(ratios))
    arrays = {"advantages": tokens(advantages or [1.0] * n), "actor": old}
    if reference is not None:
        arrays["reference"] = tokens(reference)
    return Row.from_arrays(
        token_ids=np.arange(n + 1),
        loss_weights=np.array([0.0] + [1.0] * n, np.float32),
        old_logprobs=tokens(old[1:] if sampled is None else sampled),
        objective=Objective.POLICY_GRADIENT,
        arrays=arrays,
        microbatch_key=unit,
        episode_index=unit,
    )


def measure(rows, logprob):
    """Let the trainer's first pass over rows say `logprob` at each token that counts."""
    for one in rows:
        one.first_outputs = np.where(one.loss_weights > 0, np.float32(logprob), np.float32("nan"))


def logged(learner, *batches):
    """What several micro-batches of rows log together."""
    parts = []
    for rows in batches:
        batch = pad(rows, CPU)
        logprobs = torch.where(batch.loss_weights > 0, -1.0, float("nan"))
        outputs = Outputs(logprobs=logprobs, entropy=-2 * logprobs)
        _, metrics = learner.loss("actor", outputs, batch, {Objective.POLICY_GRADIENT: 4.0})
        parts.append(metrics)
    return merge_metrics(parts)


def test_by_hand():
    """Ratios 1, 1.5, 0.5 and 1.5, of which the second (up) and the third (down) are clipped; the last one's advantage
    is negative, so that the way back stays open."""
    told = logged(make(minibatches=2), [row([1.0, 1.5])], [row([0.5, 1.5], advantages=[-1.0, -1.0], unit=1)])
    assert told["policy/clip_fraction"] == 0.5
    assert told["policy/clip_fraction_low"] == 0.25
    assert told["policy/clip_fraction_high"] == 0.25
    assert told["policy/ratio/max"] == pytest.approx(1.5)
    assert told["policy/ratio/min"] == pytest.approx(0.5)
    assert told["policy/entropy"] == pytest.approx(2.0)
    k3 = [0, 0.5 - math.log(1.5), -0.5 - math.log(0.5), 0.5 - math.log(1.5)]
    assert told["policy/approx_kl"] == pytest.approx(sum(k3) / 4, rel=1e-5)
    assert told["loss"] == pytest.approx((-1 - 1.2 + 0.8 + 1.5) / 4)
    assert "policy/kl" not in told
    assert "correction/weight" not in told


def test_masked_tokens_are_no_extremes():
    """Prompts and padding, whose ratio is 1 to whoever forgets that they have none."""
    learner = make(minibatches=2)
    below = logged(learner, [row([0.9, 0.8]), row([0.7], unit=1)])
    assert (below["policy/ratio/max"], below["policy/ratio/min"]) == (pytest.approx(0.9), pytest.approx(0.7))
    above = logged(learner, [row([1.2, 1.1]), row([1.3], unit=1)])
    assert (above["policy/ratio/max"], above["policy/ratio/min"]) == (pytest.approx(1.3), pytest.approx(1.1))


def test_the_sequence_ratio_is_told_where_it_is_used():
    """GSPO: geometric means of (1, 4) and of (9)."""
    told = logged(make(policy_loss="gspo", minibatches=2), [row([1.0, 4.0])], [row([9.0], unit=1)])
    assert told["policy/ratio/min"] == pytest.approx(2.0)
    assert told["policy/ratio/max"] == pytest.approx(9.0)


def test_kl_to_the_reference_is_told_wherever_it_is_paid():
    for place in ("loss", "reward"):
        learner = make(kl={"coef": 0.1, "estimator": "k1", "applied_to": place}, minibatches=2)
        assert logged(learner, [row([1.0, 1.0], reference=[-1.5, -2.0])])["policy/kl"] == pytest.approx(0.75)


def test_corrections_are_told():
    """Trainer over sampler 1, 1.2 and 3, of which icepop drops the last: it is in no other number either."""
    sampled = (-1 - np.log([1.0, 1.2, 3.0])).tolist()
    learner = make(correction={"kind": "icepop", "low": 0.5, "high": 2}, minibatches=2)
    told = logged(learner, [row([1.0, 1.0, 1.0], sampled=sampled)])
    assert told["correction/weight"] == pytest.approx(1.1)
    assert told["correction/dropped_share"] == pytest.approx(1 / 3)
    assert told["loss"] == pytest.approx(-2.2 / 3)


def test_a_micro_batch_without_a_token_to_learn_from_says_nothing():
    silent = row([1.0, 1.0])
    silent.loss_weights[:] = 0
    learner = make(minibatches=2)
    assert logged(learner, [silent], [row([1.5])]) == logged(learner, [row([1.5])])
    assert logged(learner, [silent]) == {}


def group(*rewards, lengths=None):
    episodes = []
    for reward, length in zip(rewards, lengths or [2] * len(rewards), strict=True):
        segments = [Segment("prompt", [1]), Segment("action", [2] * length, logprobs=[-1.0] * length)]
        one = ScoredRow(segments, turns=[Turn(reward, "stop")], outputs={"reference": [-1.0] * (length + 1)})
        episodes.append(Episode("e", Task("t"), Outcome.finish(), rows=[one], reward=reward))
    return Group("g", Task("t"), episodes)


def test_advantages_by_hand():
    """Centred: -1 (two tokens) and 1 (six); 0 and 0. Mean 4 / 12, mean square 8 / 12; groups spread by 1 and by 0."""
    learner = make("dr_grpo")
    told = learner.metrics(learner.prepare(scored([group(0.0, 2.0, lengths=[2, 6]), group(3.0, 3.0)])))
    assert told["advantage/mean"] == pytest.approx(4 / 12)
    assert told["advantage/std"] == pytest.approx((8 / 12 - (4 / 12) ** 2) ** 0.5)
    assert told["advantage/max_abs"] == 1.0
    assert told["advantage/group_spread"] == pytest.approx(0.5)
    assert told["learner/episodes"] == 4
    assert "policy/kl_coef" not in told


def test_advantages_of_no_token():
    learner = make("dr_grpo", shaping={"overlong_filter": True})
    cut = group(0.0, 1.0)
    for episode in cut.episodes:
        episode.outcome = Outcome.truncate("length")
    assert learner.metrics(learner.prepare(scored([cut]))) == {"learner/episodes": 2.0}


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_an_adaptive_coefficient_follows_the_measured_kl(place):
    """It grows where the KL is above its target, is what the next step's rows carry, and is kept by a checkpoint."""
    learner = make("grpo", kl={"coef": 0.5, "target": 0.1, "horizon": 100, "estimator": "k1", "applied_to": place})
    rows = learner.prepare(scored([group(0.0, 1.0)]))
    assert learner.metrics(rows)["policy/kl_coef"] == 0.5
    measure(rows, -0.7)  # the reference is at -1: a KL of 0.3 by k1, 0.04 by k3
    learner.end_step(rows)
    expected = 0.5 * (1 + 0.2 * 2 / 100)
    assert learner.kl_coef == pytest.approx(expected)
    again = make("grpo", kl={"coef": 0.5, "target": 0.1, "horizon": 100, "applied_to": place})
    again.load_state_dict(learner.state_dict())
    rows = again.prepare(scored([group(0.0, 1.0)]))
    assert again.metrics(rows)["policy/kl_coef"] == pytest.approx(expected)
    if place == "loss":  # the worker's own learner knows nothing of it but what the rows carry
        assert rows[0].arrays["kl_coef"].tolist() == pytest.approx([expected] * 3)
    else:
        assert "kl_coef" not in rows[0].arrays


def test_the_loss_uses_the_coefficient_that_the_rows_carry():
    """Both models at -1, the reference at -1.5: k1 is 1/2, and twice the coefficient pays twice as much."""
    worker = make(kl={"coef": 0.5, "target": 0.1, "estimator": "k1"}, minibatches=2)
    losses = []
    for coefficient in (0.25, 0.5):
        one = row([1.0], advantages=[0.0], reference=[-1.5])
        one.arrays["kl_coef"] = np.array([np.nan, coefficient], np.float32)
        losses.append(logged(worker, [one])["loss"])
    assert losses == pytest.approx([0.125, 0.25])


def test_a_step_that_measured_no_kl_leaves_the_coefficient_alone():
    """While the critic warms up, the actor is not asked."""
    learner = make("ppo", kl={"coef": 0.5, "target": 0.1}, critic_warmup_steps=3)
    learner.end_step([row([1.0], reference=[-9.0])])
    assert learner.kl_coef == 0.5


def test_a_fixed_coefficient_stays():
    learner = make("grpo", kl={"coef": 0.5})
    rows = [row([1.0], reference=[-9.0])]
    measure(rows, -1.0)
    learner.end_step(rows)
    assert learner.kl_coef == 0.5


def test_the_kl_is_that_of_the_first_pass_over_tokens_that_are_learned_from():
    """By hand, by k1: (0.5 + 1 + 3) / 3 over two rows; a prompt's token, text and a later pass do not count."""
    rows = [row([1.0, 1.0], reference=[-1.5, -2.0]), row([1.0], reference=[-4.0], unit=1), row([1.0], unit=2)]
    measure(rows, -1.0)
    rows[0].last_outputs = rows[0].first_outputs - 5
    rows[2].objective = Objective.CROSS_ENTROPY
    assert mean_kl(rows, "k1") == pytest.approx(1.5)
    learner = make("grpo", kl={"coef": 0.5, "target": 1.5, "horizon": 1, "estimator": "k1"})
    learner.end_step(rows)
    assert learner.kl_coef == pytest.approx(0.5)
    measure(rows, -0.9)  # 1.6: an error of 1/15, times two episodes
    learner.end_step(rows)
    assert learner.kl_coef == pytest.approx(0.5 * (1 + 2 / 15))
