"""Training on tasks of Harbor in the local place, with the plain agent and with terminus-2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import store as store  # a fixture

ENVGYM = Path(sys.executable).with_name("envgym")
SHORT = (
    "engine.kind=transformers", "steps=3", "rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_tokens=24",
    "rollout.concurrency=4", "eval.every=0", "checkpoint.every=0", "env.test_fraction=0", "--name", "short",
)  # fmt: skip
PRINTS = "#!/bin/bash\necho 0.5 > /logs/verifier/reward.txt\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agent", ["", "terminus-2"])
def test_a_policy_is_trained_on_harbors_tasks(harbor_package, make_task, tmp_path, store, agent):
    if agent and shutil.which("tmux") is None:
        pytest.skip("terminus-2 needs tmux, which is not installed")
    folders = [make_task(name, test=PRINTS) for name in ("first", "second")]
    words = ["train", "--env", f"harbor:{folders[0].parent}", f"env.python={harbor_package[0]}", "env.place=local"]
    words += ["--model", "starter", "--learner", "grpo", *SHORT]
    if agent:  # its own instructions are long; few turns are enough
        words += [f"agent.program={agent}", "agent.arguments.max_turns=2", "engine.max_model_len=8192"]
    done = subprocess.run([ENVGYM, *words], cwd=tmp_path, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    summary = json.loads((tmp_path / "runs" / "short" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 3, {})
    assert summary["tokens"]["trained"] > 0
    assert summary["mismatch"]["max_abs_logprob"] < 1e-3  # of the trained tokens to the engine's
    store(
        f"harbor_training_{agent or 'shell'}",
        training_steps=summary["steps"],
        trained_tokens=summary["tokens"]["trained"],
        max_abs_logprob=summary["mismatch"]["max_abs_logprob"],
        seconds=summary["seconds"],
    )
