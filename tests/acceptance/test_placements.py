"""The same training wherever its processes are and however its model is split: the same numbers but for rounding."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.programs import LETTERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVGYM = Path(sys.executable).with_name("envgym")
ROUNDING = 1e-5

PLACEMENTS = {
    "two_ranks": ("workers.ranks=2", "workers.zero_stage=2"),
    "ray": ("--runtime", "ray", "workers.ranks=2"),
    "zero_3": ("workers.zero_stage=3",),
    "inline": ("debug=true",),
    "turns": ("colocate=all", "workers.zero_stage=2"),
    "two_engines": ("engine.count=2",),
    "tensor_parallel_engine": ("engine.tensor_parallel=2",),
}


@dataclass
class Result:
    """What a run of this training left, and the processes that were alive when it had taken its first step."""

    records: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    logs: set[str]
    processes: list[str]


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_model):
    """Train in a folder of its own: deterministic, three steps, 32 episodes each."""

    def run(*words: str) -> Result:
        folder = tmp_path_factory.mktemp("placement")
        (folder / "letters.py").write_text(LETTERS)
        settings = (
            "learner.lr=1e-3", "deterministic=true", "steps=3", "rollout.tasks_per_step=8", "rollout.group_size=4",
            "rollout.max_tokens=8", "eval.every=0",
        )  # fmt: skip
        with (folder / "output").open("w") as output:
            program = subprocess.Popen(
                [ENVGYM, "train", "--env", "letters.py", "--model", tiny_model, "--name", "run", *settings, *words],
                cwd=folder, stdout=output, stderr=output,
            )  # fmt: skip
        metrics, processes = folder / "runs" / "run" / "metrics.jsonl", []
        deadline = time.monotonic() + 300
        while program.poll() is None:
            assert time.monotonic() < deadline, (folder / "output").read_text()
            if not processes and metrics.exists() and metrics.read_text().count("\n") > 1:
                processes = names(psutil.Process(program.pid).children(recursive=True))
            time.sleep(0.01)
        assert program.returncode == 0, (folder / "output").read_text()
        return Result(
            [json.loads(line) for line in metrics.read_text().splitlines()],
            load_file(metrics.parent / "model" / "model.safetensors"),
            {path.name for path in (metrics.parent / "logs").glob("*.log")},
            processes,
        )

    return run


def names(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile
    return found


@pytest.fixture(scope="module")
def plain(train):
    """One rank, local processes."""
    return train()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_where_it_runs_changes_nothing_but_rounding(placement, plain, train, tiny_model, store):
    result = train(*PLACEMENTS[placement])
    first, expected = result.records[1], plain.records[1]
    assert expected["grad_norm"] > 0.01
    for name in ("loss", "grad_norm", "reward/mean", "score/mean", "policy/entropy", "tokens/sampled"):
        assert first[name] == pytest.approx(expected[name], rel=ROUNDING, abs=ROUNDING)
    assert [r.get("reward/mean") for r in result.records] == [r.get("reward/mean") for r in plain.records]
    start = load_file(tiny_model / "model.safetensors")
    moved = max(float((plain.weights[name] - start[name]).abs().max()) for name in start)
    apart = max(float((plain.weights[name] - result.weights[name]).abs().max()) for name in start)
    assert apart < 0.01 * moved
    assert all(record["sync/max_abs"] < 1e-4 for record in result.records)
    if placement == "ray":
        assert sum(name.startswith("ray::Host") for name in result.processes) == 3  # two ranks and the engine
    if placement in ("ray", "two_ranks"):
        assert result.logs == {"actor-0.log", "actor-1.log", "engine.log"}
    if placement == "inline":
        assert not any("envgym.processes.child" in name for name in result.processes)
        assert result.logs == set()
    store(
        f"placement_{placement}",
        settings=list(PLACEMENTS[placement]),
        first_step={name: [first[name], expected[name]] for name in ("loss", "grad_norm", "reward/mean")},
        largest_change_of_a_weight=moved,
        largest_difference_of_a_weight=apart,
    )


def test_a_reference_is_a_role_of_its_own(train, store):
    result = train("learner.kl.coef=0.01")
    kl = [record["policy/kl"] for record in result.records[1:]]
    assert result.logs == {"actor-0.log", "engine.log", "reference-0.log"}
    assert abs(kl[0]) < 1e-6  # the policy is still the reference
    assert all(1e-6 < value < 1 for value in kl[1:])
    store("reference_role", kl=kl)
