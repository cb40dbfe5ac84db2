"""The shipped recipes: each can be run, and says what the paper or script that it cites says."""

import pytest
import yaml

from envgym.cli import main
from envgym.config.recipes import FOLDER, recipe_names
from envgym.config.resolve import resolve

ALGORITHMS = ["ppo", "reinforce++", "reinforce++_baseline", "rloo", "grpo", "dr_grpo"]
VARIANTS = ["dapo", "prorl", "gspo", "cispo"]

# learner, episodes a rollout, episodes an optimizer step, group size, learning rate, (clip_low, clip_high),
# (KL coefficient, its estimator, where it is applied), aggregation
CITED = {
    "ppo": ("ppo", 1024, 128, 1, 5e-7, (0.2, 0.2), (0.01, "k1", "reward"), "token"),
    "reinforce++": ("reinforce++", 1024, 128, 1, 5e-7, (0.2, 0.2), (1e-4, "k1", "reward"), "token"),
    "reinforce++_baseline": ("reinforce++_baseline", 1024, 128, 8, 5e-7, (0.2, 0.2), (1e-3, "k2", "loss"), "token"),
    "rloo": ("rloo", 512, 256, 4, 1e-6, None, (0.03, "k1", "reward"), "token"),
    "grpo": ("grpo", 512, 512, 8, 1e-6, (0.2, 0.2), None, "sequence"),
    "dr_grpo": ("dr_grpo", 1024, 128, 8, 1e-6, (0.2, 0.2), None, "constant"),
    "dapo": ("grpo", 8192, 512, 16, 1e-6, (0.2, 0.28), None, "token"),
    "prorl": ("reinforce++_baseline", 8192, 1024, 16, 1e-6, (0.2, 0.27), (1e-4, "k2", "loss"), "token"),
    "gspo": ("grpo", 8192, 2048, 16, 1e-6, (3e-4, 4e-4), None, "sequence"),
    "cispo": ("grpo", 8192, 512, 16, 1e-6, (1.0, 4.0), None, "token"),
}
# What a recipe has beyond that.
ALSO = {
    "ppo": {"gae_lambda": 1.0, "value_clip": 0.5, "advantage_norm": "batch"},
    "reinforce++": {"gamma": 1.0, "advantage_norm": "batch"},
    "reinforce++_baseline": {"advantage_norm": "batch"},
    "rloo": {"policy_loss": "reinforce", "advantage_norm": "none"},
    "grpo": {"policy_loss": "ppo", "advantage_norm": "none"},
    "dr_grpo": {"constant_length": 3000},
    "dapo": {"weight_decay": 0.1, "warmup_steps": 20 * 16},
    "prorl": {"advantage_norm": "batch"},
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo", "betas": [0.9, 0.95]},
}


def stages_of(recipe):
    """On a model that brings no settings of its own."""
    return resolve({"env": "math_verify", "model": "./some-model"}, recipe=recipe).stages


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_resolves_on_the_starter_and_its_saved_form_is_the_same(recipe, capsys, tmp_path):
    needed = ["roles.teacher.model=./teacher"] if recipe == "distill" else []
    assert main(["config", "--recipe", recipe, "--env", "math_verify", *needed]) == 0
    printed = capsys.readouterr().out
    saved = tmp_path / "config.yaml"
    saved.write_text(printed)
    assert resolve(file=saved).to_yaml() == printed
    assert yaml.safe_load(printed)["recipe"] == recipe


def test_the_algorithms_and_the_recipes_built_on_them_ship():
    assert set(ALGORITHMS + VARIANTS) <= set(recipe_names())
    assert set(CITED) == set(ALSO) == set(ALGORITHMS + VARIANTS)


@pytest.mark.parametrize("recipe", CITED)
def test_a_recipe_says_what_its_source_says(recipe):
    for stage in stages_of(recipe):
        learner, rollout = stage.learner.settings, stage.rollout
        episodes = rollout.tasks_per_step * rollout.group_size
        kl = learner["kl"]
        assert CITED[recipe] == (
            stage.learner.name,
            episodes,
            episodes // learner["minibatches"],
            rollout.group_size,
            learner["lr"],
            None if learner["policy_loss"] == "reinforce" else (learner["clip_low"], learner["clip_high"]),
            (kl["coef"], kl["estimator"], kl["applied_to"]) if kl["coef"] else None,
            learner["aggregation"],
        )
        assert {key: learner[key] for key in ALSO[recipe]} == ALSO[recipe]


def test_the_critic_learns_faster_than_the_policy():
    [stage] = stages_of("ppo")
    assert stage.roles["critic"].learner == {"lr": 9e-6}


@pytest.mark.parametrize(("recipe", "filters"), [("dapo", True), ("prorl", True), ("cispo", True), ("gspo", False)])
def test_dynamic_sampling(recipe, filters):
    assert all(stage.rollout.filter.zero_variance == filters for stage in stages_of(recipe))


@pytest.mark.parametrize("recipe", ["dapo", "cispo"])
def test_the_penalty_for_length_ends_where_the_budget_does(recipe):
    """20480 tokens of which the last 4096 are penalised, by half of the distance from right to wrong."""
    [stage] = stages_of(recipe)
    shaping = stage.learner.settings["shaping"]
    assert shaping["overlong_length"] == stage.rollout.max_tokens == 20480
    assert (shaping["overlong_buffer"], shaping["overlong_factor"]) == (4096, 0.5)


def test_the_constant_length_of_dr_grpo_is_the_budget():
    [stage] = stages_of("dr_grpo")
    assert stage.learner.settings["constant_length"] == stage.rollout.max_tokens


def test_prorl_resets_its_reference_by_a_second_stage():
    stages = stages_of("prorl")
    assert len(stages) == 2
    assert 200 <= stages[0].steps <= 500
    settings = stages[0].learner.settings
    assert settings["correction"] == {"kind": "icepop", "low": 0.5, "high": 5.0}
    assert settings["shaping"]["stop_properly"] == 0.0


def test_the_list_says_what_each_recipe_is_in_one_line(capsys):
    assert main(["config", "recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(recipe_names())
    for name in ALGORITHMS + VARIANTS:
        assert lines[name].endswith("."), f"{name}: its first comment line is a sentence"


@pytest.mark.parametrize("recipe", CITED)
def test_a_recipe_cites_a_paper_with_its_year(recipe):
    comment = "".join(line for line in (FOLDER / f"{recipe}.yaml").read_text().splitlines(True) if line.startswith("#"))
    assert "(20" in comment
    assert '"' in comment
