"""Files of many rows: they stay on the disk, and what a start has read of them is saved for the next."""

import asyncio
import json
import logging
import os
import random
import sys

import pyarrow
import pyarrow.parquet
import pytest

from envgym.errors import DataError, RunError
from envgym.tasks import DataConfig, load_tasks, reading
from envgym.tasks.columns import TaskReader, prompt_key
from envgym.tasks.config import SourceConfig
from envgym.tasks.rows import TextLines, open_rows
from envgym.types import Task

ROWS = [
    {"question": f"q{number % 40}", "hint": "h", "answer": str(number), "level": number % 3} for number in range(60)
]


@pytest.fixture(autouse=True)
def large(tmp_path, monkeypatch):
    """A cache of the test's own; every file counts as large, and is read line by line."""
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("envgym.tasks.large_files.IN_MEMORY", 0)
    monkeypatch.setattr("envgym.tasks.large_files.PIECE_BYTES", 1)
    monkeypatch.setattr("envgym.tasks.split.INDEXED", 1)


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(**settings):
    """The tasks of both splits, the keys of the held-out prompts and the columns."""
    splits = load_tasks(DataConfig(**settings), answer_required=False)

    async def tasks():
        return [[await split.get(index) for index in range(split.size)] for split in (splits.train, splits.test)]

    return asyncio.run(tasks()), splits.held_out, splits.columns


def indices(tmp_path):
    return sorted((tmp_path / "cache" / "index").glob("*"))


@pytest.fixture
def readings(monkeypatch):
    """The rows of files that were read at a start."""
    read, original = [], reading.read_rows

    def counted(rows, *arguments):
        read.append(rows)
        return original(rows, *arguments)

    monkeypatch.setattr("envgym.tasks.split.read_rows", counted)
    return read


def test_a_line_is_read_from_its_file_and_one_that_has_changed_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", ["\n", ROWS[0], "  \n", "\t\n", ROWS[1], ROWS[2], "\n"])
    rows = open_rows(path)
    assert [rows[index] for index in range(len(rows))] == ROWS[:3]
    assert [rows.name(index) for index in range(3)] == ["rows-2", "rows-5", "rows-6"]
    text = path.read_text()
    path.write_text(text.replace("q1", "Q1") + json.dumps(ROWS[3]) + "\n")
    assert (rows[0], rows[2], len(rows)) == (ROWS[0], ROWS[2], 3)
    with pytest.raises(
        RunError, match=r"rows\.jsonl:5 has changed since the file was first read: a run needs its data"
    ):
        rows[1]
    path.write_text(text[: text.index("q2")])
    with pytest.raises(RunError, match=r"rows\.jsonl:6 has changed"):
        rows[2]
    path.write_text(text)
    os.replace(write(tmp_path / "new.jsonl", ROWS), path)
    assert rows[1] == ROWS[1], "a file that replaces it is another one"
    with pytest.raises(IndexError):
        rows[3]


def test_a_changed_line_is_no_bad_row_that_is_left_out(tmp_path, monkeypatch):
    path, changes = write(tmp_path / "rows.jsonl", ROWS), []

    def changed(self, row, location, name):
        if not changes:
            changes.append(path.write_text(path.read_text().replace("q1", "Q1")))
        return original(self, row, location, name)

    original = TaskReader.read
    monkeypatch.setattr(TaskReader, "read", changed)
    with pytest.raises(RunError, match="has changed"):
        read(path=str(path), bad_rows="skip")
    assert not indices(tmp_path)


