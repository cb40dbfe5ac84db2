"""Two ways to run a command: in this process, which is quick, and as the program that a user starts."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.cli import main

ENVGYM = Path(sys.executable).with_name("envgym")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in this process, in an empty folder, with `typed` on standard input."""
    monkeypatch.chdir(tmp_path)

    def run_command(*words, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        try:
            status = main(list(map(str, words)))
        except SystemExit as end:  # argparse, after its help
            status = end.code
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run_command


@pytest.fixture
def start(tmp_path):
    """Run the program in an empty folder; output is a pipe, as in a script."""

    def start_program(*words, typed="", **environment):
        return subprocess.run(
            [ENVGYM, *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            input=typed,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return start_program
