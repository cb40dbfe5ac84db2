"""Every algorithm with every loss, aggregation and correction: its loss is the papers' formula, and its gradient does
not depend on what it should not depend on."""

import copy
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_rows import ScoredRow, scored

from envgym.learner import Outputs, pad
from envgym.registry import load_component
from envgym.types import Episode, Group, Objective, Outcome, Segment, Task, Turn

CPU = torch.device("cpu")
ALGORITHMS = ("ppo", "reinforce++", "reinforce++_baseline", "rloo", "grpo", "dr_grpo")
LOSSES = ("ppo", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token", "sequence", "constant")
CORRECTIONS = ("none", "tis", "icepop", "seq_mask_tis")
BAD = [float("nan"), float("inf"), float("-inf")]


def every(corrections=CORRECTIONS):
    """Every combination; the fast third of them has any two settings together, and nearly any three."""
    parts = (ALGORITHMS, LOSSES, AGGREGATIONS, corrections)

    def marks(values):
        return [pytest.mark.slow] if sum(map(tuple.index, parts, values)) % len(AGGREGATIONS) else []

    return [pytest.param(*values, id="-".join(values), marks=marks(values)) for values in product(*parts)]


SHAPE = [[[3, 2], [1], [4, 1, 2]], [[2], [5, 3]], [[1, 1], [2, 0, 1], [6]]]
"""Tokens of each turn of each episode of each group: 8 episodes."""
PER_TOKEN = ("new", "entropy", "sampled", "actor", "reference", "critic", "new_value")


KINDS = {name: load_component("learner", name) for name in ALGORITHMS}


def make_learner(name, **settings):
    kind = KINDS[name]
    return kind(kind.Config(name=name, **settings))


def combined(algorithm, policy_loss, aggregation, kind, **more):
    """A learner with everything in it that can be: KL, entropy, a discount, two optimizer steps a rollout."""
    settings = {
        "policy_loss": policy_loss,
        "aggregation": aggregation,
        "constant_length": 7,
        "clip_high": 0.3,
        "correction": {"kind": kind, "low": 0.6, "high": 1.5},
        "kl": {"coef": 0.1},
        "entropy_coef": 0.02,
        "gamma": 0.99,
        "minibatches": 2,
    }
    if algorithm == "ppo":
        settings |= {"gae_lambda": 0.95, "bootstrap_truncated": True}
    return make_learner(algorithm, **settings | more)


class Rollout:
    """Groups of episodes with random numbers, the same ones whatever lies between their turns.

    `feedback` tokens stand between two turns; with `split` every turn has a row of its own. Everything that is not
    about a sampled token is one of `garbage`. `models` are what the actor and the critic now say, for each row; what
    roles said when they scored it is in its `says`, from which a step takes what its learner asks for.
    """

    def __init__(self, shape=SHAPE, *, seed=0, feedback=2, split=False, weights=(1.0,), garbage=None):
        self.rng = np.random.default_rng(seed)
        self.noise = np.random.default_rng(1)
        self.feedback, self.split, self.garbage = feedback, split, garbage
        self.models = []
        self.groups = [
            Group(str(g), Task(str(g)), [self.episode(lengths, weights) for lengths in group])
            for g, group in enumerate(shape)
        ]

    def episode(self, lengths, choices):
        n = sum(lengths)
        numbers = {name: self.rng.normal(-2, 0.6, n) for name in PER_TOKEN}
        numbers["actor"] = numbers["sampled"] + self.rng.normal(0, 0.4, n)
        numbers["new"] = numbers["actor"] + self.rng.normal(0, 0.3, n)
        weights = self.rng.choice(choices, n)
        rewards = self.rng.normal(0, 1, len(lengths)).round(2).tolist()
        ends = self.rng.normal(0, 1, 2)  # what the critic said and says of the last state
        outcome = Outcome.truncate("turns") if self.rng.random() < 0.3 else Outcome.finish()
        rows, models, start = [], [], 0
        for turn, length in enumerate(lengths):
            if turn == 0 or self.split:
                rows.append(ScoredRow([Segment("prompt", [1, 2])]))
                models.append([{} for _ in range(2)])
            elif self.feedback:
                rows[-1].segments.append(Segment("feedback", [3] * self.feedback))
                models[-1] += [{} for _ in range(self.feedback)]
            of_turn = [{name: values[start + i] for name, values in numbers.items()} for i in range(length)]
            action = Segment("action", [7] * length, logprobs=[token["sampled"] for token in of_turn])
            if length:
                action.loss_weights = weights[start : start + length].tolist()
            rows[-1].segments.append(action)
            rows[-1].turns.append(Turn(rewards[turn], "stop"))
            models[-1] += of_turn
            start += length
        for at, (row, tokens) in enumerate(zip(rows, models, strict=True)):
            self.finish(row, tokens, ends if at == len(rows) - 1 else None)
        return Episode("e", Task("t"), outcome, rows=rows, reward=math.fsum(rewards))

    def finish(self, row, tokens, ends):
        """Turn what is known token by token into the row's arrays; the critic speaks a token earlier."""
        says = {name: [token.get(name, self.junk()) for token in tokens] for name in PER_TOKEN}
        for name, last in zip(("critic", "new_value"), ends if ends is not None else (None, None), strict=True):
            says[name] = [*says[name][1:], self.junk() if last is None else last]
        row.says = {name: says[name] for name in ("actor", "reference", "critic")}
        self.models.append({name: np.array(says[name], np.float32) for name in ("new", "entropy", "new_value")})

    @property
    def rows(self):
        return [row for group in self.groups for episode in group.episodes for row in episode.rows]

    def junk(self):
        return self.noise.normal() if self.garbage is None else self.noise.choice(self.garbage)


class Step:
    """An optimizer step on a rollout in micro-batches of `cut` episodes: its loss, and the gradients at each sampled
    token (for the critic: where it speaks of the state that the token was sampled in)."""

    def __init__(self, learner, rollout, *, cut=None, padding=0, change=None):
        self.rows = prepared(learner, rollout)
        self.models = [{name: array.copy() for name, array in of.items()} for of in rollout.models]
        if change is not None:
            change(self.rows, self.models)
        self.loss_normalizers = learner.loss_normalizers(self.rows)
        self.metrics = {}
        self.loss, self.gradient = {}, {}
        for role in ("actor", "critic") if "critic" in learner.roles else ("actor",):
            self.loss[role], self.gradient[role] = self.learn(learner, role, cut, padding)

    def learn(self, learner, role, cut, padding):
        units = list(dict.fromkeys(row.microbatch_key for row in self.rows))
        total, gradients = 0.0, {}
        for start in range(0, len(units), cut or len(units)):
            mine = set(units[start : start + (cut or len(units))])
            numbers = [i for i, row in enumerate(self.rows) if row.microbatch_key in mine]
            part = [self.rows[i] for i in numbers]
            length = max(len(row.token_ids) for row in part) + padding
            batch = pad(part, CPU, length)
            leaves = {name: torch.full((len(part), length), 0.5) for name in ("new", "entropy", "new_value")}
            for name, leaf in leaves.items():
                for line, i in zip(leaf, numbers, strict=True):
                    line[: len(self.models[i][name])] = torch.from_numpy(self.models[i][name])
                leaf.requires_grad_()
            if role == "actor":
                outputs = Outputs(logprobs=leaves["new"], entropy=leaves["entropy"])
            else:
                outputs = Outputs(values=leaves["new_value"])
            loss, metrics = learner.loss(role, outputs, batch, self.loss_normalizers)
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
            for name, (numerator, denominator) in metrics.items():
                self.metrics.setdefault(f"{role}/{name}", []).append((numerator, denominator))
            for at, i in enumerate(numbers):
                counted = np.flatnonzero(self.rows[i].loss_weights > 0)
                for name, leaf in leaves.items():
                    if leaf.grad is not None:
                        line = leaf.grad[at].numpy()
                        offset = -1 if name == "new_value" else 0
                        gradients[name, i] = line[counted + offset].copy()
                        line[counted + offset] = 0
                        assert not line.any(), "a gradient where nothing was sampled"
        return total, gradients

    def per_episode(self, role):
        """{(what, episode): gradient}, whatever rows the episode's tokens are in."""
        found = {}
        for (name, i), line in self.gradient[role].items():
            found.setdefault((name, self.rows[i].episode_index), []).append(line)
        return {key: np.concatenate(lines) for key, lines in found.items()}

    def assert_same(self, other, rtol=2e-5, atol=2e-7):
        for role in self.loss:
            assert self.loss[role] == pytest.approx(other.loss[role], rel=rtol, abs=1e-6)
            mine, theirs = self.per_episode(role), other.per_episode(role)
            assert set(mine) == set(theirs)
            for key, gradient in mine.items():
                np.testing.assert_allclose(theirs[key], gradient, rtol=rtol, atol=atol)


def prepared(learner, rollout):
    """The rows to learn from, once the learner's roles have scored the rollout."""
    scoring = [role for role, spec in learner.roles.items() if spec.scored]
    for row in rollout.rows:
        row.outputs = {role: row.says[role] for role in scoring}
    return learner.prepare(scored(rollout.groups))


def as_papers(papers, learner, rollout, rows, models):
    """The step's episodes as the papers speak of them."""
    episodes = {}
    for row, written, model in zip(rows, rollout.rows, models, strict=True):
        tokens = episodes.setdefault(row.episode_index, [])
        old = written.says["actor"] if learner.config.recomputes else row.old_logprobs
        weights = [weight for segment in written.segments for weight in segment.loss_weights]
        for t in np.flatnonzero(row.loss_weights > 0):
            token = papers.Token(
                new=float(model["new"][t]),
                old=float(old[t]),
                sampled=float(row.old_logprobs[t]),
                reference=float(written.says["reference"][t]),
                advantage=float(row.arrays["advantages"][t]),
                entropy=float(model["entropy"][t]),
                weight=float(weights[t]),
            )
            tokens.append(token)
    return list(episodes.values())


# -- the formula ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "policy_loss", "aggregation", "kind"), every())
def test_loss_is_the_formula(papers, algorithm, policy_loss, aggregation, kind):
    dual_clip = 2.0 if policy_loss in ("ppo", "gspo") else None
    for shape in ({}, {"split": True}, {"weights": (0.0, 0.5, 1.0)}):
        rollout = Rollout(**shape)
        learner = combined(algorithm, policy_loss, aggregation, kind, dual_clip=dual_clip)
        step = Step(learner, rollout)
        config = learner.config
        expected = papers.policy_loss(
            as_papers(papers, learner, rollout, step.rows, step.models),
            papers.Loss(
                policy_loss, config.clip_low, config.clip_high, dual_clip, aggregation, config.constant_length,
                config.entropy_coef, config.kl.model_dump(), {"kind": kind, "low": 0.6, "high": 1.5},
            ),
        )  # fmt: skip
        assert step.loss["actor"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_the_formulas_derivative(papers, policy_loss, aggregation):
    """Central differences of the papers' loss, token by token. (CISPO's weight is held still: see `test_policy_loss`.)
    An episode's advantages and factors are equal for GSPO, whose gradient then is that of the sequence ratio."""
    rollout = Rollout(split=True)
    kind = "none" if policy_loss == "gspo" else "tis"
    learner = combined("dr_grpo", policy_loss, aggregation, kind, gamma=1.0)
    step = Step(learner, rollout)
    config = learner.config
    settings_of_loss = papers.Loss(
        policy_loss, config.clip_low, config.clip_high, None, aggregation, config.constant_length,
        config.entropy_coef, config.kl.model_dump(), {"kind": kind, "high": 1.5},
    )  # fmt: skip
    episodes = as_papers(papers, learner, rollout, step.rows, step.models)
    gradients = step.per_episode("actor")
    for index, episode in enumerate(episodes):
        for t, token in enumerate(episode):
            here, losses = float(token.new), []
            for token.new in (here + 1e-5, here - 1e-5):
                losses.append(papers.policy_loss(episodes, settings_of_loss))
            token.new = here
            derivative = (losses[0] - losses[1]) / 2e-5
            assert gradients["new", index][t] == pytest.approx(derivative, rel=1e-4, abs=1e-6)


# -- what nothing may depend on ---------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "policy_loss", "aggregation", "kind"), every())
def test_the_gradient_does_not_depend_on_layout(algorithm, policy_loss, aggregation, kind):
    """Feedback of 0, 10 or 100 tokens between turns (gamma 0.99, lambda 0.95), padding, 1 x 8 and 8 x 1 episodes."""
    learner = combined(algorithm, policy_loss, aggregation, kind)
    expected = Step(learner, Rollout(feedback=0), cut=8)
    for feedback, cut, padding in ((10, 1, 0), (100, 3, 5)):
        expected.assert_same(Step(learner, Rollout(feedback=feedback), cut=cut, padding=padding))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_the_rows_of_an_episode_are_one_time_line(algorithm, credit):
    """A row for each turn, or one for all: the same tokens, the same gradient."""
    for policy_loss, aggregation, kind in (("ppo", "token", "icepop"), ("gspo", "sequence", "seq_mask_tis")):
        learner = combined(algorithm, policy_loss, aggregation, kind, credit=credit)
        Step(learner, Rollout()).assert_same(Step(learner, Rollout(split=True), cut=1))


@pytest.mark.parametrize(("algorithm", "policy_loss", "aggregation", "kind"), every())
def test_nothing_at_a_masked_place_reaches_anything(algorithm, policy_loss, aggregation, kind):
    """What stands at prompts, feedback and padding, in everything a model says and everything a loss is given."""
    learner = combined(algorithm, policy_loss, aggregation, kind)

    def spoil(rows, models):
        for row, model in zip(rows, models, strict=True):
            masked = row.loss_weights == 0
            for array in (row.old_logprobs, *row.arrays.values(), model["new"], model["entropy"]):
                array[masked] = np.resize(BAD, masked.sum())

    spoiled = Step(learner, Rollout(garbage=BAD), change=spoil, padding=3)
    Step(learner, Rollout()).assert_same(spoiled)
    assert finite(spoiled.metrics)
    assert finite({"": [(value, 1.0) for value in learner.metrics(spoiled.rows).values()]})


def finite(metrics):
    return all(math.isfinite(number) for pairs in metrics.values() for pair in pairs for number in pair)


@pytest.mark.parametrize(("algorithm", "policy_loss", "aggregation", "kind"), every(("icepop", "seq_mask_tis")))
def test_nothing_at_a_dropped_place_reaches_anything(algorithm, policy_loss, aggregation, kind):
    """The first token of the fourth episode is dropped: in one run for a finite ratio out of bounds, in the others for
    numbers there that are none. `seq_mask_tis` drops the whole episode for either."""
    learner = combined(algorithm, policy_loss, aggregation, kind, kl={"coef": 0.1, "applied_to": "loss"})

    def first_token(rows):
        at = next(i for i, row in enumerate(rows) if row.episode_index == 3)
        return at, np.flatnonzero(rows[at].loss_weights > 0)[0]

    def drop(rows, models):
        i, t = first_token(rows)
        rows[i].arrays["actor"][t] = rows[i].old_logprobs[t] + 15

    expected = Step(learner, Rollout(), change=drop)
    assert sum(numerator for numerator, _ in expected.metrics["actor/correction/dropped_share"]) > 0
    for where, bad in (("actor", BAD), ("sampled", BAD[::-1])):

        def spoil(rows, models, where=where, bad=bad):
            i, t = first_token(rows)
            row, model = rows[i], models[i]
            ratio = row.arrays["actor"] if where == "actor" else row.old_logprobs
            arrays = [ratio, row.arrays["advantages"], row.arrays["reference"], model["new"], model["entropy"]]
            for array, value in zip(arrays, np.resize(bad, len(arrays)), strict=True):
                array[t] = value

        spoiled = Step(learner, Rollout(), change=spoil)
        assert spoiled.loss["actor"] == pytest.approx(expected.loss["actor"], rel=1e-6)
        for key, gradient in expected.gradient["actor"].items():
            np.testing.assert_allclose(spoiled.gradient["actor"][key], gradient, rtol=1e-5, atol=1e-8)
        assert finite(spoiled.metrics)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_dropped_token_does_not_spoil_the_rewards_of_others(algorithm):
    """KL in the reward of a token whose log-probability is none: where a correction drops it, it pays nothing."""
    learner = combined(algorithm, "ppo", "token", "icepop", kl={"coef": 0.1, "applied_to": "reward"})
    rollout = Rollout()
    rollout.rows[0].says["actor"][3] = float("nan")
    step = Step(learner, rollout)
    assert np.isfinite(step.rows[0].arrays["advantages"]).all()
    assert math.isfinite(step.loss["actor"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_extreme_ratios_are_finite(algorithm, policy_loss, kind, distance):
    """To the old policy, to the sampler and to the reference."""
    learner = combined(algorithm, policy_loss, "token", kind, kl={"coef": 0.1, "estimator": "k3", "applied_to": "loss"})

    def stretch(rows, models):
        for row, model in zip(rows, models, strict=True):
            counted = row.loss_weights > 0
            row.arrays["actor"][counted] = model["new"][counted] - distance
            row.old_logprobs[counted] = model["new"][counted] - distance / 2
            row.arrays["reference"][counted] = model["new"][counted] + distance

    step = Step(learner, Rollout(), change=stretch)
    assert math.isfinite(step.loss["actor"])
    assert all(np.isfinite(gradient).all() for gradient in step.gradient["actor"].values())
    assert finite(step.metrics)


LENGTHS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=2, max_size=4)


@settings(max_examples=40)
@given(
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.sampled_from(list(product(ALGORITHMS, LOSSES, AGGREGATIONS, CORRECTIONS))),
    st.sampled_from(["episode", "turn"]),
    st.sampled_from(["batch", "group", "none"]),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_ragged_groups_and_empty_actions(shape, combination, credit, norm, feedback, cut):
    """Turns and whole episodes without a token among them; nothing is divided by, and the layout changes nothing."""
    learner = combined(*combination, credit=credit, advantage_norm=norm)
    whole = Step(learner, Rollout(shape))
    assert all(math.isfinite(loss) for loss in whole.loss.values())
    whole.assert_same(Step(learner, Rollout(shape, feedback=feedback), cut=cut, padding=1), rtol=1e-4, atol=1e-6)


# -- groups that shrink -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["reinforce++_baseline", "rloo", "grpo", "dr_grpo"])
def test_a_group_that_shrank_below_two_is_left_out(algorithm):
    rollout = Rollout()
    for episode in rollout.groups[1].episodes[1:]:
        episode.reward = None
    rows = make_learner(algorithm).prepare(scored(rollout.groups))
    assert {row.group_index for row in rows} == {0, 2}
    assert len({row.episode_index for row in rows}) == 6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_members_without_a_reward_leave_the_statistics(algorithm):
    """The advantages of the others are those of a group without them."""
    shape, fewer = [[[2], [3], [1]], [[2], [2]]], [[[2], [3]], [[2], [2]]]
    with_gap, without = Rollout(shape), Rollout(fewer)
    with_gap.groups[0].episodes[2].reward = None
    without.groups[0].episodes = copy.deepcopy(with_gap.groups[0].episodes[:2])
    without.groups[1] = copy.deepcopy(with_gap.groups[1])
    one, other = (prepared(make_learner(algorithm), rollout) for rollout in (with_gap, without))
    assert len(one) == len(other) == 4
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.arrays["advantages"], theirs.arrays["advantages"])


@pytest.mark.parametrize("algorithm", ["reinforce++_baseline", "rloo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_groups_without_variance_move_nothing(algorithm, aggregation, norm):
    """Rewards of 0.1, whose mean in floating point is not 0.1."""
    rollout = Rollout([[[3, 1], [2], [4]], [[2], [2]]])
    for group in rollout.groups:
        for episode in group.episodes:
            episode.reward = 0.1
    learner = make_learner(algorithm, aggregation=aggregation, advantage_norm=norm)
    step = Step(learner, rollout)
    assert step.loss["actor"] == 0
    assert not any(gradient.any() for gradient in step.gradient["actor"].values())


# -- units and normalizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_rows_of_an_episode_are_one_unit(algorithm):
    """So that the ratio of an episode is whole in its micro-batch, and the units are as small as that allows."""
    rows = prepared(make_learner(algorithm), Rollout(split=True))
    assert [row.microbatch_key for row in rows] == [row.episode_index for row in rows]
    assert [row.episode_index for row in rows] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7]
    assert [row.group_index for row in rows] == [0] * 6 + [1] * 3 + [2] * 6


def test_denominators():
    """23 sampled tokens in 5 episodes; pre-training rows have a token mean of their own, whatever the aggregation."""
    rows = make_learner("rloo").prepare(scored(Rollout(SHAPE[:2]).groups))
    text = copy.deepcopy(rows[0])
    text.objective, text.loss_weights, text.arrays = (
        Objective.CROSS_ENTROPY,
        np.ones(len(text.token_ids), np.float32),
        {},
    )
    expected = {"token": 23.0, "sequence": 5.0, "constant": 35.0}
    for aggregation, denominator in expected.items():
        learner = make_learner("rloo", aggregation=aggregation, constant_length=7)
        rows = [*learner.prepare(scored(Rollout(SHAPE[:2]).groups)), text]
        assert learner.loss_normalizers(rows) == {
            Objective.POLICY_GRADIENT: denominator,
            Objective.CROSS_ENTROPY: float(len(text.token_ids)),
        }


def test_sequence_aggregation_counts_an_episode_once_however_many_rows_it_has():
    """At ratio 1 the gradients of an episode of one token and of one of three rows and nine tokens weigh the same."""
    rollout = Rollout([[[1], [4, 2, 3]]], split=True)
    learner = make_learner("dr_grpo", aggregation="sequence", policy_loss="gspo")  # old = new: a single optimizer step
    gradients = Step(learner, rollout).per_episode("actor")
    assert gradients["new", 0].sum() == pytest.approx(-gradients["new", 1].sum(), rel=1e-5)
    assert abs(gradients["new", 0].sum()) > 0.01


def test_an_episode_without_action_tokens_counts_as_an_episode_and_divides_by_nothing():
    rollout = Rollout([[[3], [4]]])
    rollout.groups[0].episodes[0].rows[0].segments[1].loss_weights = [0.0] * 3
    learner = make_learner("grpo", aggregation="sequence")
    step = Step(learner, rollout)
    assert step.loss_normalizers == {Objective.POLICY_GRADIENT: 2.0}
    assert math.isfinite(step.loss["actor"])
    assert not step.gradient["actor"]["new", 0].any()


def test_pretraining_rows_are_weighed_by_their_coefficient_and_teach_the_critic_nothing():
    """Four tokens at 1/2: log 2 a token, a tenth of it in the loss, divided by the objective's own denominator."""
    learner = make_learner("ppo", pretrain_coef=0.1)
    row = make_learner("grpo").prepare(scored(Rollout([[[4], [4]]]).groups))[0]
    row.objective, row.arrays = Objective.CROSS_ENTROPY, {}
    batch = pad([row], CPU, 9)
    logprobs = torch.where(batch.loss_weights > 0, math.log(0.5), float("nan")).requires_grad_()
    outputs = Outputs(logprobs=logprobs, entropy=-logprobs)
    normalizers = {Objective.CROSS_ENTROPY: 8 * float(batch.loss_weights.sum() / 4), Objective.POLICY_GRADIENT: 3.0}
    loss, metrics = learner.loss("actor", outputs, batch, normalizers)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * 4 * math.log(2) / 8)
    assert logprobs.grad.isfinite().all()
    assert set(metrics) == {"pretrain/loss"}
    assert metrics["pretrain/loss"][0] / metrics["pretrain/loss"][1] == pytest.approx(math.log(2))
    loss, metrics = learner.loss("critic", Outputs(values=torch.full_like(logprobs, float("nan"))), batch, normalizers)
    assert loss.item() == 0
    assert metrics == {}
