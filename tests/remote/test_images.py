"""Images over the wire: each with its file, whose name the receiver computes anew."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from dataclasses import replace

import pytest

import envgym.registry as registry
from envgym.errors import InvalidStep
from envgym.images import ImageFolder
from envgym.remote.transport import RemoteError
from envgym.types import Action, Episode, ImagePart, Message, Outcome, Task
from envgym.types.images import decoded
from tests.pictures import picture

from .gallery import pixels
from .meddling import meddling
from .test_security import ask


@pytest.fixture(scope="module")
def gallery(new_server):
    server = new_server("gallery.py:GallerySpec")
    yield server
    log = server.log()
    assert server.stop() == 0
    assert "a defect of the server" not in log


def body_of(content: bytes, name: str = "") -> dict[str, str]:
    """An image on the wire."""
    return {"sha256": name or hashlib.sha256(content).hexdigest(), "data": base64.b64encode(content).decode()}


def test_an_episode_with_images_is_that_of_an_environment_here(gallery, tmp_path):
    async def play(name):
        async with registry.spec(name) as spec:
            spec.store_images(ImageFolder(tmp_path / name.replace("/", "-")))
            task = await spec.tasks("train").get(1)
            async with spec.make() as env:
                first, _ = await env.reset(options={"task": task}, seed=1)
                second, *_ = await env.step("77")
            messages = [*first.messages, Message.assistant("77"), *second.messages]
            stored = {path.name: path.read_bytes() for path in spec.images.path.iterdir()}
            episode = Episode("e", task, Outcome.finish(), messages=messages)
            assert all(image.data is None and image.file for message in messages for image in message.images)
            return messages, stored, await spec.score_group(task, [episode, replace(episode, messages=[])])

    here = asyncio.run(play(f"{__file__.rpartition('/')[0]}/gallery.py:GallerySpec"))
    there = asyncio.run(play(gallery.url))
    assert here[:2] == there[:2]
    size = sum(map(len, here[1].values()))
    assert here[2] == [size, 0]
    assert [reward.reward for reward in there[2]] == [size, 0]
    assert len(here[1]) == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda part: {**part, "sha256": "0" * 64}, f"an image was sent as {'0' * 64}, and its file is"),
        (lambda part: {**part, "sha256": "../../etc/passwd"}, "string should match pattern"),
        (lambda part: {"sha256": part["sha256"]}, "field required"),
        (lambda part: {**part, "data": "/etc/passwd!"}, "is not base64"),
        (lambda part: {**part, "data": "x" * 30_000_000}, "string should have at most 26666670 characters"),
        (lambda part: body_of(b"no picture"), "it is no image"),
        (lambda part: body_of(picture(1, 60)[:900]), "truncated"),
    ],
)
def test_a_servers_wrong_image_is_the_failure_of_an_episode_in_one_line(gallery, change, problem):
    async def changed(request, forward):
        answer = await forward()
        if request.path.endswith("/step"):
            body = json.loads(answer.body)
            parts = body["observation"]["messages"][0]["content"]
            parts[1] = change(parts[1])
            answer.body = json.dumps(body).encode()
        return answer

    async def main():
        async with meddling(gallery.url, changed) as wrong, registry.spec(wrong) as spec:
            env = spec.make()
            await env.reset(seed=1)
            try:
                await env.step(Action("5"))
            finally:
                await env.close()

    with pytest.raises((RemoteError, InvalidStep), match=problem) as raised:
        asyncio.run(main())
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (body_of(picture(), "0" * 64), f"an image was sent as {'0' * 64}, and its file is"),
        (body_of(picture(), "../secret"), "string should match pattern"),
        (body_of(b"GIF89a"), "cannot be read"),
        ({"sha256": "0" * 64, "data": 5}, "should be a valid string"),
        ({"txt": "?"}, "text: field required"),
    ],
)
def test_a_clients_wrong_image_is_a_problem_of_the_request(gallery, part, problem):
    task = {"id": "x", "prompt": [{"role": "user", "content": [part]}]}
    opening = {"session_id": "a", "seed": 1, "task": task}
    status, answer, _ = asyncio.run(ask(gallery.url, "POST", "/v1/sessions", opening))
    assert (status, answer["type"].rpartition(":")[2]) == (422, "invalid-request")
    assert problem in answer["detail"]


def test_a_group_to_score_has_the_files_that_its_episodes_name(gallery):
    image = ImagePart.from_value(pixels(3))
    record = {
        **json.loads(json.dumps({"messages": [Message.user(image).as_dict()]})), "id": "", "env": "", "group": "",
        "member": 0, "seed": 0, "attempt": 0, "reward": 1.0, "score": None, "score_is_reward": False, "answer": None,
        "seconds": 0.0, "outcome": {"status": "completed", "reason": "", "retryable": False, "message": ""},
        "task": {"id": "t", "difficulty": None, "seed": None, "env": "", "prompt": "", "answer": None, "fields": {}},
        "metrics": {}, "fingerprints": {}, "rows": [],
    }  # fmt: skip

    def score(*images, name=""):
        if name:
            record["messages"][0]["parts"][0]["sha256"] = name
        body = {"task": {"id": "t"}, "episodes": [record], "images": images}
        return asyncio.run(ask(gallery.url, "POST", "/v1/envs/game/score_group", body))[:2]

    status, answer = score(body_of(image.data))
    assert (status, answer["verdicts"][0]["reward"]) == (200, len(image.data))
    status, answer = score(body_of(image.data, "0" * 64), name="0" * 64)  # another run's name
    assert (status, answer["detail"]) == (
        422, f"images.0: value error, an image was sent as {'0' * 64}, and its file is {image.sha256}"
    )  # fmt: skip
    status, answer = score()
    assert status == 422
    assert f"image {'0' * 64} is known here by its name alone" in answer["detail"]
    assert "64 hexadecimal digits" in score(name="../etc")[1]["detail"]


def test_an_image_that_is_not_here_is_not_sent(gallery):
    image = replace(decoded(ImagePart.from_value(pixels(3))), data=None)
    task = Task("t", (Message.user(image),))

    async def main():
        async with registry.spec(gallery.url) as spec, spec.make() as env:
            await env.reset(options={"task": task}, seed=1)

    with pytest.raises(InvalidStep, match=f"image {image.sha256} is known here by its name alone"):
        asyncio.run(main())


def test_more_than_a_body_holds_is_one_line(gallery):
    """Episodes of 80 MB of images are refused before they are sent."""
    contents = [bytes([number]) * 19_000_000 for number in range(4)]
    images = [ImagePart(hashlib.sha256(c).hexdigest(), 9, 9, "image/png", c) for c in contents]
    episode = Episode("e", Task("t"), Outcome.finish(), messages=[Message.user(*images)])

    async def main():
        async with registry.spec(gallery.url) as spec:
            await spec.score_group(Task("t"), [episode])

    with pytest.raises(RemoteError, match=r"a GroupToScore of [0-9]+ bytes; a server takes at most 67108864"):
        asyncio.run(main())
