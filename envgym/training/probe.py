"""The texts on which an actor and its engines are compared after each sync, one of them after a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from envgym.errors import InvalidStep
from envgym.render import Renderer
from envgym.types import ImagePart, Message, Observation, PlacedImage

TEXT = """\
A small shop sells apples at 3 for $2 and pears at 50 cents each. On Monday it sold 27 apples and 14 pears. How much
money did it take? Let us think step by step. 27 apples are 27 / 3 = 9 times three apples, so they cost 9 * 2 = 18
dollars. 14 pears cost 14 * 0.50 = 7 dollars. Together that is 18 + 7 = 25 dollars. The answer is 25.

The quick brown fox jumps over the lazy dog. Once upon a time there was a king who had three daughters, and the youngest
of them was so beautiful that the sun itself, which had seen so much, was astonished whenever it shone in her face.

def mean(numbers: list[float]) -> float:
    # Return the mean of the numbers.
    return sum(numbers) / len(numbers) if numbers else 0.0

The capital of France is Paris, the capital of Italy is Rome, and the capital of Japan is Tokyo. Water boils at 100
degrees Celsius and freezes at 0. The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. Thank you very
much for your help! You are welcome. If there is anything else that I can do for you, please let me know.
"""
"""More than 200 tokens of every tokenizer."""
TOKENS = 256
"""Tokens of the text that are compared, where the context has room for them."""
TOKENS_AFTER_PICTURE = 64
"""Tokens of the text that are compared after the picture."""
LEAST_TOKENS = 8
"""With less room after the picture there is no probe with it."""
SIDE = 64
"""Pixels of the picture's sides."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text, with a picture before it or without, on which an actor and its engines are compared.

    token_ids  [T]
    start      the first token that is compared: after the picture, whose placeholders nobody samples
    images     the picture, with its file's content
    store      writes the file where the actor opens it
    """

    token_ids: tuple[int, ...]
    start: int = 1
    images: tuple[PlacedImage, ...] = ()
    store: Callable[[ImagePart], object] | None = field(default=None, compare=False)


def text_probe(renderer: Renderer, max_tokens: int) -> Probe:
    """The probe of the text alone, of at most `max_tokens`."""
    token_ids = renderer.prompt(Observation(text=TEXT))
    return Probe(tuple(token_ids[: min(TOKENS, max_tokens)]))


def picture_probe(renderer: Renderer, max_tokens: int, store: Callable[[ImagePart], object]) -> Probe | None:
    """The probe with a picture, of at most `max_tokens`; None if they have no room for it, or the renderer takes no
    images. Loads the model's processor."""
    image = ImagePart.from_value(_picture())
    try:
        opening = renderer.dialogue().begin(Observation([Message("user", [image, TEXT])]))
    except InvalidStep:
        return None
    [placed] = opening.images
    token_ids = opening.token_ids[: min(placed.end + TOKENS_AFTER_PICTURE, max_tokens)]
    if len(token_ids) < placed.end + LEAST_TOKENS:
        return None
    return Probe(tuple(token_ids), placed.end, (placed,), store)


def _picture() -> object:
    """The picture's pixels, a uint8 array [height, width, 3]: colours that run across it, and a pattern."""
    import numpy as np

    y, x = np.indices((SIDE, SIDE))
    return np.stack([x * 4, y * 4, (x ^ y) * 4], 2).astype(np.uint8)
