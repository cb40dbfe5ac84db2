"""Recorded data with images: where they are in the conversations, and what of them a record has."""

import asyncio
import base64
import io
import json
import pickle

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import envgym
from envgym.episodes.record import from_record, to_record, write_rollouts
from envgym.errors import ConfigError, DataError
from envgym.images import ImageFolder
from envgym.types import Episode, ImagePart, Message, Outcome, TextPart
from envgym.types.images import decoded


def png(color):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = (ImagePart.from_value(png(color)) for color in ("red", "blue"))
IMAGE = {"type": "image"}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    (tmp_path / "blue.png").write_bytes(png("blue"))

    def write(*rows):
        (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(tmp_path / "data.jsonl")

    return write


def opened(path, read, **settings):
    """`read(spec, task)` of each training task."""

    async def main():
        data = {"path": path, "test_fraction": 0, **settings.pop("data", {})}
        async with envgym.spec("recorded", data=data, **settings) as spec:
            tasks = [await spec.tasks("train").get(index) for index in range(spec.tasks("train").size)]
            return [read(spec, task) for task in tasks]

    return asyncio.run(main())


def conversations(path, **settings):
    def read(spec, task):
        assert all(image.read() for talk in spec.conversations(task) for m in talk for image in m.images)
        json.dumps(dict(task.fields))  # what records have
        return [[contents(message) for message in talk] for talk in spec.conversations(task)]

    return opened(path, read, **settings)


def contents(message):
    return [message.role[0], *(part.text if isinstance(part, TextPart) else part for part in message.content)]


def user(*parts):
    return {"role": "user", "content": list(parts)}


def says(text):
    return {"role": "assistant", "content": text}


def text(value):
    return {"type": "text", "text": value}


URI = f"data:image/png;base64,{base64.b64encode(png('blue')).decode()}"


@pytest.mark.parametrize(
    ("row", "talks"),
    [
        # TRL: messages, or prompt and completion; then ShareGPT's marks, in a second turn too
        ({"messages": [user(IMAGE, text("Which?")), says("Red."), user(text("And"), IMAGE), says("Blue.")],
          "images": ["red.png", "blue.png"]},
         [[["u", RED, "Which?"], ["a", "Red."], ["u", "And", BLUE], ["a", "Blue."]]]),
        ({"prompt": [user(IMAGE, text("Which?"))], "completion": [says("Red.")], "image": "red.png"},
         [[["u", RED, "Which?"], ["a", "Red."]]]),
        ({"conversations": [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "Red, <image>."},
                            {"from": "human", "value": "And <image>?"}, {"from": "gpt", "value": "Blue."}],
          "images": ["red.png", "blue.png"]},
         [[["u", RED, "Which?"], ["a", "Red, <image>."], ["u", "And ", BLUE, "?"], ["a", "Blue."]]]),
        ({"instruction": "Which?", "output": "Red.", "images": "red.png"}, [[["u", RED, "Which?"], ["a", "Red."]]]),
        # OpenAI: parts have the images
        ({"messages": [user({"type": "image_url", "image_url": {"url": URI}}, text("Which?")), says("Blue.")]},
         [[["u", BLUE, "Which?"], ["a", "Blue."]]]),
        ({"prompt": [user({"type": "image_url", "image_url": {"url": URI}}, text("Which?"))], "input": "Look well.",
          "completion": [says("Blue.")]},
         [[["u", BLUE, "Which?", "\n\nLook well."], ["a", "Blue."]]]),
        ({"messages": json.dumps([user({"type": "image_url", "image_url": {"url": URI}}), says("Blue.")])},
         [[["u", BLUE], ["a", "Blue."]]]),
        # preferences: both answers have the prompt's
        ({"prompt": [user(IMAGE, text("Which?"))], "chosen": [says("Red.")], "rejected": [says("Blue.")],
          "images": ["red.png"]},
         [[["u", RED, "Which?"], ["a", "Red."]], [["u", RED, "Which?"], ["a", "Blue."]]]),
        ({"prompt": "Which?", "chosen": "Red.", "rejected": "Blue.", "images": ["red.png"]},
         [[["u", RED, "Which?"], ["a", "Red."]], [["u", RED, "Which?"], ["a", "Blue."]]]),
        # labelled answers and steps
        ({"prompt": "Which?", "completion": "Red.", "label": True, "image": "red.png"},
         [[["u", RED, "Which?"], ["a", "Red."]]]),
        ({"prompt": "Which?", "completions": ["It is", "red."], "labels": [True, True], "image": "red.png"},
         [[["u", RED, "Which?"], ["a", "It is\n\n"], ["a", "red.\n\n"]]]),
    ],
)  # fmt: skip
def test_images_stand_in_the_conversations(row, talks, write):
    assert conversations(write(row)) == [talks]