@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_limit_counts_the_lines_that_are_not_blank(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("envgym.tasks.large_files.PIECE_BYTES", piece)
    path = write(tmp_path / "rows.jsonl", ["\n", ROWS[0], "\n", *ROWS[1:]])
    for limit in (1, 2, 3):
        rows = open_rows(path, limit=limit)
        assert (len(rows), list(rows), rows[limit - 1]) == (limit, ROWS[:limit], ROWS[limit - 1])


def test_lines_of_text_are_unmodified(tmp_path):
    (tmp_path / "text.txt").write_bytes("\ufeffone \n\n  \n two\r\nthree".encode())
    rows = TextLines(tmp_path / "text.txt", "text", None)
    assert [row["text"] for row in rows] == ["one ", " two", "three"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_second_start_reads_no_row_and_has_the_same_tasks(tmp_path, readings, caplog, kind):
    path = tmp_path / f"rows.{kind}"
    bad = [{"question": "", "hint": "h", "answer": "1", "level": 1}]
    if kind == "jsonl":
        write(path, [*ROWS, *bad])
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, *bad]), path)
    else:
        path.mkdir()
        write(path / "a.jsonl", ROWS[:30])
        write(path / "b.jsonl", [*ROWS[30:], *bad])
    settings = {"path": str(path), "bad_rows": "skip", "select": {"level": [0, 1]}, "limit": 35, "id": "answer"}
    with caplog.at_level(logging.WARNING):
        first = read(**settings)
        [index] = indices(tmp_path)
        warnings = [record.getMessage() for record in caplog.records]
        caplog.clear()
        second = read(**settings)
    assert second == first
    assert len(first[0][0]) + len(first[0][1]) == 35
    assert len(readings) == 1
    assert [record.getMessage() for record in caplog.records] == warnings
    assert indices(tmp_path) == [index]


@pytest.fixture
def by_processes(monkeypatch):
    """Start a process per ten rows; the numbers of those that a reading has started."""
    counts, original = [], reading._read_in_processes

    def counted(*arguments):
        counts.append(len(arguments[0]))
        return original(*arguments)

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(reading, "FIRST", 4)
    monkeypatch.setattr(reading, "PART", 10)
    monkeypatch.setattr(reading, "_read_in_processes", counted)
    return counts


@pytest.mark.parametrize("kind", ["jsonl", "folder"])
def test_rows_that_several_processes_read_are_those_that_one_does(tmp_path, monkeypatch, caplog, by_processes, kind):
    rows = [{"instruction": f"Add {number % 40}.", "input": "1\n2", "answer": "3"} for number in range(60)]
    rows[20]["input"], rows[33]["instruction"], rows[50]["instruction"] = "", "", " "
    if kind == "jsonl":
        path = write(tmp_path / "rows.jsonl", ["\ufeff", *rows[:20], "\n", *rows[20:]])
    else:
        path = tmp_path / "rows"
        path.mkdir()
        for name, start, end in (("a", 0, 3), ("b", 3, 40), ("c", 40, 60)):
            write(path / f"{name}.jsonl", rows[start:end])
    results = []
    for part in (10, 1000):
        monkeypatch.setattr(reading, "PART", part)
        monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / f"cache-{part}"))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            results.append((read(path=str(path), bad_rows="skip"), [record.getMessage() for record in caplog.records]))
    assert results[0] == results[1]
    assert sum(map(len, results[0][0][0])) == 58
    notes, left_out = results[0][1]
    assert "the prompt is instruction and input; " in notes
    assert notes.endswith("(57 rows)")
    assert left_out.endswith("2 of 60 rows are left out: 2, as field 'instruction' is empty")
    assert by_processes == [3]


def test_the_first_mistake_ends_the_reading_by_several_processes(tmp_path, by_processes):
    rows = [*ROWS[:40], {**ROWS[40], "question": ""}, *ROWS[41:55], "{\n", *ROWS[55:]]
    with pytest.raises(DataError, match=r"rows\.jsonl:41: field 'question' is empty; data\.bad_rows=skip leaves"):
        read(path=str(write(tmp_path / "rows.jsonl", rows)))
    assert by_processes == [3]
    assert not indices(tmp_path)


def test_several_processes_read_images(tmp_path, by_processes):
    rows = [*ROWS[:50], {**ROWS[50], "image": "a.png"}, *ROWS[51:]]
    path = write(tmp_path / "rows.jsonl", rows)
    read(path=str(path), bad_rows="skip")
    assert by_processes == [3]
    assert not indices(tmp_path), "they may change"


@pytest.mark.parametrize("settings", [{"id": "answer"}, {"limit": 40, "bad_rows": "skip"}])
def test_one_process_compares_ids_and_counts_the_rows_in_use(tmp_path, by_processes, settings):
    splits, *_ = read(path=str(write(tmp_path / "rows.jsonl", ["{\n", *ROWS])), **{"bad_rows": "skip", **settings})
    assert sum(map(len, splits)) == settings.get("limit", 60)
    assert not by_processes


