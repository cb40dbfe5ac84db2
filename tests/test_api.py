"""The names that `import envgym` offers, and runs from Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import envgym
from envgym.api import EvalResult, _plain_settings
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.episodes.files import write_episodes
from envgym.errors import ConfigError, DataError, EnvgymError
from envgym.loading import load_class, short_name, target_of
from envgym.types import Episode, Message, Outcome, Task

PROGRAM = """
import envgym, importlib, pkgutil
before = {name: getattr(envgym, name) for name in envgym.__all__}
for module in pkgutil.iter_modules(envgym.__path__):
    importlib.import_module(f"envgym.{module.name}")
changed = [name for name, value in before.items() if getattr(envgym, name) != value]
assert not changed, changed
"""
PARTS = """
import json, sys
import envgym
from envgym.agents.token_level import SingleTurn
from envgym.learners.rloo import RLOO

PROBLEMS = [{"prompt": f"Repeat {n}.", "answer": str(n)} for n in range(40)]
SMALL = {
    "model": sys.argv[1], "name": "first", "steps": 1, "rollout.tasks_per_step": 2, "rollout.group_size": 2, "seed": 3,
    "rollout.max_tokens": 4, "eval.tasks": 4, "engine": {"kind": "transformers"},
}

@envgym.reward
def exact(completion, answer):
    return float(completion.strip() == answer)

class Mine(SingleTurn):
    pass

class Own(RLOO):
    pass
"""
TRAIN = """
result = envgym.train(SMALL, env=exact, agent=Mine, learner=LEARNER, data=PROBLEMS, quiet=True)
assert result.to_dict() == json.loads((result.folder / "summary.json").read_text())
assert (result.steps, result.initial_score, len(result.interval)) == (1, 0.0, 2)
scores = envgym.evaluate(SMALL, env=exact, data=PROBLEMS, model=result.model, quiet=True)
assert scores.to_dict() == json.loads((scores.folder / "result.json").read_text())
assert (scores.score, scores.failures, len(scores.interval)) == (0.0, {}, 2)
"""


def run(tmp_path, *words, **options):
    return subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_names_stay_what_they_are_once_every_module_is_imported(tmp_path):
    """A sub-package of the same name would take a function's place when it is imported."""
    done = run(tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = envgym.no_such_name


def test_the_import_takes_nothing_with_it(tmp_path):
    done = run(tmp_path, "-c", "import sys, envgym; print([n for n in sys.modules if n.startswith('envgym.')])")
    assert done.stdout == "[]\n"


def test_a_script_trains_with_its_own_parts_and_the_run_can_be_resumed(tmp_path, tiny_model, monkeypatch):
    """Workers import the learner's file, and `--resume` the others', without starting the script's run again."""
    train = TRAIN.replace("LEARNER", "Own").replace("\n", "\n    ")
    (tmp_path / "script.py").write_text(f'{PARTS}\nif __name__ == "__main__":{train}')
    done = run(tmp_path, "script.py", str(tiny_model))
    assert done.returncode == 0, done.stderr
    [stage] = yaml.safe_load((tmp_path / "runs" / "first" / "config.yaml").read_text())["stages"]
    names = [stage[kind]["name"] for kind in ("env", "agent", "learner")]
    assert names == [f"{tmp_path / 'script.py'}:{name}" for name in ("exact", "Mine", "Own")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["envgym", str(tiny_model)])
    assert main(["config", "--config", "runs/first/config.yaml"]) == 0


def test_what_is_defined_in_a_session_runs_there_and_nowhere_else(tmp_path, tiny_model, monkeypatch, capsys):
    refused = "try: envgym.train(SMALL, env=exact, learner=Own)\nexcept envgym.EnvgymError as error: print(error)\n"
    train = TRAIN.replace("LEARNER", '"rloo"').replace("quiet=True", "quiet=True, debug=True")
    done = run(tmp_path, "-", str(tiny_model), input=PARTS + refused + train)
    assert done.returncode == 0, done.stderr
    assert "learner Own is defined in a notebook or an interactive session" in done.stdout
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "first"]) == 2
    assert "exact was defined in a notebook or an interactive session and exists only there" in capsys.readouterr().err


def test_a_file_that_starts_a_run_while_it_is_imported_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(f"import envgym\n{ENV}\nenvgym.train(env=Echo)\n")
    assert main(["config", "--env", "script.py:Echo"]) == 2
    assert 'script.py starts a run while it is imported: put the call below `if __name__ == "__main__":`' in (
        capsys.readouterr().err
    )


def test_a_script_may_train_on_its_own_environment_as_its_last_line(tmp_path):
    (tmp_path / "script.py").write_text(f'import envgym\n{ENV}\nenvgym.train(env=Echo, agent="no_such")\n')
    assert "NameNotFound: there is no agent 'no_such'" in run(tmp_path, "script.py").stderr  # after its environment


ENV = """
class Echo(envgym.Env):
    async def reset(self, *, seed=None, options=None): return "Say something.", {}
    async def step(self, action): return None, 1.0, True, False, {}
"""


