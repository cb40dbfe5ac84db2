"""Drawn pictures: what is in them, what answers are rewarded, and what is demonstrated."""

import asyncio
import io
import random

import pytest
from PIL import Image

import envgym
from envgym.envs.pictures import ANSWERS, COLOURS, MOVES, POSITIONS, chosen, draw_scene, scene_of, walk_of
from envgym.errors import ConfigError


def picture(observation):
    [image] = observation.messages[-1].images
    return Image.open(io.BytesIO(image.read())).convert("RGB")


def pixels(image, colour):
    """The places of a colour's pixels."""
    return [
        (x, y) for x in range(image.width) for y in range(image.height) if image.getpixel((x, y)) == COLOURS[colour]
    ]


def centre(places):
    return tuple(sum(side) / len(places) for side in zip(*places, strict=True))


@pytest.mark.parametrize("ask", ["colour", "position", "shape", "digit"])
def test_the_picture_shows_the_answer(ask):
    async def run():
        env = envgym.make("pictures", asks=[ask], size=100)
        for seed in range(20):
            observation, _ = await env.reset(seed=seed)
            scene = scene_of(random.Random(env.task.seed), [ask])
            image = picture(observation)
            drawn = pixels(image, scene.colour)
            x, y = centre(drawn)
            left, top = (100 * side for side in POSITIONS[scene.position])
            assert (abs(x - left) < 12, abs(y - top) < 12) == (True, True)
            assert len(drawn) + len([1 for place in image.getdata() if place == (255, 255, 255)]) == 100 * 100
            _, reward, terminated, _, info = await env.step(f"It is {scene.answer}.")
            assert (reward, terminated, info["answer"]) == (1.0, True, scene.answer)

    asyncio.run(run())


def test_different_answers_are_different_pictures():
    """Of scenes that differ in the answer alone."""

    for ask, answers in ANSWERS.items():
        scene = scene_of(random.Random(0), [ask])._replace(position="middle")
        config = envgym.spec("pictures").config
        pictures = {draw_scene(scene._replace(**{ask: answer}), config).tobytes() for answer in answers}
        assert len(pictures) == len(answers)


def test_several_words_are_no_answer():
    assert chosen("Red.", ANSWERS["colour"]) == "red"
    assert chosen("red or blue", ANSWERS["colour"]) is None
    assert chosen("reddish", ANSWERS["colour"]) is None
    assert chosen("red, RED", ANSWERS["colour"]) == "red"


def test_a_walk_follows_the_answers_and_its_pictures_show_it():
    async def run():
        env = envgym.make("pictures", kind="walk", size=80, max_turns=20)
        for seed in range(10):
            observation, _ = await env.reset(seed=seed)
            walk, reward, turns = walk_of(random.Random(env.task.seed), 4), 0.0, 0
            while reward == 0.0:
                place = tuple(int(side // 20) for side in centre(pixels(picture(observation), "red")))
                goal = tuple(int(side // 20) for side in centre(pixels(picture(observation), "green")))
                assert goal == walk.goal
                assert turns or place == walk.place
                moves = {n: (place[0] + x, place[1] + y) for n, (x, y) in MOVES.items()}
                move = min(moves, key=lambda n: abs(moves[n][0] - goal[0]) + abs(moves[n][1] - goal[1]))
                observation, reward, terminated, _, info = await env.step(move)
                turns += 1
            assert terminated
            assert info["metrics"]["turns"] == turns == sum(abs(a - b) for a, b in zip(*walk, strict=True))

    asyncio.run(run())


def test_a_walk_that_does_not_arrive_is_truncated_and_stays_on_the_board():
    async def run():
        env = envgym.make("pictures", kind="walk", max_turns=3)
        await env.reset(seed=1)
        results = [(await env.step(text))[1:4] for text in ("up up", "nothing", "up or down")]
        assert results == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]

    asyncio.run(run())


def test_a_share_of_the_demonstrations_errs():
    async def right(share):
        spec = envgym.spec("pictures", error_share=share)
        tasks = [await spec.tasks("train").get(index) for index in range(400)]
        answers = [scene_of(random.Random(task.seed), spec.config.asks).answer for task in tasks]
        turns = [spec.demonstrations(task, 1) for task in tasks]
        return sum(turn == [answer] for turn, answer in zip(turns, answers, strict=True)) / 400

    assert asyncio.run(right(0.0)) == 1.0
    assert 0.5 < asyncio.run(right(0.5)) < 0.7  # one in five or six of the random answers is right


def test_a_board_of_one_square_is_refused():
    with pytest.raises(ConfigError, match="key 'board': must be at least 2"):
        envgym.spec("pictures", kind="walk", board=1)
