"""Rows with images: where they are, in which spelling, and what is refused."""

import asyncio
import base64
import io
import json
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envgym.errors import DataError
from envgym.hashing import task_hash
from envgym.tasks import DataConfig, load_tasks, prompt_key
from envgym.types import ImagePart, Message, TextPart


def png(color="red", size=(6, 4)):
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def as_uri(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def uri(color="red"):
    return as_uri(png(color))


RED, BLUE = (ImagePart.from_value(png(color)) for color in ("red", "blue"))


def load(path, **config):
    splits = load_tasks(DataConfig(path=str(path), test_fraction=0, **config), answer_required=False)

    async def read():
        return [await splits.train.get(index) for index in range(splits.train.size)]

    return asyncio.run(read())


def shown(task):
    """The messages of a prompt as (role, texts and images)."""
    return [(m.role, [part.text if isinstance(part, TextPart) else part for part in m.content]) for m in task.prompt]


@pytest.fixture
def write(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "blue.png").write_bytes(png("blue"))

    def write_file(rows, name="data.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
        return tmp_path / name

    return write_file


PLACES = [{"type": "text", "text": "First"}, {"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Which?", "images": ["red.png", "sub/blue.png"]}, [("user", [RED, BLUE, "Which?"])]),
        ({"question": "Which?", "image": {"bytes": None, "path": "red.png"}}, [("user", [RED, "Which?"])]),
        ({"prompt": "Which?", "images": [{"url": uri()}, {"image": "sub/../red.png"}]},
         [("user", [RED, RED, "Which?"])]),
        # TRL
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": PLACES}],
          "images": [uri("red"), uri("blue")]},
         [("system", ["S"]), ("user", ["First", RED, "or", BLUE])]),
        ({"prompt": [{"role": "user", "content": "Which?"}], "image": "red.png"}, [("user", [RED, "Which?"])]),
        # verl and ShareGPT: marks in what the assistant does not say
        ({"prompt": [{"role": "user", "content": "<image>A or <image>\nB?"}], "images": ["red.png", uri("blue")]},
         [("user", [RED, "A or ", BLUE, "\nB?"])]),
        ({"messages": [{"role": "user", "content": "<image>Which?"},
                       {"role": "assistant", "content": "I see <image>."},
                       {"role": "user", "content": "And <image>"}], "images": ["red.png", "sub/blue.png"]},
         [("user", [RED, "Which?"]), ("assistant", ["I see <image>."]), ("user", ["And ", BLUE])]),
        ({"prompt": "<image>Which?", "images": "red.png", "system": "S"},
         [("system", ["S"]), ("user", [RED, "Which?"])]),
        # a text may spell a mark where parts say the place
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "A <image> is"}, {"type": "image"}]}],
          "image": "red.png"}, [("user", ["A <image> is", RED])]),
        # OpenAI's two, and a template's
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": uri()}}, {"type": "input_image", "image_url": uri("blue")},
            {"type": "image", "image": "red.png"}, {"type": "text", "text": "Which?"}]}]},
         [("user", [RED, BLUE, RED, "Which?"])]),
    ],
)  # fmt: skip
def test_images_stand_at_their_places_in_all_spellings(row, messages, write):
    [task] = load(write([{**row, "answer": "x", "level": 3}]))
    assert shown(task) == messages
    assert task.fields == {"level": 3} | ({"system": "S"} if row.get("system") else {})
    json.dumps(dict(task.fields))
    assert all(image.read() for message in task.prompt for image in message.images)


def test_the_settings_name_another_field_or_none(write):
    path = write([{"question": "Which?", "picture": "red.png", "image": "python:3.12"}])
    [task] = load(path, images="picture")
    assert (shown(task), task.fields) == ([("user", [RED, "Which?"])], {"image": "python:3.12"})
    [task] = load(path)  # text that is no image is another field
    assert (task.prompt, task.fields) == ("Which?", {"picture": "red.png", "image": "python:3.12"})
    with pytest.raises(DataError, match=r"no field 'pictures', which data.images names\. Did you mean 'picture'"):
        load(path, images="pictures")
    [task] = load(write([{"question": "Which?", "images": ["nowhere.png"]}]), images=None)
    assert (task.prompt, task.fields) == ("Which?", {"images": ["nowhere.png"]})


