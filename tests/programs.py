"""The program that a user starts, and an environment for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ENVGYM = Path(sys.executable).with_name("envgym")

LETTERS = '''
import envgym

class Letters(envgym.Env):
    """Pays the share of characters that are lower-case letters: a reward that random weights earn some of."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"Say something about {self.rng.randint(1, 99)}."}], {}

    async def step(self, action):
        share = sum("a" <= letter <= "z" for letter in action.text) / max(1, len(action.text))
        return None, share, True, False, {"score": share, "metrics": {"characters": len(action.text)}}
'''


def program(folder: Path, *words: Any) -> str:
    """Run envgym in `folder`; returns what it printed."""
    done = subprocess.run(
        [ENVGYM, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stderr == ""
    return done.stdout
