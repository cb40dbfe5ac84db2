"""Settings of the policy-gradient learners: each algorithm's defaults, and contradictions refused in one line."""

from importlib.metadata import entry_points

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError
from envgym.registry import load_component

ALGORITHMS = ("ppo", "reinforce++", "reinforce++_baseline", "rloo", "grpo", "dr_grpo")


def config_of(name, **settings):
    return load_component("learner", name).Config(name=name, **settings)


def test_a_learner_that_has_settings_has_them_in_its_file():
    learners = [load_component("learner", entry.name) for entry in entry_points(group="envgym.learners")]
    places = {learner.__module__: learner.Config.__module__ for learner in learners}
    assert "envgym.learners.dpo" in places
    elsewhere = [learner for learner, place in places.items() if place not in (learner, "envgym.learner")]
    assert elsewhere == []


@pytest.mark.parametrize(
    ("name", "place", "estimator", "norm", "aggregation", "credit"),
    [
        ("ppo", "reward", "k1", "batch", "token", "turn"),
        ("reinforce++", "reward", "k1", "batch", "token", "turn"),
        ("reinforce++_baseline", "loss", "k2", "batch", "token", "episode"),
        ("rloo", "reward", "k1", "none", "token", "episode"),
        ("grpo", "loss", "k3", "none", "sequence", "episode"),
        ("dr_grpo", "loss", "k3", "none", "constant", "episode"),
    ],
)
def test_defaults(name, place, estimator, norm, aggregation, credit):
    for config in (config_of(name), config_of(name, kl={"coef": 0.0})):
        assert (config.kl.applied_to, config.kl.estimator) == (place, estimator)
        assert (config.advantage_norm, config.aggregation, config.credit) == (norm, aggregation, credit)
        assert config.kl.coef == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_coefficient_of_0_needs_no_reference_model(name):
    kind = load_component("learner", name)
    assert "reference" not in kind(kind.Config(name=name)).roles
    reference = kind(kind.Config(name=name, kl={"coef": 0.01})).roles["reference"]
    assert reference.scored
    assert not reference.trained


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("settings", "recomputes", "scored"),
    [
        ({}, False, False),
        ({"old_logprobs": "rollout", "update_epochs": 2}, False, False),
        ({"old_logprobs": "recompute"}, True, False),  # the loss's own forward pass says it
        ({"minibatches": 2}, True, True),
        ({"update_epochs": 2}, True, True),
        ({"policy_loss": "gspo"}, True, False),
        ({"correction": {"kind": "tis"}}, True, False),
        ({"correction": {"kind": "icepop"}, "minibatches": 4}, True, True),
    ],
)
def test_the_actor_scores_only_where_its_own_pass_would_not_say_it(name, settings, recomputes, scored):
    kind = load_component("learner", name)
    learner = kind(kind.Config(name=name, **settings))
    assert learner.config.recomputes is recomputes
    assert learner.roles["actor"].scored is scored
    assert learner.roles["actor"].trained


@pytest.mark.parametrize("name", ALGORITHMS)
def test_entropy_is_differentiated_only_for_its_bonus(name):
    kind = load_component("learner", name)
    assert not kind(kind.Config(name=name)).roles["actor"].entropy
    assert kind(kind.Config(name=name, entropy_coef=0.01)).roles["actor"].entropy


CONTRADICTIONS = {
    ("policy_loss=gspo", "old_logprobs=rollout"): "key 'old_logprobs': policy_loss gspo compares the trainer's own",
    ("correction.kind=tis", "old_logprobs=rollout"): "key 'old_logprobs': correction tis compares the trainer's own",
    ("correction.low=2", "correction.high=1"): "key 'correction.high': it is below correction.low (2)",
    ("correction.low=9",): "key 'correction.high': it is below correction.low (9)",
    ("policy_loss=cispo", "dual_clip=3"): "key 'dual_clip': policy_loss cispo has no clipped ratio",
    ("policy_loss=reinforce", "dual_clip=3"): "key 'dual_clip': policy_loss reinforce has no clipped ratio",
    ("dual_clip=0.5",): "key 'dual_clip': must be more than 1",
    ("kl.coef=0", "kl.target=0.1"): "key 'kl.target': a target adapts kl.coef, which is 0",
    ("kl.coef=-1",): "key 'kl.coef': must be at least 0",
    ("kl.applied_to=nowhere",): "key 'kl.applied_to': must be 'reward' or 'loss'",
    ("kl.estimater=k1",): "unknown key 'kl.estimater'. Did you mean 'kl.estimator'?",
    ("kl_coef=0.1",): "unknown key 'kl_coef'.",
    ("kl=0.1",): "key 'kl' holds nested keys",
    ("shaping.clip=[1, -1]",): "key 'shaping.clip': the lower bound comes first",
    ("shaping.overlong_length=9",): "key 'shaping.overlong_buffer': shaping.overlong_length and",
    ("shaping.overlong_buffer=9",): "key 'shaping.overlong_buffer': shaping.overlong_length and",
    ("shaping.overlong_length=9", "shaping.overlong_buffer=10"): "it cannot be longer than shaping.overlong_length (9)",
    ("gamma=1.1",): "key 'gamma': must be at most 1",
    ("gae_lambda=1",): "unknown key 'gae_lambda'",
}


@pytest.mark.parametrize(("words", "message"), CONTRADICTIONS.items(), ids=map(" ".join, CONTRADICTIONS))
def test_contradictions_are_refused_in_one_line(words, message):
    from envgym.config.words import parse_overrides

    settings = parse_overrides([f"learner.{word}" for word in words])
    with pytest.raises(ConfigError) as refused:
        resolve({"env": "math_verify", **settings}, recipe="grpo")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_saved_config_is_the_same_again(name):
    """Also where only a part of a section was said: the rest is the algorithm's default."""
    config = config_of(name, kl={"coef": 0.1, "target": 0.2}, correction={"kind": "icepop"}, shaping={"clip": [-1, 1]})
    kind = type(config)
    assert kind.model_validate(config.model_dump(mode="json")) == config