def test_a_template_has_marks_and_prompts_with_other_images_have_other_keys(write):
    path = write([{"question": "Which?", "image": name} for name in ("red.png", "sub/blue.png", uri())])
    first, second, third = load(path, template="Look: <image> {}")
    assert shown(first) == [("user", ["Look: ", RED, " Which?"])]
    assert len({task_hash(task) for task in (first, second)}) == 2
    first, second, third = load(path)
    assert prompt_key(first) == prompt_key(third) != prompt_key(second)
    splits = load_tasks(DataConfig(path=str(path), template="{question}", test_fraction=0.5), answer_required=False)
    assert splits.test.size in (1, 2)  # two prompts, although the text is one


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow", "saved", "data.json", "data.csv"])
def test_tables_lists_and_data_sets(name, tmp_path, write):
    rows = [
        {"question": f"{n}?", "images": [{"bytes": png(color), "path": "x.png"} for color in colors]}
        for n, colors in enumerate([["red", "blue"], [], ["blue"]])
    ]
    path = tmp_path / name
    if name == "saved":
        datasets = pytest.importorskip("datasets")
        features = datasets.Features({"question": datasets.Value("string"), "images": datasets.List(datasets.Image())})
        datasets.Dataset.from_list(rows, features=features).save_to_disk(path)
    elif name == "data.json":
        path.write_text(json.dumps([
            {"question": row["question"], "images": [
                as_uri(image["bytes"]) for image in row["images"]
            ]} for row in rows
        ]))  # fmt: skip
    elif name == "data.csv":
        path.write_text('question,images\n0?,"[""red.png"", ""sub/blue.png""]"\n1?,\n2?,sub/blue.png\n')
    else:
        table = pyarrow.Table.from_pylist(rows)
        if name == "data.parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    tasks = load(path)
    assert [[image for m in (t.prompt if t.prompt != "1?" else ()) for image in m.images] for t in tasks] == [
        [RED, BLUE], [], [BLUE],
    ]  # fmt: skip


