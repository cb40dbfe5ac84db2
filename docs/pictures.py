"""Draws `docs/environments/pictures.png`: pictures of `pictures-v0` and of FrozenLake, as a policy sees them.

python docs/pictures.py
"""

import asyncio
import io
from pathlib import Path

from PIL import Image

import envgym

SIDE, GAP = 112, 8
OUT = Path(__file__).parent / "environments" / "pictures.png"
ROWS = (
    ("pictures", {"asks": ["colour", "position", "shape"]}, ()),
    ("pictures", {"asks": ["digit"]}, ()),
    ("pictures", {"kind": "walk"}, ("right", "down", "left", "up", "right")),
    ("gymnasium", {"observation": "image"}, ("down", "down", "right", "right", "down")),
)
"""The environments of the rows, and the answers between the pictures of a row; without answers each is another task."""


async def pictures(name: str, settings: dict, answers: tuple[str, ...]) -> list[Image.Image]:
    env = envgym.make(name, **settings)
    observations = [(await env.reset(seed=2))[0]]
    for number in range(5):
        if answers:
            observation, _, terminated, truncated, _ = await env.step(answers[number])
            if terminated or truncated or not observation.messages:
                break
        else:
            observation, _ = await env.reset(seed=3 + number)
        observations.append(observation)
    await env.close()
    images = [image for each in observations for message in each.messages for image in message.images]
    return [Image.open(io.BytesIO(image.read())).convert("RGB").resize((SIDE, SIDE), Image.NEAREST) for image in images]


def main() -> None:
    rows = [asyncio.run(pictures(*row)) for row in ROWS]
    sheet = Image.new("RGB", (6 * (SIDE + GAP) + GAP, len(rows) * (SIDE + GAP) + GAP), (128, 128, 128))
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            sheet.paste(image, (GAP + x * (SIDE + GAP), GAP + y * (SIDE + GAP)))
    sheet.save(OUT, optimize=True)


if __name__ == "__main__":
    main()