def test_what_was_read_is_not_used_for_other_content_or_settings(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    first = read(path=str(path))
    assert read(path=str(path), test_fraction=0.5)[0] != first[0]
    assert len(indices(tmp_path)) == 1, "the split is drawn at every start"
    assert read(path=str(path), prompt="answer")[1] != first[1]
    assert len(indices(tmp_path)) == 2
    write(path, [*ROWS, {**ROWS[0], "question": "new"}])
    assert sum(map(len, read(path=str(path))[0])) == len(ROWS) + 1
    write(path, [*ROWS, {**ROWS[0], "question": ""}])
    with pytest.raises(DataError, match=r"rows\.jsonl:61: field 'question' is empty"):
        read(path=str(path))


def test_images_are_read_at_every_start(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{**row, "image": "a.png"} for row in ROWS])
    with pytest.raises(DataError, match="left out: 60"):
        read(path=str(path), bad_rows="skip")
    assert not indices(tmp_path)


def test_a_cache_that_cannot_be_written_or_read_is_done_without(tmp_path, readings):
    path = write(tmp_path / "rows.jsonl", ROWS)
    first = read(path=str(path))
    [index] = indices(tmp_path)
    (index / "numbers").write_bytes(b"")
    assert read(path=str(path)) == first
    (index / "numbers").unlink()
    index.rename(tmp_path / "index")
    (tmp_path / "cache" / "index").rmdir()
    (tmp_path / "cache" / "index").write_text("")
    assert read(path=str(path)) == first
    assert len(readings) == 3


def test_spaces_do_not_make_another_prompt():
    key = prompt_key(Task("", "What is 1 + 1?"))
    assert key == 980467747070298395, "the same on every machine, and in every version"
    spaces = [char for char in map(chr, range(sys.maxunicode + 1)) if char.isspace()]
    assert len(spaces) > 20
    for space in (*spaces, "  ", "\n\n"):
        for prompt in (f"What is{space}1 + 1?", f"{space}What is 1 + 1?", f"What is 1 + 1?{space}"):
            assert prompt_key(Task("", prompt)) == key, repr(space)
    for char in ("\u200b", "\x00", "\ufeff", "_"):
        assert prompt_key(Task("", f"What is{char}1 + 1?")) != key, repr(char)


VALUES = {
    "question": [
        "a", "a  b", " [1] + 2", "[]", '{"role": 1}', "see <image>", "", " \n", "\u00a0[", 7, None, ["a"], True,
        '[{"role": "user", "content": "hi"}]', [{"role": "user", "content": "hi"}],
    ],
    "answer": ["1", "", " ", "9", 1, 0, 1.5, float("nan"), None, True, ["1", 2], []],
    "level": [1, "easy", None, {"a": [1]}, {"$tuple": [1]}, 2.5, float("inf")],
    "image": [None, "", "python:3.11", "a.png", "data:"],
    "picture": ["", None, "a.png"],
    "system": ["", "Be brief.", None, [{"text": "Be"}]],
    "context": ["", "A passage.", " ", 3],
    "Input": ["", "x"],
    "video": ["", "v.mp4"],
    "$tuple": ["x", [1]],
}  # fmt: skip
SETTINGS = [
    {}, {"template": "{} {level}"}, {"answer_pattern": "([^9]+)"}, {"images": "picture"}, {"difficulty": "level"},
    {"prompt": "question", "system": "Be kind."},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("answer_required", [True, False])
def test_the_quick_reading_of_rows_is_that_of_tasks(settings, answer_required):
    def result(read, *arguments):
        try:
            return read(*arguments)
        except (DataError, ValueError) as error:
            return str(error)

    rng, n_keys = random.Random(0), 0
    for group in range(36):
        named = [name for name in VALUES if name in settings.values()]
        names = dict.fromkeys(["question", "answer", *named, list(VALUES)[2 + group % 8]])
        quick, slow = (TaskReader(SourceConfig(**settings), answer_required=answer_required) for _ in range(2))
        for number in range(80):
            values = {name: VALUES[name][0] if rng.random() < 0.8 else rng.choice(VALUES[name]) for name in names}
            row = {name: value for name, value in values.items() if rng.random() < 0.95}
            key = quick.key(row)
            read = result(slow.read, row, f"rows.jsonl:{number}", f"rows-{number}")
            if key is None:
                assert result(quick.read, row, f"rows.jsonl:{number}", f"rows-{number}") == read
            else:
                assert key == (read[1] if isinstance(read, tuple) else read), row
                n_keys += 1
        assert quick.facts() == slow.facts()
    assert bool(n_keys) == (settings.keys() <= {"prompt", "system"})
