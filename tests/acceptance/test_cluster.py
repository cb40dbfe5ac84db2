"""Training on a cluster: two machines of Ray, which are processes of this one with GPUs that are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.programs import LETTERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENVGYM = Path(sys.executable).with_name("envgym")
APART = """
import pathlib
exists = pathlib.Path.exists

def seen(self):
    return not str(self).startswith(("/dev/shm/envgym-", "/tmp/envgym-")) and exists(self)

pathlib.Path.exists = seen
"""
"""Run at the start of every process of the cluster: what the trainer puts in memory or the temporary folder is there
for nobody else, as on another machine."""
SPREAD = ("workers.ranks=2", "workers.zero_stage=2", "engine.count=2", "placement.engine.nodes=2")


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """The cluster, and the environment of a program that uses it."""
    apart = tmp_path_factory.mktemp("apart")
    (apart / "sitecustomize.py").write_text(APART)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(apart))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
        made.add_node(num_cpus=2, num_gpus=2)
    yield made, {**os.environ, "RAY_ADDRESS": made.address}
    ray.shutdown()
    made.shutdown()


def started(folder: Path, environ: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [ENVGYM, "train", "--runtime", "ray", "--name", "run", *words],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def records(folder: Path) -> list[dict[str, float]]:
    file = folder / "runs" / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_main_job_on_two_machines(cluster, tmp_path, store):
    """Two ranks and two engines, a machine each, that share nothing but the run's folder."""
    _, environ = cluster
    began = time.monotonic()
    run = started(tmp_path, environ, "--env", "math_verify", *SPREAD)
    output, _ = run.communicate(timeout=1700)
    assert run.returncode == 0, output[-3000:]
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    before, after = (summary["eval"][when]["score"] for when in ("before", "after"))
    assert before < 0.5
    assert after > 0.9
    assert max(record["sync/max_abs"] for record in records(tmp_path)) < 1e-4
    assert (tmp_path / "runs" / "run" / "transfer").is_dir()  # memory was not shared
    store("cluster_main_job", before=before, after=after, steps=summary["steps"], seconds=time.monotonic() - began)


def test_weights_reach_engines_with_over_a_thousand_requests_in_flight(cluster, tmp_path, tiny_model, store):
    _, environ = cluster
    (tmp_path / "letters.py").write_text(LETTERS)
    words = (
        "rollout.tasks_per_step=150",
        "rollout.group_size=8",
        "rollout.concurrency=1200",
        "rollout.max_staleness=1",
    )
    run = started(
        tmp_path, environ, "--env", "letters.py", "--model", str(tiny_model), "steps=4", "rollout.max_tokens=64",
        "eval.every=0", *words, *SPREAD,
    )  # fmt: skip
    output, _ = run.communicate(timeout=900)
    assert run.returncode == 0, output[-3000:]
    found = records(tmp_path)[1:]
    assert [record["episodes"] for record in found] == [1200] * 4
    assert max(record["staleness/max"] for record in found) == 1
    assert max(record["sync/max_abs"] for record in found) < 1e-3
    store("cluster_in_flight", sync_seconds=[record["seconds/sync"] for record in found])


def test_a_machine_that_is_lost_costs_its_engine_and_no_step(cluster, tmp_path, tiny_model, store):
    """The ranks are on the other one. What was played on it is played again."""
    made, environ = cluster
    (tmp_path / "letters.py").write_text(LETTERS)
    run = started(
        tmp_path, environ, "--env", "letters.py", "--model", str(tiny_model), "steps=100000",
        "rollout.tasks_per_step=16",
        "rollout.group_size=4", "rollout.max_tokens=16", "eval.every=0", "engine.count=2", "placement.engine.nodes=2",
    )  # fmt: skip
    began = time.monotonic()
    while len(records(tmp_path)) < 4:
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < began + 300
        time.sleep(0.1)
    at = len(records(tmp_path))
    made.remove_node(made.list_all_nodes()[-1], allow_graceful=False)
    lost = time.monotonic()
    while len(records(tmp_path)) < at + 10:
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < lost + 300
        time.sleep(0.1)
    seconds = time.monotonic() - lost
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 130, output[-2000:]
    found = records(tmp_path)[1:]
    assert all(record["episodes"] == 64 for record in found)
    assert "starting another" in output
    assert not [p for p in psutil.process_iter() if "ray::Host" in " ".join(_command(p))]
    store("cluster_machine_lost", seconds_for_ten_steps=seconds)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
