"""Images as authors give them, as files hold them, and as attackers make them."""

import asyncio
import base64
import hashlib
import io
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import envgym
from envgym.envs.nemo_gym.servers import _step_result
from envgym.envs.openenv.serve import text_of
from envgym.errors import InvalidStep
from envgym.gymnasium_view import _text
from envgym.hashing import task_hash
from envgym.render.spelling import rewrite
from envgym.rollout.scripted import PlayedTurn
from envgym.services import RewardModel
from envgym.services.reward import RewardModelClient
from envgym.tasks import prompt_key
from envgym.types import Action, ImagePart, Message, Observation, Task, TextPart, add_instruction, as_messages
from envgym.types.images import MAX_BYTES, decoded

OPTIONS = {"task": Task("t")}


def pixels(seed=0, height=12, width=20):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def uri(content, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def shown(part):
    """The pixels of an image as a reader gets them."""
    return np.asarray(Image.open(io.BytesIO(part.read())).convert("RGB"))


# -- what an author gives ---------------------------------------------------------------------------------------


def test_every_way_to_give_a_picture_is_one_picture(tmp_path):
    picture = Image.fromarray(pixels())
    content = file_of(picture)
    (tmp_path / "a.png").write_bytes(content)
    dicts = [
        {"type": "image", "image": uri(content)},
        {"type": "image_url", "image_url": {"url": uri(content), "detail": "low"}},
        {"type": "image_url", "image_url": uri(content)},
        {"type": "input_image", "image_url": uri(content)},
        {"type": "image", "image": {"bytes": content, "path": None}},
    ]
    parts = [
        *(as_messages([{"role": "user", "content": [part, "?"]}])[0].images[0] for part in dicts),
        *(Message("user", [value]).images[0] for value in (content, bytearray(content), tmp_path / "a.png")),
        Message("user", tmp_path / "a.png").images[0],
    ]
    assert {part.sha256 for part in parts} == {hashlib.sha256(content).hexdigest()}
    assert {part.data for part in parts} == {content}  # byte for byte
    assert (parts[0].width, parts[0].height, parts[0].media_type) == (20, 12, "image/png")
    for made in (Message.user("?", picture), Message.user("?", pixels())):
        assert np.array_equal(shown(made.images[0]), pixels())


@pytest.mark.parametrize(("kind", "media_type"), [("JPEG", "image/jpeg"), ("WEBP", "image/webp")])
def test_a_file_in_rgb_or_grey_stays_byte_for_byte(kind, media_type):
    for mode in ("RGB", "L") if kind == "JPEG" else ("RGB",):
        content = file_of(Image.fromarray(pixels()).convert(mode), kind)
        part = ImagePart.from_value(content)
        assert (part.data, part.media_type) == (content, media_type)


def test_any_other_picture_becomes_a_png_over_white_and_upright():
    alpha = Image.fromarray(np.dstack([pixels(), np.zeros((12, 20), np.uint8)]), "RGBA")
    assert (shown(ImagePart.from_value(file_of(alpha))) == 255).all()
    turned = Image.fromarray(pixels(height=10, width=30))
    exif = turned.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    part = ImagePart.from_value(file_of(turned, "JPEG", exif=exif, quality=100))
    assert (part.width, part.height, part.media_type) == (10, 30, "image/png")
    assert Image.open(io.BytesIO(part.read())).getexif().get(0x0112, 1) == 1
    animation = file_of(turned, "GIF", save_all=True, append_images=[Image.new("RGB", (30, 10), "red")])
    palette = turned.quantize(8)
    for content in (animation, file_of(palette), file_of(turned.convert("CMYK"), "TIFF"), file_of(turned, "BMP")):
        part = ImagePart.from_value(content)
        assert (part.media_type, Image.open(io.BytesIO(part.read())).mode) == ("image/png", "RGB")
        assert ImagePart.from_value(part.read()) == part  # made once: read again it is the same


def test_a_message_of_pictures_keeps_its_text_and_its_order():
    message = Message("user", ["left", pixels(1), " right", pixels(2)])
    first, second = message.images
    assert message.text == "left right"
    assert message.printed == "left[image 20 x 12] right[image 20 x 12]"
    assert [type(part) for part in message.content] == [TextPart, ImagePart, TextPart, ImagePart]
    assert as_messages([message.as_dict()]) == (message,)
    assert message.as_dict()["content"] == "left right"
    content = message.as_dict(image=lambda image: {"type": "image", "of": image.sha256})["content"]
    assert content[0] == {"type": "text", "text": "left"}
    assert [part["of"] for part in content if part["type"] == "image"] == [first.sha256, second.sha256]
    others = Message("user", ["<", "b>", pixels(1), "<b>"], from_others=True)
    rewritten = rewrite(others, lambda text: text.replace("<b>", "[b]"))  # also where two parts spell it
    assert [part.text for part in rewritten.content] == ["[b]", "", "[b]"]
    assert rewritten.images == (first,)
    asked = add_instruction([message], "Which?")[-1]
    assert asked.images == message.images
    assert asked.text == "left right\n\nWhich?"
    assert add_instruction([Message.user("a")], "b") == [Message.user("a\n\nb")]


def test_prompts_that_differ_in_their_pictures_are_two():
    first, second = (Task("t", (Message.user("What colour?", pixels(seed)),)) for seed in (1, 2))
    assert prompt_key(first) != prompt_key(second)
    assert task_hash(first) != task_hash(second)
    again = Task("t", (Message.user("What  colour?", pixels(1)),))
    assert prompt_key(again) == prompt_key(first) != prompt_key(Task("t", "What colour?"))


def test_hashes_of_text_are_those_of_earlier_versions():
    task = Task("t", (Message.system("a"), Message("user", ["b", "c"])), 3, {"x": 1})
    assert (prompt_key(task), task_hash(task)) == (KEY, HASH)


KEY, HASH = 484967072698103730, "b59fa9c190ca1417"


# -- what is refused, in one line -------------------------------------------------------------------------------


def bomb(width=65_000, height=65_000):
    """A PNG of a few kilobytes with billions of pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 99))]
    body = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"no picture", r"the file of an image cannot be read \(it is no image\)"),
        (b"", "cannot be read"),
        (bomb(), "cannot be read|65000 x 65000 pixels"),
        (bomb(9000, 9000), "9000 x 9000 pixels, 81,000,000 in all and more than the 50,000,000 that are decoded"),
        (b"\xff" * (MAX_BYTES + 1), "20,000,001 bytes, more than the 20,000,000 that are read"),
        (Path("missing.png"), "an image at missing.png is no file"),
        (Path("/dev/zero"), "an image at /dev/zero is no file"),
        (np.zeros((4, 4), np.uint8), r"a uint8 array \[height, width, 3\], not uint8 \[4x4\]"),
        (np.zeros((4, 4, 3)), r"a uint8 array \[height, width, 3\], not float64 \[4x4x3\]"),
        (Image.new("I;16", (4, 4)), "8 bits per channel, unlike one of Pillow's mode I;16"),
        (Image.new("L", (8000, 8000)), "8000 x 8000 pixels"),
        (3, r"the content of a message is text, an image \(.*\), or a list of these, not int"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(value, problem):
    with pytest.raises((ValueError, TypeError), match=problem) as error:
        Message("user", ["?", value])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", 3, None])
def test_a_name_is_64_hexadecimal_digits(name):
    with pytest.raises(ValueError, match="an image is named by the 64 hexadecimal digits of its SHA-256, not"):
        as_messages([{"role": "user", "content": [{"type": "image", "sha256": name}]}])


def steps_of(*observations):
    """The observations of an environment that returns these, or the error that ends it."""

    class Pictures(envgym.Env):
        async def reset(self, *, seed=None, options=None):
            self.left = list(observations)
            return self.left.pop(0), {}

        async def step(self, action):
            return self.left.pop(0), 0.0, not self.left, False, {}

    async def main():
        results = []
        async with envgym.EnvSpec("Pictures-v0", Pictures).make() as env:
            results.append((await env.reset(options=OPTIONS))[0])
            for _ in observations[1:]:
                results.append((await env.step(Action("x")))[0])
        return results

    return asyncio.run(main())


def test_an_environment_that_shows_a_broken_picture_fails_at_its_step():
    whole = file_of(Image.fromarray(pixels(5, 300, 300)), "JPEG")
    part = ImagePart.from_value(whole[: len(whole) // 2])  # its beginning has the size
    assert (part.width, part.height) == (300, 300)
    with pytest.raises(InvalidStep, match=r"Pictures-v0: the file of an image cannot be read \(.*truncated"):
        steps_of([Message.user("a", whole)], [Message.user("b", whole[: len(whole) // 2])])
    [first] = steps_of([Message.user("a", whole)])
    assert first.messages[0].images[0].data == whole


def test_a_name_alone_and_a_wrong_name_are_not_believed():
    part = ImagePart.from_value(pixels())
    alone = ImagePart(part.sha256, part.width, part.height, part.media_type)
    with pytest.raises(InvalidStep, match=f"image {part.sha256} is known here by its name alone"):
        steps_of([Message.user("a", alone)])
    with pytest.raises(InvalidStep, match=f"named {'0' * 64}, and its file is another one \\({part.sha256}\\)"):
        steps_of([Message.user("a", ImagePart("0" * 64, 20, 12, "image/png", part.data))])
    [observation] = steps_of([Message.user("a", ImagePart(part.sha256, 1, 1, "image/jpeg", part.data))])
    [size] = [(image.width, image.height, image.media_type) for image in observation.messages[0].images]
    assert size == (20, 12, "image/png")  # the file's, whatever was claimed


def test_a_picture_is_decoded_once_and_on_a_thread(monkeypatch):
    import threading

    threads = []
    load = Image.Image.load

    def counted(self):
        threads.append(threading.current_thread() is threading.main_thread())
        return load(self)

    part = ImagePart.from_value(pixels(77))
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", counted, raising=False)
    steps_of([Message.user("a", part)], [Message.user("b", part)], [Message.user("c", part.data)])
    assert threads == [False]


@pytest.mark.parametrize(("name", "settings"), [("code", {"completion": True}), ("reward", {"chat": False})])
def test_a_prompt_of_raw_text_has_no_picture(name, settings):
    task = Task("t", (Message.user("Draw it:", pixels()),), fields={"tests": ["assert f()"]})
    function = envgym.reward(tasks=[{"prompt": "x"}] * 20)(lambda completion: 1.0)
    spec = envgym.spec(name, **settings) if name == "code" else function.__environment__("mine", **settings)

    async def main():
        async with spec, spec.make() as env:
            await env.reset(options={"task": task})

    with pytest.raises(InvalidStep, match="an image, and a prompt of raw text takes text alone: leave images out"):
        asyncio.run(main())


def test_protocols_of_text_tell_that_there_is_a_picture():
    observation = Observation((Message.user("Look: ", pixels()), Message("tool", [pixels()], tool_call_id="c")))
    text = "Look: [image 20 x 12]\n\n[image 20 x 12]"
    assert text_of(observation) == text
    assert _text(observation) == text.replace("\n\n", "\n")

    class Served:
        has_ended = False

        async def answer(self, action):
            return PlayedTurn(action, observation, 0.0, False, False, {})

    result = asyncio.run(_step_result(Served(), None))
    assert (result["observation"], result["info"]["tool_outputs"]) == (
        "Look: [image 20 x 12]", [{"call_id": "c", "output": "[image 20 x 12]"}],
    )  # fmt: skip


def test_reward_models_are_not_asked_about_pictures():
    messages = [Message.user("Which colour?", pixels())]

    async def assess(by_steps):
        client = RewardModelClient(RewardModel(model="m"), "rm", None)
        await (client.assess_step(messages, ["a"], is_last=True) if by_steps else client.assess(messages))

    for by_steps in (False, True):
        with pytest.raises(InvalidStep, match="an image, and a reward model takes text alone"):
            asyncio.run(assess(by_steps))


def test_a_pictures_part_passes_through_pickle():
    part = ImagePart.from_value(pixels())
    again = pickle.loads(pickle.dumps(Message.user("a", part)))
    assert again.images[0].data == part.data
    assert decoded(again.images[0]) == part


def test_text_needs_no_pillow():
    code = (
        "import sys, envgym; from envgym.types import *; from envgym.render.spelling import rewrite;"
        "m = as_messages([{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}]); m[0].as_dict();"
        "print([name for name in ('PIL', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_missing_pillow_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        envgym.errors.MissingDependency,
        match=r"an image in a message needs the package 'pillow', which is not installed: .*pillow",
    ):
        ImagePart.from_value(b"x")
