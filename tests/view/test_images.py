"""Images on the page: only those of the run that is shown, as thumbnails, and as one box among the tokens."""

import base64
import gzip
import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.episodes.files import write_episodes
from envgym.episodes.record import write_rollouts
from envgym.errors import DataError
from envgym.images import ImageFolder
from envgym.run_folder import RunFolder
from envgym.types import ImagePart, ImageSpan, Message, Segment
from envgym.types.images import decoded
from envgym.view.notebook import read_episode
from envgym.view.server import Answers
from tests.pictures import picture

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, viewing

SECRET = picture(99)


def name_of(content):
    return hashlib.sha256(content).hexdigest()


def with_pictures(folder, *contents):
    """An episode whose prompt shows images, with three placeholders each."""
    images = [folder.store(decoded(ImagePart.from_value(content))) for content in contents]
    episode = made(0, 0, reward=1.0)
    episode.messages[0] = Message("user", ["Left ", images[0], " right?", *images[1:]])
    spans = tuple(ImageSpan(image.sha256, 1 + 4 * n, 3) for n, image in enumerate(images))
    prompt = Segment("prompt", [40, *[60, 60, 60, 41] * len(images)], images=spans)
    episode.rows[0].segments[0] = prompt
    return episode


@pytest.fixture
def gallery(tmp_path):
    """A run with held-out episodes, an evaluation and two files of episodes, each with images of its own."""
    run = RunFolder(tmp_path / "runs" / "first")
    run.create()
    run.held_out.mkdir()
    (run.path / "config.yaml").write_text("seed: 7\nstages:\n- {steps: 9, model: none}\n")
    run.append_metrics({"step": 1, "reward/mean": 0.5})
    write_rollouts(run.rollout_file(1), [with_pictures(run.images, picture(1), picture(2))])
    write_rollouts(run.held_out_file(1), [with_pictures(run.images, picture(3))])
    (tmp_path / "evals" / "a").mkdir(parents=True)
    evaluation = with_pictures(ImageFolder(tmp_path / "evals" / "a" / "images"), picture(4))
    write_episodes(tmp_path / "evals" / "a" / "episodes.jsonl", [evaluation])
    for number, name in enumerate(("x.jsonl", "x.parquet")):
        file = with_pictures(ImageFolder(tmp_path / f"{name}.images"), picture(5 + number))
        write_episodes(tmp_path / name, [file])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{name_of(SECRET)}.png").write_bytes(SECRET)
    return tmp_path


def get(url, question):
    """Status, content type and content of an image."""
    try:
        with urllib.request.urlopen(f"{url}image?q={urllib.parse.quote(question)}", timeout=20) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


SOURCES = {
    "runs/first": (1, 2, 3), "runs/first/held_out": (1, 2, 3), "evals/a": (4,), "x.jsonl": (5,), "x.parquet": (6,),
}  # fmt: skip


def test_a_source_serves_its_images_and_no_others(gallery):
    with viewing(gallery, "runs", "evals", "x.jsonl", "x.parquet") as url:
        for source, numbers in SOURCES.items():
            for number in range(1, 7):
                content = picture(number)
                status, kind, body = get(url, f"{source}|{name_of(content)}")
                if number in numbers:
                    assert (status, kind, body) == (200, "image/png", content)
                else:
                    assert (status, kind) == (404, "application/json; charset=utf-8")
            for name in (name_of(SECRET), f"../../images/{name_of(SECRET)}", "../config", "", "*", "a" * 64):
                assert get(url, f"{source}|{name}")[0] == 404, (source, name)
        for question in ("", "runs/first", f"runs/first|{name_of(picture(1))}|x"):
            assert get(url, question)[0] == 400
        assert get(url, f"images|{name_of(SECRET)}")[0] == 404


@pytest.mark.parametrize("place", ["file", "folder", "beside"])
def test_a_link_to_images_elsewhere_is_not_followed(gallery, place):
    run, file = gallery / "runs" / "first", f"{name_of(SECRET)}.png"
    if place == "file":
        (run / "images" / file).symlink_to(gallery / "images" / file)
    elif place == "folder":
        (run / "images").rename(run / "old")
        (run / "images").symlink_to(gallery / "images")
    else:
        (gallery / "x.jsonl.images").rename(gallery / "old")
        (gallery / "x.jsonl.images").symlink_to(gallery / "images")
    answers = Answers([run, gallery / "x.jsonl"])
    source = str(gallery / "x.jsonl" if place == "beside" else run)
    with pytest.raises(DataError, match="outside of what was named: it is not followed"):
        answers.image(f"{source}|{name_of(SECRET)}")


def test_a_swapped_or_huge_file_is_not_shown(gallery, monkeypatch):
    run = gallery / "runs" / "first"
    file = run / "images" / f"{name_of(picture(1))}.png"
    answers = Answers([run])
    monkeypatch.setattr("envgym.view.sources.MAX_BYTES", 10)
    with pytest.raises(DataError, match="is larger than 0 MiB"):
        answers.image(f"{run}|{name_of(picture(1))}")
    monkeypatch.undo()
    file.write_text("<script>alert(1)</script>")
    with pytest.raises(DataError, match="has changed: its content is not what it is named after"):
        answers.image(f"{run}|{name_of(picture(1))}")


