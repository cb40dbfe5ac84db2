"""`examples/grpo_in_one_file.py`: it fits on a page, it runs, and it learns."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.engines.transformers import TransformersEngine

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_in_one_file.py"


def scores(output: str) -> dict[int, float]:
    """The printed held-out scores, by step."""
    return {int(step): float(score) for step, score in re.findall(r"step (\d+): score ([\d.]+)", output)}


def test_it_fits_on_a_page():
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_a_step_runs_and_its_weights_arrive(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arrived = []

    class Engine(TransformersEngine):  # it starts faster than vLLM
        async def end_weights(self, n_buckets, version):
            arrived.append(version)
            return await super().end_weights(n_buckets, version)

    monkeypatch.setattr(example, "VLLMEngine", Engine)
    for name in ("TASKS", "GROUP", "HELD_OUT"):
        monkeypatch.setattr(example, name, 2)
    asyncio.run(example.main(steps=1))
    assert scores(capsys.readouterr().out).keys() == {0, 1}
    assert arrived == [1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = scores(done.stdout).values()
    assert after > before + 0.2