def test_feedback_in_a_conversation_has_its_images(write):
    row = {"messages": [user(text("Go.")), says("Left."), user(IMAGE), says("Up.")], "image": "blue.png"}

    async def main():
        async with envgym.spec("recorded", data={"path": write(row), "test_fraction": 0}) as spec:
            task = await spec.tasks("train").get(0)
            env = spec.make()
            await env.reset(seed=0, options={"task": task})
            observation, *_ = await env.step("Left.")
            return observation

    assert asyncio.run(main()).messages == (Message("user", BLUE),)


def test_fields_name_the_images_and_a_task_of_a_record_has_none_but_its_names(write):
    row = {"messages": [user(IMAGE, text("Which?")), says("Red.")], "images": [URI], "level": 3}

    def read(spec, task):
        assert pickle.loads(pickle.dumps(task)).fields["images"][0].image.read() == BLUE.read()
        record = json.loads(json.dumps(to_record(Episode("e", task, Outcome.finish()))))
        assert URI[40:60] not in json.dumps(record)
        again = from_record(record).task
        assert again == task
        assert spec.conversations(again) == spec.conversations(task)  # with no file behind the names
        with pytest.raises(DataError, match="known here by its name alone"):
            spec.conversations(again)[0][0].images[0].read()
        return dict(task.fields)

    [fields] = opened(write(row), read)
    assert fields == row | {"images": [BLUE.as_dict()]}


def test_rows_of_text_have_their_own_fields(write):
    row = {"messages": json.dumps([user(text("1 + 2?")), says("3")]), "note": {"type": "image", "url": "http://a.b"}}
    assert opened(write(row), lambda spec, task: (type(task.fields), dict(task.fields))) == [(dict, row)]


def test_a_table_has_files_content(tmp_path):
    path = tmp_path / "data.parquet"
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Which?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [text("Red.")]}]}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row | {"images": [{"bytes": png("red"), "path": None}]}]), path
    )
    assert conversations(str(path)) == [[[["u", RED, "Which?"], ["a", "Red."]]]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_saved_episodes_have_their_images_beside_them(tmp_path, write, suffix):
    def read(spec, task):
        episode = Episode("e", task, Outcome.finish())
        episode.messages = list(spec.conversations(task)[0])
        return episode

    [episode] = opened(write({"messages": [user(IMAGE), says("Red.")], "image": "red.png"}), read)
    episodes = tmp_path / f"episodes.{suffix}"
    if suffix == "parquet":
        write_rollouts(episodes, [episode])
    else:
        episodes.write_text(json.dumps(to_record(episode)))
    with pytest.raises(DataError, match=rf"{suffix}:1: image \w+ is not there: copy the folder episodes.{suffix}.im"):
        conversations(str(episodes))
    ImageFolder(tmp_path / f"episodes.{suffix}.images").store(decoded(RED))
    assert conversations(str(episodes)) == [[[["u", RED], ["a", "Red."]]]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [user(IMAGE, IMAGE), says("x")], "images": ["red.png"]}, "2 parts of type image, and"),
        ({"messages": [user(IMAGE), says("x")]}, "1 parts of type image, and the row has 0 images"),
        ({"prompt": "?", "completion": "x", "image": "http://a.b/c.png"}, "is an address, and images are not fetched"),
        ({"prompt": "?", "completion": "x", "image": "../c.png"}, "'../c.png' is outside of /"),
        ({"text": "Once", "image": "red.png"}, "plain text has no images: leave them out with data.images=null"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_with_its_place(row, problem, write, tmp_path):
    with pytest.raises(DataError) as error:
        conversations(write(row))
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:1: ")
    assert problem in str(error.value)


def test_settings_name_the_field_and_the_folder_for_all_sources(write, tmp_path):
    row = {"prompt": "Which?", "completion": "Red.", "picture": "red.png"}
    [talks] = conversations(write(row), data={"images": "picture", "image_folder": str(tmp_path)})
    assert talks == [[["u", RED, "Which?"], ["a", "Red."]]]
    sources = {"path": None, "sources": {"a": {"path": write(row), "images": "picture"}}}
    with pytest.raises(ConfigError, match=r"data.sources.NAME.images cannot be set for recorded data: set data.images"):
        conversations("", data=sources)
    with pytest.raises(DataError, match=r"env.template fills in text, and the prompt's last message has an image"):
        conversations(write({"prompt": "?", "completion": "x", "image": "red.png"}), template="{}!")
