"""KL in the reward: every action token pays for its own, and the tokens before it for it too."""

import math

import pytest
from scored_rows import ScoredRow, scored

from envgym.registry import load_component
from envgym.types import Episode, Group, Outcome, Segment, Task, Turn

NAN = float("nan")
ALGORITHMS = ("ppo", "reinforce++", "reinforce++_baseline", "rloo", "grpo", "dr_grpo")


def episode(reward, ratios, actor=None):
    """Three tokens, the last one in a turn of its own, which the sampler has at -1; `ratios` are pi / pi_ref. `actor`
    is what the trainer said, where it is not what the sampler did."""
    segments = [
        Segment("prompt", [1]),
        Segment("action", [2, 3], logprobs=[-1.0, -1.0]),
        Segment("feedback", [4] * 5),
        Segment("action", [5], logprobs=[-1.0]),
    ]

    def tokens(first, second, third):
        return [NAN, first, second, *[NAN] * 5, third]

    own = actor or [-1.0] * 3
    outputs = {
        "reference": tokens(*(mine - math.log(ratio) for mine, ratio in zip(own, ratios, strict=True))),
        "critic": [0.0] * 9,
        "actor": tokens(*own),
    }
    row = ScoredRow(segments, turns=[Turn(None, "stop"), Turn(reward, "stop")], outputs=outputs)
    return Episode("e", Task("t"), Outcome.finish(), rows=[row], reward=reward)


def advantages(name, *episodes, kl, **settings):
    kind = load_component("learner", name)
    learner = kind(kind.Config(name=name, advantage_norm="none", kl=kl, **settings))
    rows = learner.prepare(scored([Group("g", Task("t"), list(episodes))]))
    return [row.arrays["advantages"][row.loss_weights > 0].tolist() for row in rows]


@pytest.mark.parametrize("credit", ["turn", "episode"])
@pytest.mark.parametrize("name", ["reinforce++", "ppo"])
def test_by_hand(name, credit):
    """gamma 1/2, coefficient 0.1, log-ratios of 1, 2 and 4: the tokens pay 0.1, 0.2 and 0.4. From the end: 8 - 0.4;
    half of that - 0.2; half of that - 0.1. (With a critic that says 0 and lambda 1, PPO's advantages are returns.)"""
    one = episode(8.0, [math.e, math.e**2, math.e**4])
    kl = {"coef": 0.1, "estimator": "k1", "applied_to": "reward"}
    [tokens] = advantages(name, one, kl=kl, gamma=0.5, credit=credit)
    assert tokens == pytest.approx([1.7, 3.6, 7.6])


@pytest.mark.parametrize("name", ["reinforce++_baseline", "rloo", "grpo", "dr_grpo"])
def test_it_comes_after_the_comparison_of_a_group(name):
    """Rewards are compared, then each token pays: a member's KL is in nobody else's baseline."""
    members = [episode(3.0, [math.e, 1.0, 1.0]), episode(1.0, [1.0, 1.0, 1.0])]
    plain = advantages(name, *members, kl={"coef": 0.0})
    paid = advantages(name, *members, kl={"coef": 0.1, "estimator": "k1", "applied_to": "reward"})
    assert paid[0] == pytest.approx([plain[0][0] - 0.1, *plain[0][1:]])
    assert paid[1] == plain[1]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("estimator", "paid"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_by_any_estimator(name, estimator, paid):
    members = [episode(0.0, [1.0, 1.0, 2.0]), episode(0.0, [1.0, 1.0, 1.0])]
    tokens, others = advantages(name, *members, kl={"coef": 0.5, "estimator": estimator, "applied_to": "reward"})
    assert tokens == pytest.approx([-0.5 * paid] * 3)
    assert others == pytest.approx([0.0] * 3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_of_the_policy_that_the_trainer_holds_where_that_was_asked(name):
    """Two optimizer steps a rollout: the trainer's own log-probabilities, at -2 where the sampler has -1, are there."""
    kl = {"coef": 0.5, "estimator": "k1", "applied_to": "reward"}
    members = [episode(0.0, [1.0, 1.0, 1.0], actor=[-2.0] * 3) for _ in range(2)]
    assert advantages(name, *members, kl=kl, minibatches=2) == [[0.0] * 3] * 2
    assert advantages(name, *members, kl=kl)[0] == pytest.approx([-1.5, -1.0, -0.5])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_the_loss_it_is_not_in_the_reward(name):
    members = [episode(0.0, [math.e, 1.0, 1.0]), episode(0.0, [1.0, 1.0, 1.0])]
    assert advantages(name, *members, kl={"coef": 0.1, "applied_to": "loss"}) == [[0.0] * 3] * 2
