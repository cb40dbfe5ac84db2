"""Where tasks come from other than one file: folders, data sets that the `datasets` library saved, and generators."""

import asyncio
import base64
import io
import json
import os
import tarfile
import textwrap

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from envgym.errors import ConfigError, DataError, NameNotFound
from envgym.tasks import DataConfig, load_tasks
from envgym.tasks.rows import TextLines, open_rows

SAVED = """
/Td6WFoAAATm1rRGAgAhARYAAAB0L+Wj4E//Av9dADIYSu6aYadfbHozU9IhHzj7zW+dK/XdHyQ/Si7DKac0tavlMwZp+UujF1aDbUPTz67K5ubCYvoZ4R
/bc0eEkJXif6FZFey1/i9kWXNgtp9+y2Gg+Ep14ESzkD+qQXZvpMukYZgoXIDPur+C3ejV51USFTkSYW9nIPoYN0RXa2EEUbSdpcAqTMxfHUTBXCkEFFCY
jqLLVH9u2pWmGff2M2nCBZiLnlArbR9T9SsZjlW5WHcZ0bgCAGs8ibcCJVTZcvT3sSqiTeKyfta+nrC41C0omBTpWRiQmh720ayWAI/utTazfmvUhG6j3N
8raHDoqUi6Ez+wwANax1mapjI5Jmh6utdzEbTcJB4zqw+DHEMMVHN6aDa8j88twkbd7FqSR+YJlscXZzNZydZ3u7Pt+NCyzr64rYuCOiamjLF81o+zJOw8
Be5/it2ZX/tkvIKRIDITHQ12I0f76+a9PKYz3aDWOp2M4Woznzzt3tMP0dZ/ljzYVFetspOOyYpZqSTrkpwEBDa0kQz9j6nCP7pWGqXlJPkfwIx6K+sMPj
HAqITcIV67K9PS4pE74PMAbL6tMhktUxXE4ClHiVA5HcLqYSst4KwsX909pUQAFZPK725ShSYXLwcUwmu9EfVJma5dfft7/xHBK523i66J6cyTDHks67l7
SWLetCpN3VzQphlms4Bbgv0ZLJ3/cyrCHmy7w0cFI4KNyWsTeFQeF3s8+aW8oqElbC/OecgUYMr0s4z8+WyCa09FlP7WirEAodz1M+5Ag7DORRF/XluI9I
5t/U+bO6sOcMNoXLX/52s+RePbYHTIJ+969+y8Z9Wa/c4KxkZ2mtN6qu6HaulLWihSlBK+SYSsSXCZQGPjEEQqJ+zuR3NiPzoaO46GOaWy/XCMmIFp5ymZ
GkFwpilT3FISZ1BVo7QERYM9JG1X4OIpfikDcdkp/svrDVfCgNy56LSf2pRoTdadM12w9oMGAe6YjlH+cVmn6XvWqJcbeaV37/SBm5JmkH+U2yH/yxdT9p
gAAADyT+i35Ol+lwABmwaAoAEA5x2OFrHEZ/sCAAAAAARZWg==
"""
"""A DatasetDict that `datasets` 5.2 saved: `train`, q0 to q3 in two shards, and `test`, q9."""


@pytest.fixture
def saved(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(SAVED.replace("\n", "")))) as archive:
        archive.extractall(tmp_path / "saved", filter="data")
    return tmp_path / "saved"


def load(path, **config):
    return load_tasks(DataConfig(path=str(path), **config))


def read(tasks, count=None):
    async def get():
        return [await tasks.get(index) for index in range(tasks.size if count is None else count)]

    return asyncio.run(get())


def prompts(tasks, count=None):
    return [task.prompt for task in read(tasks, count)]


def write_jsonl(path, names):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": name, "answer": name}) + "\n" for name in names))


def write_parquet(path, names):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"question": names, "answer": names}), path)


# -- data sets that were saved ----------------------------------------------------------------------------


def test_a_saved_dict_of_splits(saved):
    splits = load(saved)
    assert prompts(splits.train) == ["q0", "q1", "q2", "q3"]
    assert prompts(splits.test) == ["q9"]
    assert len({task.id for task in read(splits.train)}) == 4
    swapped = load(saved, split="test", test_split="train")
    assert (prompts(swapped.train), swapped.test.size) == (["q9"], 4)


def test_one_saved_data_set(saved):
    splits = load(saved / "train", test_fraction=0)
    assert prompts(splits.train) == ["q0", "q1", "q2", "q3"]
    assert prompts(load(saved / "train", limit=3, test_fraction=0).train) == ["q0", "q1", "q2"]  # from two shards


def test_what_was_saved_can_be_the_held_out_path(saved, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["a", "q9", "b"])
    splits = load(tmp_path / "train.jsonl", test_path=str(saved), test_split="test")
    assert (prompts(splits.train), prompts(splits.test)) == (["a", "b"], ["q9"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split": "trian"}, r"no split 'trian', only train, test. Did you mean 'train'\?"),
        ({"test_split": "tst"}, r"no split 'tst', only train, test. Did you mean 'test'\?"),
    ],
)
def test_a_split_that_is_not_there(saved, config, message):
    with pytest.raises(DataError, match=message):
        load(saved, **config)


