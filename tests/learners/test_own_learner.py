"""A learner in a user's file works like ours: the example, and an advantage of one's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scored_rows import group_of_turns

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, RunError
from envgym.learner import LearnerConfig, Outputs, pad
from envgym.registry import load_component
from envgym.types import Objective, number_rows

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

OWN = '''
from envgym.learners.policy_gradient import CriticFreeLearner, PolicyGradientConfig


class Config(PolicyGradientConfig):
    margin: float = 0.0
    """Taken off the best."""


class AgainstTheBest(CriticFreeLearner):
    """How much worse than the group's best an episode was."""

    Config = Config
    min_group_size = 2

    def advantages(self, rewards):
        return [reward - (max(rewards) - self.config.margin) for reward in rewards]
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return str(path)


def step(learner, groups):
    """(loss, gradients at sampled tokens) of one optimizer step whose model says -1 at every sampled token."""
    rows = learner.prepare(number_rows(groups))
    batch = pad(rows, CPU)
    logprobs = torch.where(batch.loss_weights > 0, -1.0, float("nan")).requires_grad_()
    outputs = Outputs(logprobs=logprobs, entropy=-logprobs)
    loss, _ = learner.loss("actor", outputs, batch, learner.loss_normalizers(rows))
    loss.backward()
    return loss.item(), logprobs.grad[batch.loss_weights > 0].tolist()


def test_the_example_learns_by_hand():
    """Rewards 3 and 1, baseline 2, two tokens each: -(1 + 1 - 1 - 1) (-1) / 4, and gradients of -1/4 and 1/4."""
    learner = load_component("learner", f"{ROOT / 'examples' / 'reinforce.py'}:Reinforce")(LearnerConfig(name="mine"))
    loss, gradient = step(learner, [group_of_turns([3.0], [1.0])])
    assert loss == 0
    assert gradient == [-0.25, -0.25, 0.25, 0.25]


def test_an_advantage_of_ones_own_gets_everything_else(own):
    """The best of 3, 1 and 2 is 3: advantages 0, -2 and -1, in the loss, aggregation and credit of ours."""
    kind = load_component("learner", own)
    learner = kind(kind.Config(name=own, policy_loss="cispo", aggregation="sequence"))
    loss, gradient = step(learner, [group_of_turns([3.0], [1.0], [2.0])])
    assert loss == pytest.approx(-1.0)
    assert gradient == pytest.approx(np.repeat([0, 2, 1], 2) / 2 / 3)
    by_turn = kind(kind.Config(name=own, credit="turn", margin=0.5))
    rows = by_turn.prepare(number_rows([group_of_turns([1.0, 5.0], [2.0, 0.0])]))
    tokens = [row.arrays["advantages"][row.loss_weights > 0].tolist() for row in rows]
    assert tokens == [[0.5, 0.5, 0.5, 0.5], [-3.5, -3.5, -4.5, -4.5]]


def test_its_roles_and_its_contradictions_are_those_of_ours(own):
    kind = load_component("learner", own)
    assert set(kind(kind.Config(name=own, kl={"coef": 0.1})).roles) == {"actor", "reference"}
    words = {"env": "math_verify", "learner": {"name": own, "policy_loss": "gspo", "old_logprobs": "rollout"}}
    with pytest.raises(ConfigError, match="key 'old_logprobs': policy_loss gspo"):
        resolve(words)
    with pytest.raises(ConfigError, match=r"unknown key 'margn'. Did you mean 'margin'\?"):
        resolve({"env": "math_verify", "learner": {"name": own, "margn": 1}})
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        resolve({"env": "math_verify", "learner": own, "rollout": {"group_size": 1}})


def test_its_rows_of_two_objectives_have_a_denominator_each(own):
    kind = load_component("learner", own)
    learner = kind(kind.Config(name=own))
    rows = learner.prepare(number_rows([group_of_turns([1.0], [0.0])]))
    rows[1].objective = Objective.CROSS_ENTROPY
    assert learner.loss_normalizers(rows) == {Objective.POLICY_GRADIENT: 2.0, Objective.CROSS_ENTROPY: 2.0}


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("wrong", ["[0.0]", "None", "[0.0, nan, 0.0]"])
def test_advantages_that_are_too_few_or_not_finite_are_told_with_the_authors_line(own, credit, wrong):
    text = OWN.replace("return [reward - (max(rewards) - self.config.margin) for reward in rewards]", f"return {wrong}")
    text = f"from math import nan\n{text}"
    Path(own).write_text(text)
    kind = load_component("learner", own)
    line = text.splitlines().index("    def advantages(self, rewards):") + 1
    with pytest.raises(RunError) as error:
        kind(kind.Config(name=own, credit=credit)).prepare(number_rows([group_of_turns([1.0], [0.0], [2.0])]))
    assert str(error.value).startswith(f"{own}, line {line}: AgainstTheBest.advantages returned {wrong} for 3 members")