@pytest.mark.parametrize("source", ["runs/first", "x.jsonl"])
def test_an_episode_has_its_parts_and_its_placeholders(gallery, monkeypatch, source):
    monkeypatch.chdir(gallery)
    record = Answers([Path(source)])(f"episode|{source}|{1 if source[0] == 'r' else 0}|0")
    parts = record["messages"][0]["parts"]
    assert [part["type"] for part in parts][:3] == ["text", "image", "text"]
    assert (parts[0]["text"], parts[1]["width"], record["messages"][1]["parts"]) == ("Left ", 12, [])
    [row] = record["rows"]
    for image in row["images"]:
        assert row["ids"][image["start"] : image["start"] + image["length"]] == [60] * 3
    assert [image["sha256"] for image in row["images"]] == [p["sha256"] for p in parts if p["type"] == "image"]


def test_spans_that_are_not_in_their_segment_are_left_out(gallery):
    path = gallery / "x.jsonl"
    record = json.loads(path.read_text())
    [image] = record["rows"][0]["segments"][0]["images"]
    segment = {**record["rows"][0]["segments"][0], "token_ids": [1] * 5, "weights": [0.0] * 5}
    places = [(0, 10**9), (-1, 2), (4, 2), (0, 0), (1, 2)]
    segment["images"] = [{**image, "start": start, "length": length} for start, length in places]
    record["rows"][0]["segments"] = [segment, segment]
    path.write_text(json.dumps(record) + "\n")
    [row] = Answers([path])(f"episode|{path}|0|0")["rows"]
    assert [(image["start"], image["length"]) for image in row["images"]] == [(1, 2), (6, 2)]


def test_a_picture_is_seen_in_the_conversation_and_is_one_box_among_the_tokens(gallery, page):
    with viewing(gallery, "runs", "evals") as url:
        page.goto(f"{url}#/episode/runs%2Ffirst/1/0")
        page.wait_for_selector(".talk img")
        page.wait_for_function("() => [...document.querySelectorAll('.talk img')].every(i => i.naturalWidth === 12)")
        first = page.locator(".turn").first
        assert [part in first.inner_text() for part in ("Left", "right?")] == [True, True]
        assert first.locator("img").count() == 2
        assert first.locator("img").first.get_attribute("alt") == "[image 12 x 12]"
        page.keyboard.press("t")
        page.wait_for_selector(".tokens .image img")
        assert page.locator(".tokens > span").count() == 3 + 2 + 3  # text, boxes, and what was sampled
        assert page.locator(".tokens .image").first.inner_text() == "3 tokens"
        page.locator(".tokens .image img").first.click()
        assert page.locator(".bar").inner_text().startswith("token 1: id 60")
        page.goto(f"{url}#/episode/evals%2Fa/0/0?as=talk")
        page.wait_for_function("() => document.querySelectorAll('.talk img').length === 1")


def test_a_picture_that_is_gone_is_its_size(gallery, page):
    for file in (gallery / "runs" / "first" / "images").iterdir():
        file.unlink()
    with viewing(gallery, "runs") as url:
        page.goto(f"{url}#/episode/runs%2Ffirst/1/0")
        page.wait_for_function("() => document.querySelector('.turn')?.innerText.includes('[image 12 x 12]')")
        assert page.locator("img").count() == 0
    page.complaints.clear()  # the browser's own, of the 404


def export(gallery, monkeypatch, *words):
    """The answers in an exported file."""
    monkeypatch.chdir(gallery)
    assert main(["export", "runs/first", "--out", "out.html", *words]) == 0
    held = re.search(r"id='held'>([^<]*)", (gallery / "out.html").read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(held)))


def test_an_export_has_its_images_and_asks_for_nothing(gallery, monkeypatch, page):
    answers = export(gallery, monkeypatch)
    names = [key.rpartition("|")[2] for key in answers if key.startswith("image|")]
    assert sorted(names) == sorted(map(name_of, (picture(1), picture(2), picture(3))))
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{gallery}/out.html#/episode/{urllib.parse.quote('runs/first', safe='')}/1/0")
    page.wait_for_function("() => [...document.querySelectorAll('.talk img')].filter(i => i.naturalWidth).length === 2")
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []


def test_an_export_has_as_many_images_as_fit(gallery, monkeypatch):
    run = RunFolder(gallery / "runs" / "first")
    large = [picture(seed, 400) for seed in (7, 8, 9)]  # 480 kB each
    episode = with_pictures(run.images, *large)
    write_rollouts(run.rollout_file(1), [episode, replace(episode, id="other")])
    answers = export(gallery, monkeypatch, "--megabytes", "1.5")
    kinds = [key.partition("|")[0] for key in answers]
    assert kinds.count("image") == 1
    assert kinds.count("episode") == 3
    assert (gallery / "out.html").stat().st_size < 1.5 * 2**20


def test_a_notebook_has_one_mark_for_an_image(gallery):
    run = gallery / "runs" / "first"
    text = re.sub("<[^>]*>", "", read_episode(run, "run", 1, 0)._repr_html_())
    assert text.count("[image]") == 2
    assert "60 " not in text  # the placeholder, which has no text without a tokenizer
    assert text.count("41 ") == 2


def test_show_tells_the_size_of_an_image(gallery, monkeypatch, capsys):
    monkeypatch.chdir(gallery)
    assert main(["show", "runs/first"]) == 0
    assert "Left [image 12 x 12] right?[image 12 x 12]" in capsys.readouterr().out
