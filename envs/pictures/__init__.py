"""Drawn pictures for vision-language policies: a question about one, or a walk on a board that only pictures show."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult
from envgym.errors import needs
from envgym.types import Action, Message, Task

if TYPE_CHECKING:
    from PIL.Image import Image

Ask = Literal["colour", "position", "shape", "digit"]
COLOURS = {
    "red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 70, 220), "yellow": (240, 210, 20),
    "purple": (150, 40, 170), "black": (20, 20, 20),
}  # fmt: skip
POSITIONS = {"left": (0.2, 0.5), "right": (0.8, 0.5), "top": (0.5, 0.2), "bottom": (0.5, 0.8), "middle": (0.5, 0.5)}
"""Centres of a drawing, as fractions of the picture's sides from the top left."""
SHAPES = ("circle", "square", "triangle")
DIGITS = {
    "zero": "### #.# #.# #.# ###", "one": ".#. ##. .#. .#. ###", "two": "### ..# ### #.. ###",
    "three": "### ..# ### ..# ###", "four": "#.# #.# ### ..# ..#", "five": "### #.. ### ..# ###",
    "six": "### #.. ### #.# ###", "seven": "### ..# ..# .#. .#.", "eight": "### #.# ### #.# ###",
    "nine": "### #.# ### ..# ###",
}  # fmt: skip
"""The rows of each digit's drawing."""
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
"""The moves of a walk, in columns and rows."""
ANSWERS = {"colour": tuple(COLOURS), "position": tuple(POSITIONS), "shape": SHAPES, "digit": tuple(DIGITS)}
RULES = "Walk from the red square to the green one. Answer with a direction: up, down, left or right."


class PicturesConfig(EnvConfig):
    """Settings of the pictures."""

    kind: Literal["question", "walk"] = "question"
    """`question`: one picture and a question about it. `walk`: a picture of the board after every step."""
    asks: tuple[Ask, ...] = Field(("colour", "position"), min_length=1)
    """With `question`: the kinds of questions; each task draws one."""
    size: int = Field(56, ge=16, le=1024)
    """Pixels per side of a picture."""
    board: int = Field(4, ge=2, le=12)
    """With `walk`: squares per side of the board."""
    max_turns: int = Field(8, ge=1)
    """With `walk`: answers after which an episode is truncated."""
    error_share: float = Field(0.0, ge=0, le=1)
    """Share of the demonstrations' answers that are drawn at random."""


class Scene(NamedTuple):
    """The picture of a question: what is asked, and what is drawn, `offset` fractions of a side from its position."""

    ask: Ask
    colour: str
    position: str
    shape: str
    digit: str
    offset: tuple[float, float]

    @property
    def answer(self) -> str:
        return str(getattr(self, self.ask))


class Walk(NamedTuple):
    """The squares of a walk, as columns and rows: where it is, and its goal."""

    place: tuple[int, int]
    goal: tuple[int, int]

    @property
    def right_moves(self) -> list[str]:
        """The moves that lead nearer to the goal."""
        return [name for name, move in MOVES.items() if _distance(_sum(self.place, move), self.goal) < _distance(*self)]


class PicturesEnv(Env):
    """A question about a drawn picture, or a walk on a board: the reward is 1 for the right word, or at the goal.

    An answer counts if it names exactly one of the possible words.
    """

    spec: Pictures
    config: PicturesConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await super().reset(seed=seed)
        self._turns = 0
        if self.config.kind == "walk":
            self._walk = walk_of(self.rng, self.config.board)
            return [Message("user", [draw_walk(self._walk, self.config), RULES])], {}
        self._scene = scene_of(self.rng, self.config.asks)
        question = f"Which {self._scene.ask}? One of: {', '.join(ANSWERS[self._scene.ask])}."
        return [Message("user", [draw_scene(self._scene, self.config), question])], {}

    async def step(self, action: Action) -> StepResult:
        if self.config.kind == "question":
            answer = chosen(action.text, ANSWERS[self._scene.ask])
            score = float(answer == self._scene.answer)
            return None, score, True, False, {"score": score, "answer": answer}
        self._turns += 1
        if (move := chosen(action.text, tuple(MOVES))) is not None:
            place = _sum(self._walk.place, MOVES[move])
            if all(0 <= side < self.config.board for side in place):
                self._walk = self._walk._replace(place=place)
        has_arrived = self._walk.place == self._walk.goal
        is_over = has_arrived or self._turns >= self.config.max_turns
        info: Info = {"score": float(has_arrived), "metrics": {"turns": self._turns}}
        feedback = [] if is_over else [Message("user", [draw_walk(self._walk, self.config)])]
        return feedback, float(has_arrived), has_arrived, is_over and not has_arrived, info


