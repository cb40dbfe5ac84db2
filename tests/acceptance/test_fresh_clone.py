"""The README's first command, in a fresh clone, with its installation and an empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_first_command_of_the_readme(tmp_path, store):
    clone = tmp_path / "envgym"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environ = {**os.environ, "ENVGYM_CACHE": str(tmp_path / "cache")}
    began = time.monotonic()
    done = subprocess.run(["make", "demo"], cwd=clone, env=environ, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [folder] = (clone / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    store("fresh_clone", seconds=seconds, run_seconds=summary["seconds"], eval=summary["eval"])
    assert seconds < 720
    assert summary["eval"]["after"]["score"] >= 0.9