def test_a_folder_that_was_damaged(saved):
    (saved / "train" / "data-00001-of-00002.arrow").write_text("no")
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow: not an Arrow file that can be read"):
        load(saved)
    (saved / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"there is no data file .*data-00001"):
        load(saved)
    (saved / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_dict.json: not in the format of `datasets`"):
        load(saved)


# -- folders of files -------------------------------------------------------------------------------------


def test_a_folder_of_shards_is_read_in_order(tmp_path):
    write_jsonl(tmp_path / "part-1.jsonl", ["c"])
    write_parquet(tmp_path / "part-2.parquet", ["d", "e"])
    write_jsonl(tmp_path / "part-0.jsonl", ["a", "b"])
    splits = load(tmp_path, test_fraction=0)
    assert prompts(splits.train) == ["a", "b", "c", "d", "e"]
    assert [task.id for task in read(splits.train)] == ["part-0-1", "part-0-2", "part-1-1", "part-2-1", "part-2-2"]
    assert prompts(load(tmp_path, test_fraction=0, limit=3).train) == ["a", "b", "c"]


def test_shards_of_one_name_in_two_folders_have_ids_of_their_own(tmp_path):
    for folder in ("a", "b"):
        write_jsonl(tmp_path / folder / "part-0.jsonl", [folder])
    assert sorted(task.id for task in read(load(tmp_path, test_fraction=0).train)) == ["a/part-0-1", "b/part-0-1"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),  # as on a hub
        ("train.parquet", "validation.parquet"),
        ("train/0.parquet", "test/0.parquet"),
    ],
)
def test_splits_by_the_names_of_files_or_folders(tmp_path, train, test):
    write_parquet(tmp_path / train, ["a", "b"])
    write_parquet(tmp_path / test, ["c"])
    splits = load(tmp_path)
    assert (prompts(splits.train), prompts(splits.test)) == (["a", "b"], ["c"])


def test_a_folder_without_a_train_split_asks_which(tmp_path):
    write_jsonl(tmp_path / "main.jsonl", ["a"])
    write_jsonl(tmp_path / "test.jsonl", ["b"])
    with pytest.raises(DataError, match=r"has the splits main, test: choose one with data\.split"):
        load(tmp_path)
    assert prompts(load(tmp_path, split="main").train) == ["a"]


