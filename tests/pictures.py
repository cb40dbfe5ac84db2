"""An environment file whose observations are pictures, and what it shows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

SOURCE = '''
import envgym, numpy as np
from envgym.types import Message

class Walk(envgym.Env):
    """Every observation is a picture of a colour that the seed and the turn decide."""
    def __init__(self, turns: int = 2):
        self.turns = turns
    def show(self):
        return np.full((8, 8, 3), self.task.seed % 5 * 40 + self.turn, np.uint8)
    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return [Message("user", ["What colour?", self.show()])], {}
    def step(self, action):
        self.turn += 1
        return [Message("user", [self.show(), "And now?"])], 0.5, self.turn == self.turns, False, {}
'''


def picture(seed: int = 0, size: int = 12) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def environment(folder: Path) -> Path:
    """The file of the environment."""
    path = folder / "walk.py"
    path.write_text(SOURCE)
    return path
