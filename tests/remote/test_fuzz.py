"""Schemathesis makes requests, valid and not, and sequences of them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from .openapi_document import document

TOKEN = "fuzzing-0123456789abcdef"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [True, False])
def test_no_request_is_a_server_error_and_every_answer_is_as_documented(start, tmp_path, tokens):
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(TOKEN)
    limits = ["limit.max_sessions=50", "limit.lease_seconds=1"]
    server = start("unruly.py:UnrulySpec", *limits, *([f"tokens={file}"] if tokens else []))
    program = Path(sys.executable).with_name("st")
    # Whether a valid request can be carried out is the environment's to say: its own errors are 422.
    words = ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--seed", "1", "-n", "25", "--no-color"]
    words += ["--suppress-health-check", "all", "--header", f"Authorization: Bearer {TOKEN}"]
    schema = tmp_path / "openapi.json"
    schema.write_text(document(server.url, ["game"], tokens=tokens))
    done = subprocess.run(
        [program, "run", schema, "--url", server.url, *words],
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("fuzz_hooks.py"))},
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    found = "\n".join(line for line in done.stdout.splitlines() if len(line) < 500)
    assert done.returncode == 0, found[-6000:]
    assert "Tested: 12" in done.stdout
    # What is well-formed reached the environment, not only what must be refused.
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request) as answer:
        counts = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert float(counts['envgym_sessions_opened_total{env="game"}']) >= 50
    assert float(counts['envgym_steps_total{env="game"}']) >= 20
    assert float(counts['envgym_group_seconds_count{env="game"}']) >= 5
    assert "a defect of the server" not in server.log()
    assert "internal-error" not in server.log()
    assert TOKEN not in server.log()
    assert server.stop() == 0
