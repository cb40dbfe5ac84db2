"""Stages of a run: their names, recipes and repetitions, and what one takes from another."""

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, NameNotFound


@pytest.fixture
def stages(tmp_path):
    """`stages({…}, …)`: the resolved stages of a recipe that has these, with further `own` settings."""
    import yaml

    def stages(*of_recipe, **own):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"env": "math_verify", "stages": list(of_recipe)}))
        config = resolve({"model": "./base", **own}, recipe=str(path))
        assert resolve(file=saved(tmp_path, config)).to_yaml() == config.to_yaml()
        return config

    def saved(folder, config):
        (folder / "saved.yaml").write_text(config.to_yaml())
        return folder / "saved.yaml"

    return stages


SFT = {"agent": "replay", "learner": "sft"}
GRPO = {"learner": "grpo"}


def test_a_stage_goes_on_with_what_the_one_before_it_trained(stages):
    config = stages(SFT, {**GRPO, "name": "rl"}, GRPO)
    assert config.stage_names == ["sft", "rl", "grpo"]
    assert [stage.model for stage in config.stages] == ["./base", "stage:sft", "stage:rl"]


def test_a_model_of_its_own_counts(stages):
    config = stages(SFT, {**SFT, "name": "rm", "model": "./other"}, {**GRPO, "model": "stage:sft"})
    assert [stage.model for stage in config.stages] == ["./base", "./other", "stage:sft"]


def test_stages_that_do_not_train_leave_no_model(stages):
    config = stages(
        SFT, {**GRPO, "name": "drawn", "kind": "rollout"}, {**SFT, "name": "again", "data": {"path": "stage:drawn"}}
    )
    assert [stage.model for stage in config.stages] == ["./base", "stage:sft", "stage:sft"]
    assert config.stages[2].data == {"path": "stage:drawn"}


def test_stages_of_one_learner_have_names_of_their_own(stages):
    assert stages(GRPO, GRPO).stage_names == ["grpo", "grpo-2"]


def test_a_stage_is_repeated_each_from_the_one_before(stages):
    config = stages({**GRPO, "name": "round", "repeat": 3})
    assert config.stage_names == ["round-1", "round-2", "round-3"]
    assert [stage.model for stage in config.stages] == ["./base", "stage:round-1", "stage:round-2"]


def test_a_stage_may_name_a_recipe_below_its_own_settings(stages):
    config = stages({"name": "first", "recipe": "dpo", "learner": {"beta": 0.3}, "data": {"path": __file__}}, GRPO)
    learner = config.stages[0].learner
    assert (learner.name, learner.settings["beta"], learner.settings["lr"]) == ("dpo", 0.3, 5e-7)
    assert (config.stages[0].env.name, config.stages[1].env.name) == ("recorded", "math_verify")
    assert config.stages[0].epochs == 1


def test_settings_of_one_stage_are_said_by_its_name(stages):
    config = stages(SFT, GRPO, stages={"sft": {"steps": 7}}, steps=5)
    assert [stage.steps for stage in config.stages] == [7, 5]


def test_commands_that_only_sample_take_the_model_that_they_are_given(tmp_path):
    (tmp_path / "run.yaml").write_text("recipe: sft_grpo\nenv: math_verify")
    for model, sampled in (({"model": "./mine"}, "./mine"), ({}, "stage:sft")):
        config = resolve(model, file=tmp_path / "run.yaml", samples_only=True)
        assert config.stages[-1].model == sampled
    assert resolve({"model": "./mine"}, file=tmp_path / "run.yaml").stages[-1].model == "stage:sft"


def test_a_config_file_may_set_stages_that_its_recipe_names(tmp_path):
    (tmp_path / "run.yaml").write_text("recipe: sft_grpo\nenv: math_verify\nstages: {sft: {steps: 3}}")
    config = resolve(file=tmp_path / "run.yaml")
    assert (config.stage_names, config.stages[0].steps) == (["sft", "grpo"], 3)


def test_a_recipe_that_nothing_would_read_is_refused(tmp_path):
    (tmp_path / "saved.yaml").write_text(resolve({"env": "math_verify"}).to_yaml())
    assert resolve({"recipe": "grpo"}, file=tmp_path / "saved.yaml").recipe == "grpo"
    with pytest.raises(ConfigError, match="leave out recipe rloo"):
        resolve({"recipe": "rloo"}, file=tmp_path / "saved.yaml")
    (tmp_path / "own.yaml").write_text("recipe: dpo\nenv: math_verify")
    with pytest.raises(ConfigError, match="names another recipe"):
        resolve(recipe=str(tmp_path / "own.yaml"))
    assert resolve({"env": "math_verify", "recipe": "rloo"}, recipe="grpo").recipe == "rloo"


@pytest.mark.parametrize(
    ("of_recipe", "own", "says"),
    [
        ([SFT, {**GRPO, "model": "stage:stf"}], {}, r"stage 2: there is no stage 'stf' before it. Did you mean 'sft'"),
        ([{**SFT, "model": "stage:grpo"}, GRPO], {}, "stage 1: there is no stage 'grpo' before it"),
        ([SFT, GRPO], {"stages": {"rl": {"steps": 1}}}, "stages.rl: there is no such stage"),
        ([SFT, GRPO], {"stages": {"sft": 3}}, r"key 'stages.sft' holds nested keys"),
        ([{**SFT, "repeat": 0}], {}, "repeat is a number of times"),
        ([{**SFT, "recipe": "rlhf"}], {}, "recipe rlhf is a whole run"),
        ([{"agent": "replay", **GRPO}], {}, "learner grpo trains on episodes that the policy samples"),
    ],
)
def test_what_cannot_be_is_one_line(stages, of_recipe, own, says):
    with pytest.raises(ConfigError, match=says):
        stages(*of_recipe, **own)


def test_an_unknown_recipe_of_a_stage_is_named(stages):
    with pytest.raises(NameNotFound, match="no recipe 'dpoo'"):
        stages({"recipe": "dpoo"})
