"""Files for OpenRLHF in real runs: vLLM samples, DeepSpeed learns, the starter answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVGYM = Path(sys.executable).with_name("envgym")
SMALL = ("steps=2", "rollout.tasks_per_step=8", "rollout.group_size=4", "rollout.max_tokens=24", "eval.tasks=8")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["reward_math", "agent_math", "agent_execute"])
def test_a_run_on_a_file(file, shown, tmp_path):
    """A reward function; an agent by reset and step; an agent whose execute calls super."""
    rows = [{"prompt": f"What is {a} + {b}?", "answers": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [ENVGYM, "train", "--env", shown(file), "--name", "run", "data.path=rows.jsonl",
         "data.answer=answers", *SMALL],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 2, {})
    assert summary["tokens"]["sampled"] == summary["tokens"]["trained"] > 0
    assert 0 < summary["mismatch"]["max_abs_logprob"] < 1e-3
    records = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = {"env/math_accuracy"} if "reward" in file else {"env/step"}
    assert wanted | {"reward/mean", "loss", "grad_norm"} <= set(records[1])