def test_parts_of_a_table_have_every_key(tmp_path):
    parts = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "Which?", "image": None}]
    table = pyarrow.Table.from_pylist(
        [{"prompt": [{"role": "user", "content": parts}], "images": [{"bytes": png(), "path": None}]}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    [task] = load(tmp_path / "data.parquet")
    assert shown(task) == [("user", [RED, "Which?"])]


def test_a_generator_may_give_anything(tmp_path):
    (tmp_path / "red.png").write_bytes(png())
    (tmp_path / "rows.py").write_text(
        "import io\nfrom pathlib import Path\nimport numpy as np\nfrom PIL import Image\n"
        "def rows():\n    file = Path(__file__).parent / 'red.png'\n"
        "    for image in ('red.png', file, file.read_bytes(), Image.open(file), np.asarray(Image.open(file))):\n"
        "        yield {'question': 'Which?', 'image': image, 'id': type(image).__name__}\n"
    )
    tasks = load(f"{tmp_path / 'rows.py'}:rows")
    assert [message.images[0].width for task in tasks for message in task.prompt] == [6] * 5


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image> <image>?", "image": "red.png"}, "2 marks <image>, and the row has 1 images"),
        ({"prompt": "<image>?", "images": []}, "1 marks <image>, and the row has 0 images: data.images=FIELD"),
        ({"prompt": "<image>?", "images": ["/data/17"]}, "has 0 images: data.images=FIELD names their column"),
        ({"prompt": [{"role": "user", "content": PLACES}], "images": ["red.png"]}, "2 parts of type image, and"),
        ({"prompt": [{"role": "user", "content": PLACES}]}, "2 parts of type image, and the row has 0 images"),
        ({"prompt": [{"role": "system", "content": "S"}], "images": ["red.png"]}, "no message of the user to show"),
        ({"prompt": "?", "images": ["red.png", "https://a.b/c.png"]},
         "image 2: 'https://a.b/c.png' is an address, and"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.b/c"}}]}]},
         "'http://a.b/c' is an address, and images are not fetched"),
        ({"prompt": "?", "image": "nowhere.png"}, "image 1: there is no file 'nowhere.png' in /"),
        ({"prompt": "?", "image": "../secret.png"}, "'../secret.png' is outside of /"),
        ({"prompt": "?", "image": "sub/../../secret.png"}, "is outside of /"),
        ({"prompt": "?", "image": "file:///etc/motd"}, "'/etc/motd' is outside of /"),
        ({"prompt": "?", "image": "link.png"}, "'link.png' is a link out of /"),
        ({"prompt": "?", "image": "text.png"}, "the file of an image cannot be read (it is no image)"),
        ({"prompt": "?", "image": {"bytes": "xx"}}, "there is no file 'xx'"),
        ({"prompt": "?", "images": [None, "red.png"]}, "image 1: an image is"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_with_its_place(row, problem, write, tmp_path):
    (tmp_path.parent / "secret.png").write_bytes(png())
    (tmp_path / "link.png").symlink_to(tmp_path.parent / "secret.png")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(DataError) as error:
        load(write([{"prompt": "1?"}, row]))
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:2: ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    [task] = load(write([{"prompt": "1?"}, row]), bad_rows="skip")
    assert task.prompt == "1?"


def test_a_folder_of_images_elsewhere_is_named(write, tmp_path):
    path = write([{"prompt": "?", "image": "blue.png"}, {"prompt": "?", "image": str(tmp_path / "sub" / "blue.png")}])
    tasks = load(path, image_folder=str(tmp_path / "sub"))
    assert [shown(task) for task in tasks] == [[("user", [BLUE, "?"])]] * 2
    with pytest.raises(DataError, match="outside of"):
        load(write([{"prompt": "?", "image": "../red.png"}]), image_folder=str(tmp_path / "sub"))


def test_files_of_the_hubs_cache_are_links(tmp_path):
    """A snapshot there is a folder of links to files that lie elsewhere, the file of rows too."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(png())
    (blobs / "2").write_text(json.dumps({"prompt": "?", "image": "red.png"}))
    (snapshot / "red.png").symlink_to("../../blobs/1")
    (snapshot / "data.jsonl").symlink_to("../../blobs/2")
    [task] = load(snapshot / "data.jsonl")
    assert shown(task) == [("user", [RED, "?"])]


def test_messages_are_equal_whatever_the_spelling(write):
    [task] = load(write([{"prompt": "<image>\nWhich?", "image": "red.png"}]))
    assert task.prompt == (Message("user", [RED, "\nWhich?"]),)


MEMORY = """
import asyncio, re, sys
import pyarrow.ipc, pyarrow.parquet
from envgym.tasks import DataConfig, load_tasks

def peak():
    return int(re.search("VmHWM:(.*) kB", open("/proc/self/status").read())[1]) // 1024

load_tasks(DataConfig(path=sys.argv[1], limit=1, test_fraction=0), answer_required=False)
before = peak()
tasks = load_tasks(DataConfig(path=sys.argv[2], test_fraction=0), answer_required=False).train

async def read():
    return {(await tasks.get(index)).prompt[0].images[0].sha256 for index in range(tasks.size)}

print(len(asyncio.run(read())), peak() - before)
"""


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_data_set_with_many_images_is_not_in_memory(kind, tmp_path, monkeypatch):
    """4,000 images of 40 KB: 160 MB, of JSON lines 210."""
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    red, noise = png(), random.Random(0)
    for name, count in (("small", 1), ("large", 4_000)):
        path, rows = tmp_path / f"{name}.{kind}", []
        for number in range(count):
            content = red + noise.randbytes(40_000)  # Pillow reads no further than the image
            image = {"bytes": content, "path": None} if kind != "jsonl" else {"url": as_uri(content)}
            rows.append({"question": f"{number}?", "images": [image]})
        if kind == "jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            continue
        table = pyarrow.Table.from_pylist(rows)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=100)  # as `datasets` writes images
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table, max_chunksize=1000)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / f"small.{kind}"), str(tmp_path / f"large.{kind}")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    n_images, growth = map(int, output.split())
    assert n_images == 4_000
    assert growth < 100
    assert not [*(tmp_path / "cache").rglob("*.*")], "the copy has no name, so that nothing has to be removed"


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_rows_in_python_have_images(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "red.png").write_bytes(png())
    rows = [{"question": "Which?", "images": [Image.open(tmp_path / "red.png"), tmp_path / "red.png", png("blue")]}]
    if kind == "datasets":
        datasets = pytest.importorskip("datasets")
        buffer = io.BytesIO()
        Image.new("RGB", (6, 4), "red").save(buffer, "JPEG")
        features = datasets.Features({"question": datasets.Value("string"), "images": datasets.List(datasets.Image())})
        stored = [{"question": "Which?", "images": [{"bytes": buffer.getvalue(), "path": None}]}]
        rows = datasets.Dataset.from_list(stored * 3, features=features).select([2])
    splits = load_tasks(DataConfig.model_validate({"path": rows, "test_fraction": 0}), answer_required=False)
    [message] = asyncio.run(splits.train.get(0)).prompt
    if kind == "datasets":
        assert message.images[0].read() == buffer.getvalue(), "its file, neither decoded nor written anew"
    else:
        assert [image.width for image in message.images] == [6, 6, 6]
        assert message.images[1:] == (RED, BLUE)
    with pytest.raises(DataError, match="a row of data: the file of an image cannot be read"):
        DataConfig.model_validate({"path": [{"question": "?", "image": b"text"}]})