class Pictures(EnvSpec):
    """Draws every task by its seed, and demonstrates it."""

    env_class = PicturesEnv
    Config = PicturesConfig
    config: PicturesConfig

    async def setup(self) -> None:
        with needs("pillow", "images", f"environment {self.id}"):
            import PIL.Image  # noqa: F401

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The right words, of which `error_share` are replaced with random ones."""
        config, rng = self.config, random.Random(f"{task.id} {seed}")
        if config.kind == "question":
            scene = scene_of(random.Random(task.seed), config.asks)
            return [self._demonstrated(scene.answer, ANSWERS[scene.ask], rng)]
        walk, moves = walk_of(random.Random(task.seed), config.board), list[str | Message]()
        while walk.place != walk.goal and len(moves) < config.max_turns:
            move = self._demonstrated(rng.choice(walk.right_moves), tuple(MOVES), rng)
            place = _sum(walk.place, MOVES[move])
            if all(0 <= side < config.board for side in place):
                walk = walk._replace(place=place)
            moves.append(move)
        return moves

    def _demonstrated(self, answer: str, answers: Sequence[str], rng: random.Random) -> str:
        return rng.choice(answers) if rng.random() < self.config.error_share else answer


def chosen(text: str, answers: Sequence[str]) -> str | None:
    """The word of `answers` in an answer; None if there are several or none."""
    words = {word for word in re.findall(r"[a-z]+", text.lower()) if word in answers}
    return words.pop() if len(words) == 1 else None


def scene_of(rng: random.Random, asks: Sequence[Ask]) -> Scene:
    """Draw the lots of a question."""
    colour, position, shape, digit = (rng.choice(list(group)) for group in (COLOURS, POSITIONS, SHAPES, DIGITS))
    offset = rng.uniform(-0.05, 0.05), rng.uniform(-0.05, 0.05)
    return Scene(rng.choice(asks), colour, position, shape, digit, offset)


def walk_of(rng: random.Random, board: int) -> Walk:
    """Draw two different squares."""
    place, goal = rng.sample([(column, row) for column in range(board) for row in range(board)], 2)
    return Walk(place, goal)


def draw_scene(scene: Scene, config: PicturesConfig) -> Image:
    """The picture of a question: a shape, or a digit if that is asked for, on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (config.size, config.size), "white")
    canvas, colour, radius = ImageDraw.Draw(image), COLOURS[scene.colour], 0.15 * config.size
    x, y = (config.size * (a + b) for a, b in zip(POSITIONS[scene.position], scene.offset, strict=True))
    box = (x - radius, y - radius, x + radius, y + radius)
    if scene.ask == "digit":
        cell = radius / 2.5
        for row, cells in enumerate(DIGITS[scene.digit].split()):
            for column, mark in enumerate(cells):
                if mark == "#":
                    left, top = x + (column - 1.5) * cell, y + (row - 2.5) * cell
                    canvas.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colour)
    elif scene.shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif scene.shape == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=colour)
    return image


def draw_walk(walk: Walk, config: PicturesConfig) -> Image:
    """The picture of a board: grey lines, the walk's square in red and its goal in green."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (config.size, config.size), "white")
    canvas, edge = ImageDraw.Draw(image), config.size / config.board
    for (column, row), colour in ((walk.goal, "green"), (walk.place, "red")):
        left, top = column * edge, row * edge
        canvas.rectangle((left, top, left + edge - 1, top + edge - 1), fill=COLOURS[colour])
    for line in range(1, config.board):
        canvas.line([(0, line * edge), (config.size, line * edge)], fill="grey")
        canvas.line([(line * edge, 0), (line * edge, config.size)], fill="grey")
    return image


def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
