"""Suites of named task sets, and training on them, with files in place of the hub. The starter solves none of them;
that everything runs is what is shown."""

from __future__ import annotations

import json

import pytest

from envgym import registry
from tests.envs.test_task_sets import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def files(tmp_path, benchmark_data):
    """A folder with the real files, and hand-written rows of the task sets without any."""
    folder = tmp_path / "files"
    folder.mkdir()
    for path in benchmark_data.glob("*.jsonl"):
        (folder / path.name).symlink_to(path)
    for name, rows in ROWS.items():
        if not list(folder.glob(f"{name}*.jsonl")):
            ending = "" if registry.task_set_of(name).train_on else "_test"
            (folder / f"{name}{ending}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("suite", ["math", "programs", "knowledge"])
def test_a_suite_runs_on_files(suite, files, envgym, tmp_path, store):
    envgym("eval", "--suite", f"{suite}:smoke", "--model", "starter", "--name", suite, f"data.folder={files}")
    result = json.loads((tmp_path / "evals" / suite / "result.json").read_text())
    store(f"task_sets_{suite}", score=result["score"], seconds=result["seconds"],
          envs={name: [env["score"], env["n_tasks"]] for name, env in result["envs"].items()})  # fmt: skip
    assert result["failures"] == {}
    assert all(env["n_tasks"] <= 4 for env in result["envs"].values())
    assert result["score"] is not None


@pytest.mark.parametrize("name", ["gsm8k", "mbpp"])
def test_three_steps_of_training_on_files(name, files, envgym, summary, store):
    envgym("train", "--env", name, "--model", "starter", f"data.folder={files}", "--name", name, "steps=3",
           "rollout.tasks_per_step=8", "eval.tasks=8")  # fmt: skip
    result = summary(name)
    store(f"task_sets_train_{name}", before=result["eval"]["before"], after=result["eval"]["after"])
    assert result["steps"] == 3
    assert result["status"] == "completed"
