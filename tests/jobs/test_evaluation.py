"""An evaluation as a whole: what it leaves in its folder, and that a kill costs nothing that had ended."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgym import api
from envgym.errors import ConfigError, EnvgymError, RunError
from envgym.evaluation.result import result_of
from envgym.evaluation.suite import Suite
from envgym.jobs.evaluation import new_evaluation, run_evaluation
from envgym.jobs.folder import JobFolder, find_folder
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model
from envgym.types import Group

ENVGYM = Path(sys.executable).with_name("envgym")

COUNTED = '''
import time
from pathlib import Path

import envgym


class Counted(envgym.Env):
    """Writes down every episode that begins; pays by the length of the answer; some tasks break."""

    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        with open("began.txt", "a") as file:
            file.write(self.task.id + "\\n")
        if Path("slow").exists():
            import asyncio

            await asyncio.sleep(0.05)
        return [{"role": "user", "content": "say something"}], {}

    async def step(self, action):
        if self.task.id.endswith("3") and not Path("mended").exists():
            raise ValueError("broken")
        return [], None, True, False, {"score": min(1.0, len(action.text) / 20), "answer": action.text[:1] or None}
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("counted.py").write_text(COUNTED)
    return tmp_path


def settings(model, **more):
    return {
        "model": str(model), "engine": {"kind": "transformers"}, "debug": True,
        "rollout": {"max_tokens": 6, "concurrency": 4, "refills": 0}, "seed": 3, **more,
    }  # fmt: skip


SUITE = Suite(
    tasks=6,
    samples=2,
    environments={
        "counted": {"env": "counted.py:Counted", "weight": 3},
        "sums": {"env": "math_verify", "samples": 1},
        "shown": {"env": "counted.py:Counted", "weight": 0, "tasks": 2, "sampling": {"temperature": 0}},
    },
)


@pytest.fixture
def evaluated(tiny_model, folder):
    evaluation = new_evaluation(settings(tiny_model, name="first"), suite=SUITE)
    return run_evaluation(evaluation, Display(), make_model), JobFolder(Path("evals/first"))


def groups_of(folder, name):
    episodes = [episode for (group, _), episode in folder.journal.latest().items() if group.startswith(f"{name}/")]
    ids = dict.fromkeys(episode.group_id for episode in episodes)
    return [Group(id, of[0].task, of) for id in ids if (of := [e for e in episodes if e.group_id == id])]


def test_a_folder_holds_the_result_a_table_every_episode_and_how_it_was_made(evaluated, tiny_model):
    result, folder = evaluated
    assert json.loads(folder.result_file.read_text()) == result
    assert (result["status"], result["seed"], result["model"]) == ("completed", 3, str(tiny_model))
    assert set(result["envs"]) == {"counted", "sums", "shown"}
    counted = result["envs"]["counted"]
    assert (counted["n_episodes"], counted["samples"], counted["failures"]) == (12, 2, {"environment": 2})
    for name in result["envs"]:
        again = result_of(groups_of(folder, name))
        assert {key: result["envs"][name][key] for key in again} == again
        assert all(result["envs"][name]["fingerprints"][of] for of in ("code", "spec", "tasks"))
    assert result["envs"]["shown"]["sampling"]["temperature"] == 0
    assert result["score"] == pytest.approx((3 * counted["score"] + result["envs"]["sums"]["score"]) / 4)
    assert result["failures"] == {"environment": 2}
    assert result["n_episodes"] == 12 + 6 + 4
    rows = list(csv.DictReader((folder.path / "result.csv").open()))
    assert [row["environment"] for row in rows] == list(result["envs"])
    assert float(rows[0]["score"]) == counted["score"]
    assert float(rows[0]["success.rate"]) == counted["success"]["rate"]
    assert [float(rows[0][key]) for key in ("ci95_low", "ci95_high")] == counted["ci95"]
    assert not [key for key in rows[0] if key.startswith(("env.", "settings.", "fingerprints."))]
    assert len(result["fingerprints"]["model"]) == 16


def test_a_finished_evaluation_that_goes_on_plays_nothing(evaluated):
    result, folder = evaluated
    began = Path("began.txt").read_text()
    journal = folder.journal.path.read_bytes()
    again = run_evaluation(find_folder("first", "evals"), Display(), make_model)
    assert Path("began.txt").read_text() == began
    assert folder.journal.path.read_bytes() == journal
    assert again == result


def test_what_failed_is_played_again_where_that_is_asked_for(evaluated):
    result, _ = evaluated
    Path("mended").touch()
    Path("began.txt").unlink()
    again = run_evaluation(find_folder("first", "evals"), Display(), make_model, retry_failed=True)
    assert Path("began.txt").read_text().split() == ["seed-2147483653"] * 2
    assert again["failures"] == {}
    assert again["envs"]["counted"]["n_tasks"] == 6
    assert result["envs"]["counted"]["n_tasks"] == 5


def test_a_policy_that_does_not_start_undoes_nothing(evaluated, tiny_model):
    result, folder = evaluated
    journal = folder.journal.path.read_bytes()
    weights = next(Path(tiny_model).glob("*.safetensors"))
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        with pytest.raises(EnvgymError):
            run_evaluation(find_folder("first", "evals"), Display(), make_model, retry_failed=True)
    finally:
        hidden.rename(weights)
    assert folder.journal.path.read_bytes() == journal
    assert folder.read_result() == result


def test_what_has_changed_since_is_no_way_to_go_on(evaluated):
    _, folder = evaluated
    folder.result_file.unlink()
    Path("counted.py").write_text(COUNTED.replace("/ 20", "/ 10"))
    done = subprocess.run([ENVGYM, "eval", "--resume", "first"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "were run before the code or the settings of environment" in done.stderr
    assert "start a new evaluation" in done.stderr


def test_one_process_at_a_time(evaluated):
    _, folder = evaluated
    with folder.open():
        done = subprocess.run(
            [ENVGYM, "eval", "--resume", "first", "--retry-failed"], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert "another envgym is writing to evals/first" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("result.json", '{"status": "compl', "result.json is damaged"),
        ("result.json", "{}", "result.json is damaged"),
        ("config.yaml", "suite: x\nparts: [{name: a}]\n", "config.yaml is damaged"),
        ("config.yaml", "suite: x\nparts: []\n", "is not the folder of an evaluation"),
        ("config.yaml", "steps: 3\n", "is not the folder of an evaluation"),
        ("episodes.jsonl", "nonsense\n", "episodes.jsonl, line 1: this is not an episode"),
    ],
)
def test_a_damaged_folder_is_told_in_a_line(evaluated, name, text, said):
    _, folder = evaluated
    (folder.path / name).write_text(text)
    if name == "episodes.jsonl":
        folder.result_file.unlink()
    with pytest.raises(EnvgymError, match=said):
        run_evaluation(find_folder("first", "evals"), Display(), make_model)


def test_a_cluster_that_no_task_has_is_refused(tiny_model, folder):
    suite = Suite(tasks=2, environments={"sums": {"env": "math_verify", "cluster": "pasage"}})
    with pytest.raises(ConfigError, match="no task has a field 'pasage'"):
        run_evaluation(new_evaluation(settings(tiny_model), suite=suite), Display(), make_model)


@pytest.mark.slow
def test_a_kill_repeats_and_loses_nothing_that_had_ended(tiny_model, folder):
    (folder / "suite.yaml").write_text("environments: {counted: {env: 'counted.py:Counted', tasks: 60, samples: 2}}\n")
    (folder / "slow").touch()
    words = [
        "--suite", "suite.yaml", "--model", str(tiny_model), "--name", "killed", "engine.kind=transformers",
        "debug=true", "rollout.max_tokens=4", "rollout.concurrency=3", "rollout.refills=0",
    ]  # fmt: skip
    child = subprocess.Popen([ENVGYM, "eval", *words], stdout=subprocess.DEVNULL, start_new_session=True)
    journal = JobFolder(folder / "evals/killed").journal
    deadline = time.monotonic() + 120
    while len(journal.originals()) < 20:
        assert time.monotonic() < deadline, "no episode ended"
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    before = journal.originals()
    assert 20 <= len(before) < 120
    assert {episode.outcome.reason for episode in before.values()} <= {"", "environment", "length"}
    with journal.path.open("a") as file:
        file.write('{"id": "cut sho')
    began = len((folder / "began.txt").read_text().split())
    done = subprocess.run([ENVGYM, "eval", "--resume", "killed"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    after = journal.originals()
    assert len(after) == 120
    assert {place: after[place] for place in before} == before
    assert len(journal.path.read_text().splitlines()) == 120
    played = len((folder / "began.txt").read_text().split()) - began
    assert played == 120 - len(before)
    assert "60 tasks" not in done.stdout  # those that break have no score
    assert "54 tasks" in done.stdout


def test_ctrl_c_keeps_what_ended_and_says_how_to_go_on(tiny_model, folder):
    (folder / "slow").touch()
    words = [
        "--env", "counted.py:Counted", "--model", str(tiny_model), "--name", "first", "engine.kind=transformers",
        "debug=true", "rollout.max_tokens=4", "rollout.concurrency=2", "eval.tasks=400", "eval.greedy=false",
    ]  # fmt: skip
    child = subprocess.Popen([ENVGYM, "eval", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = JobFolder(folder / "evals/first").journal
    deadline = time.monotonic() + 120
    while len(journal.originals()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.splitlines()[-1].endswith("resume with: envgym eval --resume evals/first")
    assert len(journal.originals()) >= 5


@pytest.mark.slow
def test_an_evaluation_in_which_nothing_was_scored_says_so(tiny_model, folder):
    (folder / "broken.py").write_text(COUNTED.replace('if self.task.id.endswith("3") and', "if"))
    words = ["--env", "broken.py:Counted", "--model", tiny_model, "engine.kind=transformers", "debug=true",
             "eval.tasks=3", "eval.greedy=false", "rollout.max_tokens=4"]  # fmt: skip
    done = subprocess.run([ENVGYM, "eval", *map(str, words)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "environment 3" in done.stdout
    assert "no episode was scored" in done.stderr.splitlines()[-1]


def test_a_name_is_taken_once_and_a_folder_without_an_episode_is_not_kept(evaluated, tiny_model, folder):
    with pytest.raises(RunError, match="exists: choose another --name, or resume with --resume first"):
        new_evaluation(settings(tiny_model, name="first"), suite=SUITE)
    with pytest.raises(EnvgymError, match="nowhere"):
        run_evaluation(new_evaluation(settings("./nowhere", name="second"), suite=SUITE), Display(), make_model)
    assert not Path("evals/second").exists()
    with pytest.raises(RunError, match="no evaluation 'third'"):
        find_folder("third", "evals")


def test_evaluations_without_a_name_do_not_meet(tiny_model, folder, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    paths = {new_evaluation(settings(tiny_model), suite=SUITE).path for _ in range(3)}
    assert len(paths) == 3


def test_another_model_in_the_folder_is_no_way_to_go_on(tiny_model, folder):
    import shutil

    shutil.copytree(tiny_model, "model")
    evaluation = new_evaluation(settings("model", name="first", eval={"tasks": 2}), suite=SUITE)
    run_evaluation(evaluation, Display(), make_model)
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    with pytest.raises(RunError, match=r"sampled before the model's weights changed: start a new evaluation"):
        run_evaluation(find_folder("first", "evals"), Display(), make_model, retry_failed=True)


def test_an_endless_environment_needs_a_number_of_tasks(tiny_model, folder):
    endless = Suite(environments={"counted": "counted.py:Counted"})
    with pytest.raises(ConfigError, match="tasks without end"):
        run_evaluation(new_evaluation(settings(tiny_model), suite=endless), Display(), make_model)


def test_from_python_a_suite_is_an_argument(tiny_model, folder):
    result = api.evaluate(settings(tiny_model, evals_dir="own"), suite=SUITE, quiet=True)
    assert result.to_dict()["suite"] == "suite"
    assert list(Path("own").glob("*/result.json")) == [result.folder / "result.json"]
