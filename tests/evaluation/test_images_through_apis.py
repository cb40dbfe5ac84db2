"""Rows with images through the command line, with a policy and a judge behind APIs that look at what they are sent."""

import base64
import io
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.chat_api import api

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200)}
GRADE = '''
import envgym

@envgym.reward
def names_the_colour(completion, answer):
    """Names the colour that the picture has."""
    return float(completion.strip() == answer)
'''


def file_of(colour, side, form):
    buffer = io.BytesIO()
    Image.new("RGB", (side, 20), COLOURS[colour]).save(buffer, form)
    return buffer.getvalue()


def seen(part):
    """The colour and the media type of an image in a request, which has nothing but a data URI."""
    assert part.keys() == {"type", "image_url"}
    media_type, content = re.fullmatch("data:image/(.*);base64,(.*)", part["image_url"]["url"]).groups()
    image = Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")
    place = image.getpixel((5, 5))
    nearest = min(COLOURS, key=lambda name: sum(abs(a - b) for a, b in zip(COLOURS[name], place, strict=True)))
    return nearest, media_type


def images_in(body):
    """The images of a request's messages, in order."""
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] != "text"]


@pytest.fixture(params=["jsonl", "parquet"])
def data(request, run, tmp_path):
    """A file of nine rows, of which each names or holds an image in one of three forms, and their answers."""
    path, rows = tmp_path / f"rows.{request.param}", []
    for number in range(9):
        colour, form = list(COLOURS)[number % 3], ("PNG", "JPEG", "GIF")[number // 3]
        content, name = file_of(colour, 20 + number, form), f"{number}.{form.lower()}"
        uri = f"data:image/{form.lower()};base64,{base64.b64encode(content).decode()}"
        (tmp_path / name).write_bytes(content)
        if request.param == "parquet":
            parts = [{"type": "image", "text": None}, {"type": "text", "text": "Which?"}]
            prompt, image = [{"role": "user", "content": parts}], {"bytes": content, "path": None}
        else:
            prompt, image = "<image>Which?", (name, uri)[number % 2]
        rows.append({"prompt": prompt, "answer": colour, "images": [image]})
    if request.param == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path, [row["answer"] for row in rows]


def test_a_hosted_model_is_evaluated_on_rows_with_images(run, tmp_path, data):
    path, answers = data
    (tmp_path / "grade.py").write_text(GRADE)

    def look(body):
        images = images_in(body)
        return 200, {"content": seen(images[0])[0] if images else "OK"}

    with api(look) as (url, bodies):
        done = run("eval", "--env", "grade.py", "--model", "seeing", "engine.kind=openai", f"engine.base_url={url}",
                   f"data.test_path={path}", "--name", "e", "eval.greedy=false")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "evals" / "e" / "result.json").read_text())
    assert (result["score"], result["failures"]) == (1.0, {})
    asked = [body for body in bodies if images_in(body)]
    assert sorted(seen(*images_in(body))[0] for body in asked) == sorted(answers)
    assert {seen(*images_in(body))[1] for body in asked} == {"png", "jpeg"}  # a GIF becomes a PNG
    assert all([part.get("text", "") for part in body["messages"][0]["content"]] == ["", "Which?"] for body in asked)
    shown = run("show", "evals/e").stdout
    assert re.search(r"\[image 2\d x 20\]", shown)


def test_a_judge_of_answers_looks_at_the_pictures(run, tmp_path, data):
    path, answers = data

    def look(body):
        images = images_in(body)
        return 200, {"content": seen(images[0])[0] if images else "OK"}

    def grade(body):
        [image] = images_in(body)
        text = body["messages"][0]["content"][0]["text"]
        answer = re.search(r"----- answer \w+ -----\n(.*?)\n-----", text)[1]
        return 200, {"content": json.dumps({"score": 10 if answer == seen(image)[0] else 0})}

    with api(look) as (url, _), api(grade) as (judge, bodies):
        done = run("eval", "--env", "judge", "--model", "seeing", "engine.kind=openai", f"engine.base_url={url}",
                   f"data.test_path={path}", f"env.judge.base_url={judge}", "env.judge.model=j", "--name", "e",
                   "eval.greedy=false")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "evals" / "e" / "result.json").read_text())
    assert (result["score"], result["failures"]) == (1.0, {})
    assert len(bodies) == len(answers)