def test_a_file_has_no_splits(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(DataError, match="is not a folder with splits"):
        load(tmp_path / "a.jsonl", split="train")


def test_ids_of_a_field_are_unique_over_all_shards(tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", ["same"])
    with pytest.raises(DataError, match=r"b.jsonl:1: the id 'same' is also that of line 1"):
        load(tmp_path, id="answer")


def test_a_bad_row_of_a_shard_is_told_by_its_own_line(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    (tmp_path / "b.jsonl").write_text('\n\n{"question": "z"}\n')
    with pytest.raises(DataError, match=r"b.jsonl:3: the row has no field 'answer'"):
        load(tmp_path)


# -- generators -------------------------------------------------------------------------------------------


@pytest.fixture
def code(tmp_path):
    def write(text):
        path = tmp_path / "made.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


ROWS = """
    import itertools

    def some():
        for n in range(30):
            yield {"question": f"q{n}", "answer": n}

    def forever():
        for n in itertools.count():
            yield {"question": f"q{n}", "answer": n}

    def broken():
        yield {"question": "q", "answer": 1}
        raise RuntimeError("disk full")

    def texts():
        yield "a row"

    def nothing():
        return iter(())

    number = 3
"""


def test_a_generator_that_ends(code):
    path = code(ROWS)
    splits = load(f"{path}:some")
    assert {*prompts(splits.train), *prompts(splits.test)} == {f"q{n}" for n in range(30)}
    assert read(splits.train)[0].id.startswith("some-")
    assert splits.test.size > 0
    assert prompts(load(f"{path}:forever", limit=3, test_fraction=0).train) == ["q0", "q1", "q2"]


def test_an_endless_generator_that_ends_says_so_each_time(code):
    tasks = load(f"{code(ROWS)}:some", endless=True, test_fraction=0).train
    for index in (40, 0, 40):

        async def get(index=index):
            return await asyncio.wait_for(tasks.get(index), 10)

        if index:
            with pytest.raises(DataError, match=r"some ended after 30 rows: it is not endless"):
                asyncio.run(get())
        else:
            assert asyncio.run(get()).prompt == "q0"


def test_an_endless_generator_is_read_as_far_as_it_is_asked(code):
    splits = load(f"{code(ROWS)}:forever", endless=True, test_fraction=0.2)
    assert (splits.train.size, splits.test.size) == (None, None)
    train, test = prompts(splits.train, 400), prompts(splits.test, 100)
    assert not set(train) & set(test)
    order = sorted(train + test, key=lambda prompt: int(prompt[1:]))
    assert order[:400] == [f"q{n}" for n in range(400)]  # none is lost
    # Each index has its own task, wherever the reading stands; a long way back too.
    assert prompts(splits.train, 400) == train
    asyncio.run(splits.train.get(25_000))
    assert prompts(splits.train, 3) == train[:3]


def test_what_one_endless_generator_holds_out_none_trains_on(code):
    path = f"{code(ROWS)}:forever"
    shares = {"x": 0.4, "y": 0.1}
    sources = {
        name: {"path": path, "endless": True, "test_fraction": share, "weight": 1} for name, share in shares.items()
    }
    splits = load_tasks(DataConfig(sources=sources, answer="answer"))
    assert not {*prompts(splits.train, 200)} & {*prompts(splits.test, 200)}


def test_an_endless_generator_beside_a_held_out_file(code, tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ["q0", "q2"])
    splits = load(f"{code(ROWS)}:forever", endless=True, test_path=str(tmp_path / "test.jsonl"))
    assert prompts(splits.train, 3) == ["q1", "q3", "q4"]
    assert prompts(splits.test) == ["q0", "q2"]


@pytest.mark.parametrize(
    ("name", "config", "error", "message"),
    [
        ("broken", {}, DataError, r"made.py:broken failed after 1 rows: RuntimeError: disk full"),
        ("texts", {}, DataError, r"made.py:texts:1: a row is a mapping of fields, not a str"),
        ("nothing", {}, DataError, r"made.py:nothing holds no rows"),
        ("sme", {}, NameNotFound, r"defines no 'sme'. Did you mean 'some'\?"),
        ("number", {}, ConfigError, "must be a function"),
        ("", {}, NameNotFound, "names no generator of rows: write .*made.py:NAME"),
    ],
)
def test_a_generator_that_cannot_be_used(code, name, config, error, message):
    path = code(ROWS)
    with pytest.raises(error, match=message) as raised:
        load(f"{path}:{name}" if name else path, **config)
    assert "\n" not in str(raised.value)


def test_a_generator_that_was_called_endless_and_ends(code):
    splits = load(f"{code(ROWS)}:some", endless=True, test_fraction=0)
    with pytest.raises(DataError, match="ended after 30 rows: it is not endless"):
        asyncio.run(splits.train.get(30))


# -- paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{"path": "none"}, {"path": "none.py:f"}, {"sources": {"a": {"path": "none.jsonl"}}}]
)
def test_paths_are_checked_before_anything_starts(config):
    with pytest.raises(DataError, match=r"^data\.(sources\.\w+\.)?(test_)?path: there is no file or folder none"):
        DataConfig(**config).check_paths()


# -- data sets of the hub ----------------------------------------------------------------------------------------------


def test_a_data_set_of_the_hub_is_read_by_its_splits(tmp_path, monkeypatch):
    """Fetched by the real library, which finds a local folder in the hub's place."""
    write_jsonl(tmp_path / "hub" / "train.jsonl", ["a", "b", "c"])
    write_jsonl(tmp_path / "hub" / "test.jsonl", ["d"])
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    asked, load_dataset = [], datasets.load_dataset

    def local(name, config, revision):
        asked.append((name, config))
        return load_dataset(str(tmp_path / "hub"), cache_dir=str(tmp_path / "hf"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr("envgym.tasks.hub.ask_hub", lambda *_: "")
    splits = load("org/name:main")
    assert set(asked) == {("org/name", "main")}
    assert prompts(splits.train) == ["a", "b", "c"]
    assert prompts(splits.test) == ["d"]
    write_jsonl(tmp_path / "hub" / "train.jsonl", ["e", "f"])  # a later version
    assert prompts(load("org/name").train) == ["e", "f"]


def test_one_that_cannot_be_had_is_said_in_one_line(tmp_path, monkeypatch):
    def no_such(name, config, revision):
        raise ValueError("Dataset 'org/name'\ndoesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_such)
    monkeypatch.setattr("envgym.tasks.hub.ask_hub", lambda *_: "")
    with pytest.raises(
        DataError, match=r"^there is no file org/name, and no data set .* could be loaded: Dataset 'org/name' doe"
    ):
        load("org/name")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/train", "data/train.jsonl", "org/train.jsonl", "/org/name", "./org/name"):
        with pytest.raises(DataError, match=f"^data.path: there is no file or folder {path}$"):
            DataConfig(path=path).check_paths()


# -- what is no file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"])
@pytest.mark.parametrize("target", ["a pipe", "/dev/zero", "/dev/tty"])
@pytest.mark.parametrize("place", ["a file", "in a folder"])
def test_only_regular_files_are_read(tmp_path, suffix, target, place):
    """A pipe would block, and a device has no end."""
    if place == "in a folder" and suffix in (".json", ".arrow", ".txt"):
        return  # not read in folders
    path = tmp_path / f"data{suffix}"
    os.mkfifo(path) if target == "a pipe" else path.symlink_to(target)
    with pytest.raises(DataError, match=r"data\.\w+.*(no|not a) regular file"):
        open_rows(tmp_path if place == "in a folder" else path)
    with pytest.raises(DataError, match=r"cannot be read: .*data\.\w+ is not a regular file"):
        TextLines(path, "data", None)
