"""What `--model` may be."""

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError
from envgym.training.run_folder import policy_of_run


def a_run(folder, **settings):
    """A run's folder, as far as it says where its policy is."""
    folder.mkdir()
    (folder / "config.yaml").write_text(resolve({"env": "math_verify", **settings}).to_yaml())
    return folder


def finish(stage):
    (stage / "model").mkdir(parents=True)
    (stage / "model" / "config.json").write_text("{}")
    return stage / "model"


def test_a_run_stands_for_the_policy_it_left(tmp_path):
    run = a_run(tmp_path / "run")
    left = finish(run)
    assert policy_of_run(run) == left


def test_a_run_of_several_stages_stands_for_what_the_last_left(tmp_path):
    run = a_run(tmp_path / "run", recipe="sft_grpo")
    finish(run / "1-sft")
    with pytest.raises(ConfigError, match=r"has not ended.*--resume"):
        policy_of_run(run)
    left = finish(run / "2-grpo")
    assert policy_of_run(run) == left


def test_a_stage_of_a_learner_in_a_file_has_a_plain_folder_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from envgym.learners.sft import SFT\n\nclass Mine(SFT):\n    '''Another name.'''\n"
    )
    run = a_run(tmp_path / "run", recipe="sft_grpo", learner=f"{tmp_path}/mine.py:Mine")
    left = finish(run / "2-mine-2")
    assert policy_of_run(run) == left


def test_another_folder_is_left_alone(tmp_path):
    assert policy_of_run(tmp_path) == tmp_path
