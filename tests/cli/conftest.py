"""Commands as the program that a user starts; `run` starts them in this process, which is quicker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVGYM = Path(sys.executable).with_name("envgym")


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