class Echo(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    async def step(self, action):
        return None, 1.0, True, False, {}


def test_classes_become_targets_that_load_the_same_class():
    class Local(Echo):
        pass

    assert list(map(short_name, ("__main__:Echo", "a/b.py:Echo", "judge"))) == ["Echo", "b", "judge"]
    target = target_of(Echo)
    assert target == "tests.test_api:Echo"
    assert load_class(target, (envgym.Env,), "environment") is Echo
    assert target_of(envgym.ToolEnv) == "envgym.env.tools:ToolEnv"
    with pytest.raises(ConfigError, match=r"Local is no top-level name of .*: define it at the top level of a file"):
        target_of(Local)


def test_settings_may_hold_classes_and_data(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path))
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "1 + 1?", "answer": 2}, {"question": "1 + 2?", "answer": 3}]
    overrides = {"data": {"test_path": rows[:1]}, "model": Path("m")}
    settings = _plain_settings({"env.name": Echo, "data.path": rows}, overrides)
    assert settings == {
        "env": {"name": target_of(Echo)},
        "data": {name: settings["data"][name] for name in ("path", "test_path")},
        "model": "m",
    }
    path = Path(settings["data"]["path"])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    dataset = datasets.Dataset.from_list(rows)
    config = resolve(_plain_settings({"env": "math_verify", "stages": [{"data": dataset, "learner": "grpo"}]}, {}))
    assert config.stages[0].data == {"path": str(path)}
    assert settings["data"]["test_path"] != str(path)
    with pytest.raises(DataError, match="a row of data cannot be written as JSON: Object of type set"):
        _plain_settings({"data": [{"prompt": {1}}]}, {})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env": Echo()}, r"'env' is a name, .* In Python it may also be a class or a reward function; envgym.reward"),
        ({"env": [Echo, Echo]}, r"envgym.reward\(\[f, g\]\) makes one of several"),
        ({"env": Echo, "learner": 5}, "'learner' is a name, .* In Python it may also be a class$"),
        (
            {"env": Echo, "data": [{"question": "q"}]},
            r"takes no data \(an Env class does with spec_class = ",
        ),
        ({"env": "math_verify", "data": []}, "data has no rows"),
        ({"env": "math_verify", "data": ["a"]}, "a row of data is a mapping, .* not 'a'"),
        ({"env": "math_verify", "data": "nowhere.jsonl"}, "data.path: there is no file or folder nowhere.jsonl"),
        ({"env": "math_verify", "data.path": []}, "data has no rows"),
        ("path/of/model", "settings are a mapping, or keywords such as env=… and model=…, not 'path/of/model'"),
    ],
)
def test_what_cannot_be_a_setting_is_reported_with_what_can(settings, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvgymError, match=says):
        envgym.train(settings, quiet=True)


def test_the_folder_of_an_evaluation_is_no_model(tmp_path):
    (tmp_path / "config.yaml").write_text("parts: []\n")
    with pytest.raises(ConfigError, match="holds no model, and is not the folder of a run"):
        envgym.evaluate(env=Echo, model=tmp_path, quiet=True, evals_dir=str(tmp_path / "evals"))


class Elsewhere(envgym.Agent):
    async def run(self, env, task, sampler, *, seed):
        return "five"


class Signed(Echo):
    async def step(self, action):
        return None, -2.0, True, False, {}


def test_rewards_that_are_no_scores_are_in_the_result(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {"engine.kind": "transformers", "eval.tasks": 2, "eval.samples": 1, "rollout.max_tokens": 2}
    result = envgym.evaluate(settings, env=Signed, model=tiny_model, debug=True)
    assert (result.score, result.reward, result.model) == (None, -2.0, str(tiny_model))
    assert "has rewards outside [0, 1] and therefore no score" in "".join(capsys.readouterr())


def test_an_agent_that_returns_no_episode_is_reported(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"engine.kind": "transformers", "eval.tasks": 2, "eval.samples": 1}
    result = envgym.evaluate(settings, env=Echo, agent=Elsewhere, model=tiny_model, debug=True, quiet=True)
    assert result.failures == {"environment": result.n_episodes}
    episode = json.loads((result.folder / "episodes.jsonl").read_text().splitlines()[0])
    assert episode["outcome"]["message"] == "TypeError: the agent must return an Episode, not 'five'"


def test_an_evaluation_gives_its_numbers_and_episodes_as_data_frames(tmp_path):
    said = [Message("system", "Be brief."), Message("user", "2 + 2?"), Message("assistant", "4")]
    episode = Episode(
        "e", Task("t"), Outcome.finish(), reward=1.0, score=0.5, messages=said, metrics={"score": 9.0, "k": 2.0}
    )
    write_episodes(tmp_path / "episodes.jsonl", [episode])
    environments = {"sums": {"score": 0.5, "ci95": [0.1, 0.9], "n_tasks": 1}}
    result = EvalResult(tmp_path, "m", 0.5, None, 1.0, 1, 1, {}, environments, {})
    numbers = {"ci95_low": 0.1, "ci95_high": 0.9, "score": 0.5, "n_tasks": 1}
    assert result.metrics.to_dict("records") == [{"environment": "sums", **numbers}]
    [row] = result.episodes().to_dict("records")
    assert (row["prompt"], row["completion"], row["score"], row["k"]) == ("2 + 2?", "4", 0.5, 2.0)
