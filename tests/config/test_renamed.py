"""Settings under their old names: accepted wherever settings are read, with one note for each name."""

import warnings

import pytest
import yaml

from envgym.cli import main
from envgym.config.recipes import recipe_model_folder
from envgym.config.renamed import OLD_NAMES, RENAMED, rename_settings
from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig
from envgym.config.words import nest_keys, parse_overrides
from envgym.errors import ConfigError, RenamedSetting
from envgym.openrlhf.table import entries
from envgym.run_folder import RunFolder, policy_of_run

ENV = {"env": "math_verify"}
OLD = {"rollout": {"tasks": 4}, "learner": {"name": "ppo", "epochs": 2, "kl": {"place": "loss"}}}
NAMED = {"name": "first", **OLD}


def write(path, settings):
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def check(settings=(), **sources):
    with pytest.warns(RenamedSetting) as notes:
        stage = resolve({**ENV, **dict(settings)}, **sources).stages[-1]
    values = stage.learner.settings
    assert (stage.rollout.tasks_per_step, values["update_epochs"], values["kl"]["applied_to"]) == (4, 2, "loss")
    assert {str(note.message) for note in notes} == {
        f"{old} is now {new}" for old, new in RENAMED.items() if old != "do"
    }


@pytest.mark.parametrize("settings", [OLD, {"stages": [OLD]}, {"stages": [NAMED], "steps": 3}])
def test_in_files_and_recipes(settings, tmp_path):
    check(file=write(tmp_path / "run.yaml", settings))
    check(recipe=str(write(tmp_path / "recipe.yaml", settings)))


def test_in_python_and_on_the_command_line(tmp_path):
    check(OLD)
    dotted = {"learner": "ppo", "rollout.tasks": 4, "learner.epochs": 2, "learner.kl.place": "loss"}
    check(nest_keys(dotted.items()))
    words = [f"{key}={value}" for key, value in dotted.items()]
    check(parse_overrides(words))
    file = write(tmp_path / "run.yaml", {"stages": [{"name": "first", "learner": "ppo"}]})
    check(parse_overrides([f"stages.first.{word}" for word in words[1:]]), file=file)


def test_an_old_name_overrides_the_new_one_of_a_lower_layer(tmp_path):
    file = write(tmp_path / "run.yaml", {"rollout": {"tasks_per_step": 9}})
    with pytest.warns(RenamedSetting):
        assert resolve({**ENV, "rollout": {"tasks": 4}}, file=file).stages[0].rollout.tasks_per_step == 4


def test_a_saved_configuration_is_read(tmp_path):
    config = resolve({**ENV, "learner": "ppo", "rollout": {"tasks_per_step": 5}})
    saved = rename_settings(yaml.safe_load(config.to_yaml()), OLD_NAMES)
    assert {"do", "kind"} & saved["stages"][0].keys() == {"do"}
    run = tmp_path / "run"
    run.mkdir()
    with pytest.warns(RenamedSetting, match="^do is now kind$"):
        assert resolve(file=write(run / "config.yaml", saved)) == config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunConfig(**saved) == config  # evaluations and checkpoints are read without a note
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert policy_of_run(run) == RunFolder(run).model


def test_a_setting_with_both_names_is_an_error():
    with pytest.raises(
        ConfigError, match=r"^rollout.tasks and rollout.tasks_per_step are the same setting: leave out r"
    ):
        resolve({**ENV, "rollout": {"tasks": 4, "tasks_per_step": 4}})


def test_names_that_are_keys_elsewhere_stay():
    settings = {"engine": {"kind": "vllm"}, "epochs": 1, "eval": {"tasks": 3}, "stages": {"do": {"epochs": 2}}}
    assert rename_settings(settings) == settings


def test_a_learner_that_defines_an_old_name_is_told(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from envgym.learner import LearnerConfig\nfrom envgym.learners.sft import SFT\n\n\n"
        "class Settings(LearnerConfig):\n    epochs: int = 4\n\n\nclass Mine(SFT):\n    Config = Settings\n"
    )
    with pytest.raises(
        ConfigError, match=r"^learner\.epochs is now learner\.update_epochs: rename it in learner .*mine"
    ):
        resolve({**ENV, "agent": "replay", "learner": f"{file}:Mine"})


def test_a_recipes_model_keeps_its_folder(tmp_path):
    recipe = {"new_model": {"layers": 1}, "learner": "sft", "rollout": {"tasks_per_step": 4}}
    folder = recipe_model_folder(str(write(tmp_path / "own.yaml", recipe)))
    write(tmp_path / "own.yaml", rename_settings(recipe, OLD_NAMES))
    with pytest.warns(RenamedSetting):
        assert recipe_model_folder(str(tmp_path / "own.yaml")) == folder


def test_the_command_line_prints_each_note_once(tmp_path, capsys):
    file = write(tmp_path / "run.yaml", {**OLD, "do": "train"})
    assert main(["config", "--env", "math_verify", "--config", str(file), "rollout.tasks=8", "learner.epochs=2"]) == 0
    out, err = capsys.readouterr()
    assert sorted(err.splitlines()) == sorted(f"envgym: note: {old} is now {new}" for old, new in RENAMED.items())
    assert "tasks_per_step: 8" in out
    assert main(["rollout", "--env", "math_verify", "--model", "m", "--out", "e.jsonl", "rollout.tasks=8"]) == 2
    assert "rollout.tasks is a setting of training: envgym rollout takes --tasks" in capsys.readouterr().err


def test_the_table_of_openrlhf_has_the_new_names():
    settings = [entry["setting"] for entry in entries().values() if isinstance(entry.get("setting"), str)]
    assert not RENAMED.keys() & set(settings)
