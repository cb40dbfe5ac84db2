"""Runs each answer as a file of tests, by the `python` of the path."""

import subprocess
import tempfile
from pathlib import Path

import torch


def reward_func(queries, prompts, labels):
    paid = []
    for query, prompt in zip(queries, prompts, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_answer.py")
            file.write_text(query.removeprefix(prompt))
            try:
                words = ["python", "-m", "pytest", "-q", str(file)]
                status = subprocess.run(words, capture_output=True, timeout=60, check=False).returncode
            except subprocess.TimeoutExpired:
                status = -1
        paid.append({0: 1.0, 1: 0.3}.get(status, 0.0))
    rewards = torch.tensor(paid)
    logs = {"code_correctness": rewards, "avg_correctness": rewards.mean()}
    return {"rewards": rewards, "scores": (rewards + 1) / 2, "extra_logs": logs}
