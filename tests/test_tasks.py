"""Tasks from the user's files: what is understood, what is held out, and what a bad row is told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envgym
from envgym.errors import ConfigError, DataError, MissingDependency
from envgym.tasks import DataConfig, TaskSplits, load_tasks, prompt_key
from envgym.types import Task


@pytest.fixture
def write(tmp_path):
    def write_file(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return str(path)

    return write_file


def load(path, **config) -> TaskSplits:
    return load_tasks(DataConfig(path=path, **config))


def everything(splits):
    return sorted(splits.train + splits.test, key=lambda task: task.id)


@pytest.mark.parametrize(
    ("prompt", "answer"), [("prompt", "answer"), ("question", "ground_truth"), ("problem", "solution"), ("query", "y")]
)
def test_usual_and_given_field_names(write, prompt, answer):
    path = write([{prompt: f"q{i}", answer: i, "level": "easy"} for i in range(2)])
    tasks = everything(load(path, answer=answer if answer == "y" else None))
    assert tasks == [Task(f"data-{i + 1}", f"q{i}", i, {"level": "easy"}) for i in range(2)]


def test_ids_messages_and_blank_lines(write):
    chat = [{"role": "system", "content": "sums"}, {"role": "user", "content": "1+1"}]
    path = write([{"messages": chat, "gold": "2", "key": "a"}, "", {"messages": "2+2", "gold": 4.0, "key": "b"}])
    first, second = everything(load(path, id="key"))
    assert (first.id, [message.as_dict() for message in first.prompt], first.answer) == ("a", chat, "2")
    assert (second.id, second.prompt, second.answer) == ("b", "2+2", 4.0)


def test_parquet_gives_the_same_tasks(write, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": f"q{i}", "answer": str(i), "extra": {"level": i}} for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert load(str(tmp_path / "data.parquet")) == load(write(rows))


PROMPTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=2)


@given(prompts=PROMPTS, fraction=st.floats(0.01, 0.99))
@settings(deadline=None)
def test_no_prompt_is_on_both_sides_and_no_row_is_lost(tmp_path_factory, prompts, fraction):
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": 1}) for prompt in prompts))
    if len({prompt_key(Task("", prompt)) for prompt in prompts}) == 1:
        with pytest.raises(DataError, match="all rows have one prompt"):
            load(str(path))
        return
    splits = load(str(path), test_fraction=fraction)
    train, test = ({prompt_key(task) for task in tasks} for tasks in (splits.train, splits.test))
    assert not train & test
    assert train
    assert test
    assert len(splits.train) + len(splits.test) == len(prompts)


def test_new_rows_move_no_old_ones(write):
    rows = [{"prompt": f"what is {i}", "answer": i} for i in range(1000)]
    few, many = load(write(rows[:500], "few.jsonl")), load(write(rows[::-1], "many.jsonl"))
    assert {task.prompt for task in few.test} <= {task.prompt for task in many.test}
    assert 60 < len(many.test) < 140, "about a tenth"


def test_spacing_makes_no_new_prompt(write):
    splits = load(write([{"prompt": f"what{' ' * n}is {i}", "answer": i} for n in (1, 2) for i in range(50)]))
    assert {task.prompt.split()[2] for task in splits.test}.isdisjoint(task.prompt.split()[2] for task in splits.train)


def test_held_out_file_wins_over_train(write, caplog):
    train = write([{"prompt": f"q{i}", "answer": i} for i in range(10)], "train.jsonl")
    test = write([{"prompt": f"q{i}", "answer": i} for i in range(7, 12)], "test.jsonl")
    splits = load(train, test_path=test)
    assert [task.prompt for task in splits.train] == [f"q{i}" for i in range(7)]
    assert (len(splits.test), splits.dropped) == (5, 3)
    assert "3 of the 10 tasks" in caplog.text
    with pytest.raises(DataError, match="nothing to train on"):
        load(train, test_path=train)


ROW = {"prompt": "q", "answer": 1}


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([], {}, "data.jsonl holds no rows"),
        ([ROW, "{'prompt': 1}"], {}, r"data.jsonl:2: not JSON: .* at column 2"),
        ([ROW, "[1]"], {}, r"data.jsonl:2: a row is one JSON object, .* not a list"),
        (["[" * 100_000], {}, r"data.jsonl:1: not usable JSON"),
        (['{"prompt": "q", "answer": ' + "9" * 5000 + "}"], {}, r"data.jsonl:1: not usable JSON"),
        ([ROW], {"prompt": "promt"}, r"no field 'promt', only prompt, answer. Did you mean 'prompt'\?"),
        ([ROW, {"prompt": "x"}], {}, r"data.jsonl:2: the row has no field 'answer', only prompt"),
        ([{"text": "q"}], {}, r"data.jsonl:1: no prompt field; the row has text: .* data.prompt=FIELD"),
        ([{"prompt": "q", "reply": 1}], {}, r"no answer field; the row has prompt, reply: .* data.answer=FIELD"),
        ([{"prompt": 7, "answer": 1}], {}, r"field 'prompt': a prompt is text or a list of messages, not int"),
        ([{"prompt": [{"content": "q"}], "answer": 1}], {}, r"data.jsonl:1: field 'prompt': a prompt is"),
        ([{"prompt": "  ", "answer": 1}], {}, r"data.jsonl:1: field 'prompt' is empty"),
        ([{"prompt": "q", "answer": None}], {}, r"field 'answer': an answer is text or a number, not NoneType"),
        ([{"prompt": "q", "answer": True}], {}, r"field 'answer': .* not bool"),
        (['{"prompt": "q", "answer": NaN}'], {}, r"field 'answer': an answer must be finite"),
        ([ROW | {"id": 1}, ROW | {"id": 1}], {"id": "id"}, r"data.jsonl:2: the id '1' is also that of line 1"),
        ([ROW, ROW], {}, r"all rows have one prompt.* data.test_path, or data.test_fraction=0"),
    ],
)  # fmt: skip
def test_bad_rows_are_told_with_file_and_line(write, rows, config, message):
    with pytest.raises(DataError, match=message) as raised:
        load(write(rows), **config)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="there is no data file"):
        load(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        load(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "q", "answer": 1}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:2: not UTF-8 text"):
        load(str(tmp_path / "latin.jsonl"))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file that can be read"):
        load(str(tmp_path / "bad.parquet"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match="pip install"):
        load(str(tmp_path / "bad.parquet"))


def test_a_wrong_key_names_its_neighbour():
    with pytest.raises(ConfigError, match=r"unknown key 'data.promt'. Did you mean 'prompt'\?"):
        envgym.spec("math_verify", data={"path": "x.jsonl", "promt": "q"})
