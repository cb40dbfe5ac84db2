"""`envgym export`: what goes into the file, and what is refused in one line. In a browser: see `test_page`."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser

import pytest

from envgym.cli import main

from .conftest import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "first"
    folder = make_run(path, steps=6, groups=64, members=8)
    (folder.logs / "engine.log").write_text("a log of this machine\n")
    return path


@pytest.fixture
def exported(tmp_path, run, monkeypatch, capsys):
    """exported(*words) -> (exit status, what it printed, the answers in the file named `out.html`)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(run)

    def export(*words):
        status = main(["export", "first", *words])
        said = capsys.readouterr()
        file = tmp_path / "out.html"
        held = re.search(r"id='held'>([^<]*)", file.read_text())[1] if file.exists() else None
        answers = held and json.loads(gzip.decompress(base64.b64decode(held)))
        return status, said.out + said.err, answers

    return export


def kinds(answers):
    return [path.partition("|")[0] for path in answers]


def test_it_is_written_again_but_no_other_file_is_replaced_unasked(exported, tmp_path):
    assert exported()[0] == 0
    assert exported()[0] == 0
    (tmp_path / "first.html").write_text("a page about envgym")
    status, said, _ = exported()
    assert (status, said.count("\n")) == (2, 1)
    assert "first.html exists and is not an export" in said
    assert (tmp_path / "first.html").read_text() == "a page about envgym"
    assert exported("--out", "first.html")[0] == 0


def test_a_small_file_has_the_newest_lists_and_episodes_and_says_so(exported, tmp_path):
    status, said, whole = exported("--out", "out.html")
    assert status == 0
    assert "100 of 3072 episodes" in said
    assert "lists" not in said
    assert kinds(whole).count("list") == 6
    assert [answer["logs"] for path, answer in whole.items() if path.startswith("run|")] == [[]]
    assert kinds(whole).count("episode") == 100
    status, said, small = exported("--out", "out.html", "--megabytes", "0.32")
    assert status == 0
    assert (tmp_path / "out.html").stat().st_size < 0.32 * 2**20
    lists = [path for path in small if path.startswith("list|")]
    assert f"the lists of {len(lists)} of 6 steps" in said
    assert [int(path.split("|")[2]) for path in lists] == list(range(6, 6 - len(lists), -1))
    assert kinds(small).count("episode") > 5


def test_a_name_is_text_in_the_title_and_in_the_files_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "R&lt;D <b>&amp; 'x' \"y\""
    make_run(tmp_path / name, steps=1)
    assert main(["export", name, "--out", "out.html"]) == 0
    found = HTMLParser()
    titles, tags = [], []
    found.handle_starttag = lambda tag, _: tags.append(tag)
    found.handle_data = lambda text: titles.append(text) if tags[-1] == "title" else None
    found.feed((tmp_path / "out.html").read_text())
    assert titles[0] == name
    assert "b" not in tags
    assert main(["export", name, "--out", "out.html"]) == 0


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--out", "nowhere/out.html"], "cannot be written: its folder does not exist"),
        (["--out", "runs"], "or it is a folder"),
        (["--episodes", "-3"], "--episodes is a number of episodes, 0 or more, not -3"),
        (["--episodes", "many"], "--episodes"),
        (["--megabytes", "nan"], "--megabytes is a size above 0, not nan"),
        (["--megabytes", "0.1"], "too little for the page and its curves"),
        (["--out", f"{'x' * 250}.html"], "cannot be written: File name too long"),
    ],
)
def test_what_cannot_be_done_is_one_line(exported, tmp_path, words, because):
    before = sorted(tmp_path.iterdir())
    status, said, _ = exported(*words)
    assert (status, said.count("\n")) == (2, 1)
    assert because in said
    assert sorted(tmp_path.iterdir()) == before
