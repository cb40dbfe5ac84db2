"""Tasks from one file of the user's: what is understood, what is held out, and what a bad row is told."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envgym
from envgym.config.words import parse_overrides
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


def all_of(tasks):
    async def read():
        return [await tasks.get(index) for index in range(tasks.size)]

    return asyncio.run(read())


def everything(splits):
    return sorted(all_of(splits.train) + all_of(splits.test), key=lambda task: task.id)


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
    table, lines = load(str(tmp_path / "data.parquet")), load(write(rows))
    assert (all_of(table.train), all_of(table.test)) == (all_of(lines.train), all_of(lines.test))


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
    train, test = ({prompt_key(task) for task in all_of(tasks)} for tasks in (splits.train, splits.test))
    assert not train & test
    assert train
    assert test
    assert splits.train.size + splits.test.size == len(prompts)


def test_new_rows_move_no_old_ones(write):
    rows = [{"prompt": f"what is {i}", "answer": i} for i in range(1000)]
    few, many = load(write(rows[:500], "few.jsonl")), load(write(rows[::-1], "many.jsonl"))
    assert {task.prompt for task in all_of(few.test)} <= {task.prompt for task in all_of(many.test)}
    assert 60 < many.test.size < 140, "about a tenth"


def test_spacing_makes_no_new_prompt(write):
    splits = load(write([{"prompt": f"what{' ' * n}is {i}", "answer": i} for n in (1, 2) for i in range(50)]))
    held_out, trained = ({task.prompt.split()[2] for task in all_of(tasks)} for tasks in (splits.test, splits.train))
    assert held_out.isdisjoint(trained)


def test_held_out_file_wins_over_train(write, caplog):
    train = write([{"prompt": f"q{i}", "answer": i} for i in range(10)], "train.jsonl")
    test = write([{"prompt": f"q{i}", "answer": i} for i in range(7, 12)], "test.jsonl")
    splits = load(train, test_path=test)
    assert [task.prompt for task in all_of(splits.train)] == [f"q{i}" for i in range(7)]
    assert splits.test.size == 5
    assert "3 of the 10 tasks" in caplog.text
    with pytest.raises(DataError, match="nothing to train on"):
        load(train, test_path=train)


ROW = {"prompt": "q", "answer": 1}


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([], {}, "data.jsonl holds no rows"),
        ([ROW, "{'prompt': 1}"], {}, r"data.jsonl:2: not JSON: .* at column 2"),
        ([ROW, '{"question": "one of forty words'], {}, r"2: not JSON: it is truncated at column 32"),
        ([ROW, '{"question": "1 + 1", "answer":'], {}, r"2: not JSON: it is truncated at column 31: …"),
        ([ROW, "[1]"], {}, r"data.jsonl:2: a row is one JSON object, .* not a list"),
        (["[" * 100_000], {}, r"data.jsonl:1: not usable JSON"),
        (['{"prompt": "q", "answer": ' + "9" * 5000 + "}"], {}, r"data.jsonl:1: not usable JSON"),
        ([ROW], {"prompt": "promt"}, r"no field 'promt', only prompt, answer. Did you mean 'prompt'\?"),
        ([ROW, {"prompt": "x"}], {}, r"data.jsonl:2: the row has no field 'answer', only prompt"),
        ([{"text": "q"}], {}, r"data.jsonl:1: no prompt field; the row has text: .* data.prompt=FIELD"),
        ([{"prompt": "q", "reply": 1}], {}, r"no answer field; the row has prompt, reply: .* data.answer=FIELD"),
        ([{"prompt": "q"}], {}, r"no answer field.* that needs no answer has answer_required = False"),
        ([{"prompt": "q", "answer": None}], {}, r"not NoneType .* has answer_required = False"),
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


@pytest.mark.parametrize("config", [{}, {"answer": "answer"}])
def test_not_a_number_is_no_answer_also_where_any_value_or_none_is_one(write, config):
    path = write(['{"prompt": "q", "answer": NaN}', '{"prompt": "r", "answer": 1}'])
    with pytest.raises(DataError, match=r"data.jsonl:1: field 'answer': an answer must be finite"):
        all_of(load_tasks(DataConfig(path=path, **config), answer_required=False).train)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="there is no data file"):
        load(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="holds no data"):
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "x.jsonl", "promt": "q"}, r"unknown key 'data.promt'. Did you mean 'data.prompt'\?"),
        (
            {"sources": {"a": {"path": "x.jsonl", "wieght": 1}}},
            r"unknown key .*wieght'. Did you mean 'data.sources.a.weight'\?",
        ),
        ({}, "give data.path, or data.sources.NAME.path for each of several"),
        ({"path": "x", "sources": {"a": {"path": "y"}}}, "give data.path, or data.sources"),
        ({"sources": {"a": {"weight": 1}}}, "data.sources.a.path is missing"),
        ({"sources": {"a": {"path": "x", "weight": 1}, "b": {"path": "y"}}}, "data.sources.b.weight is missing"),
        ({"path": "x.jsonl", "endless": True}, "only a generator"),
        ({"path": "x.py:f", "endless": True, "limit": 3}, "a generator with a limit is not endless"),
        ({"sources": {"a": {"path": "x.py:f", "endless": True}, "b": {"path": "y"}}}, "all sources need a weight"),
        ({"path": "x", "template": "no place"}, "has {} in place of the prompt"),
        ({"path": "x", "template": "{} {"}, "template"),
        ({"path": "x", "template": "{a.b}"}, "{a.b} is not the name of a field"),
        ({"path": "x", "limit": 0}, "limit"),
    ],
)
def test_settings_that_cannot_be_used_are_told_in_one_line(data, message):
    with pytest.raises(ConfigError, match=message) as raised:
        envgym.spec("math_verify", data=data)
    assert "\n" not in str(raised.value)


# -- what is made of a row --------------------------------------------------------------------------------


def test_templates_and_a_system_message(write):
    path = write([{"question": f"{n}+{n}?", "hint": "{easy}", "answer": n} for n in range(20)])
    posed = everything(load(path, template="Question: {}\nHint: {hint} {{}}\nAnswer:", id="answer"))
    assert posed[0].prompt == "Question: 0+0?\nHint: {easy} {}\nAnswer:"
    assert posed[0].fields == {"hint": "{easy}"}
    only_names = everything(load(path, template="{question} ({hint})", id="answer"))
    assert only_names[0].prompt == "0+0? ({easy})"
    system = everything(load(path, system="You add.", template="{} =", id="answer"))
    assert [m.as_dict() for m in system[0].prompt] == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "0+0? ="},
    ]
    # The same prompts are held out, however they are dressed.
    plain = {task.id for task in all_of(load(path, id="answer").test)}
    assert {task.id for task in all_of(load(path, template="Q: {}", system="s", id="answer").test)} == plain


@pytest.mark.parametrize("template", ["User: {}\nAssistant: ", "- {}\n- ", "{question}: {hint}", "Q {}"])
def test_a_template_may_be_a_word_of_the_command_line(template):
    assert parse_overrides([f"data.template={template}"]) == {"data": {"template": template}}


def test_a_system_message_of_the_row_stays(write):
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    path = write([{"messages": chat, "answer": 1}, {"messages": chat[1:], "answer": 2}])
    first, second = everything(load(path, system="given", test_fraction=0))
    assert [m.text for m in first.prompt] == ["own", "q"]
    assert [m.text for m in second.prompt] == ["given", "q"]


def test_a_system_message_may_be_in_parts(write):
    """As in Anthropic's and Bedrock's requests; a list of anything else is a field like others."""
    path = write([
        {"prompt": "1?", "answer": 1, "system": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
        {"prompt": "2?", "answer": 2, "system": ["linux"]}, {"prompt": "3?", "answer": 3, "system": {"os": "linux"}},
    ])  # fmt: skip
    first, *others = everything(load(path, test_fraction=0))
    assert [(m.role, m.text) for m in first.prompt] == [("system", "Be brief."), ("user", "1?")]
    assert [task.prompt for task in others] == ["2?", "3?"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{} {hnit}", r"data.jsonl:1: data.template names a field 'hnit' .* Did you mean 'hint'\?"),
        ("{:d}", r"data.jsonl:1: data.template cannot be filled in"),
    ],
)
def test_a_template_that_does_not_fit_the_rows(write, template, message):
    with pytest.raises(DataError, match=message):
        load(write([{"prompt": "q", "hint": "h", "answer": 1}]), template=template)


def test_a_template_is_for_text(write):
    with pytest.raises(DataError, match=r"data\.template fills in text"):
        load(write([{"messages": [{"role": "user", "content": "q"}], "answer": 1}]), template="{}!")


def test_field_names_to_choose_from(write):
    path = write([{"frage": f"q{n}", "prompt": "no", "loesung": n} for n in range(2)])
    tasks = everything(load(path, prompt=["question", "frage"], answer=["answer", "loesung"]))
    assert [(task.prompt, task.answer) for task in tasks] == [("q0", 0), ("q1", 1)]
    with pytest.raises(DataError, match=r"data.jsonl:1: no prompt field"):
        load(path, prompt=["a", "b"])


def test_rows_without_an_answer_where_none_is_needed(write):
    path = write([{"prompt": "a", "answer": {"tests": [1]}}, {"prompt": "b"}, {"prompt": "c", "answer": None}])

    def load_any(path, **config):
        return everything(load_tasks(DataConfig(path=path, **config), answer_required=False))

    assert [task.answer for task in load_any(path)] == [{"tests": [1]}, None, None]
    assert [task.answer for task in load_any(write([{"prompt": "a"}, {"prompt": "b"}]))] == [None, None]
    with pytest.raises(DataError, match=r"no field 'reply'"):  # a name that was given is meant
        load_any(path, answer="reply")


def test_difficulty_is_a_field_of_the_task(write):
    rows = [{"prompt": str(n), "answer": n, "level": n, "rest": 0} for n in range(3)] + [ROW | {"level": None}]
    tasks = everything(load(write(rows), difficulty="level", test_fraction=0))
    assert [(task.difficulty, "level" in task.fields) for task in tasks] == [
        (0.0, False), (1.0, False), (2.0, False), (None, False),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"data.jsonl:1: field 'level': a difficulty is a finite number, not 'hard'"):
        load(write([ROW | {"level": "hard"}]), difficulty="level")


def test_a_limit_takes_the_first_rows_and_reads_no_others(write):
    path = write([*[{"prompt": str(n), "answer": n} for n in range(5)], "not JSON"])
    assert [task.answer for task in everything(load(path, limit=5))] == [0, 1, 2, 3, 4]


def test_rows_may_change_on_disk_during_a_run(write):
    path = write([{"prompt": str(n), "answer": n} for n in range(5)])
    splits = load(path)
    before = everything(splits)
    write(["gone"])
    assert everything(splits) == before


def test_every_task_is_the_same_each_time_it_is_read(write):
    splits = load(write([{"prompt": [{"role": "user", "content": str(n)}], "answer": n} for n in range(9)]))
    assert everything(splits) == everything(splits)
    with pytest.raises(IndexError):
        asyncio.run(splits.train.get(splits.train.size))


def test_prompts_may_be_messages_in_text_that_holds_json(write):
    chat = [{"role": "system", "content": "sums"}, {"role": "user", "content": "1+1"}]
    rows = [{"prompt": json.dumps(chat), "answer": 2}, {"prompt": "[1, 2]?", "answer": 3}]
    first, second = everything(load(write(rows), test_fraction=0))
    assert as_pairs(first.prompt) == [("system", "sums"), ("user", "1+1")]
    assert second.prompt == "[1, 2]?"
    with pytest.raises(DataError, match=r"data.jsonl:1: field 'messages': not JSON: it is truncated at column 9"):
        load(write([{"messages": '[{"role":', "answer": 2}]))


# -- rows that are left out -------------------------------------------------------------------------------------


def test_bad_rows_are_left_out_and_counted_by_kind(write, caplog):
    good = [{"question": f"q{n}", "answer": n} for n in range(20)]
    bad = ['{"question": "q", "answ', '{"question": "q" 3}', {"question": "  ", "answer": 1}, {"question": "x"}, "[1]"]
    path = write([*good[:2], *bad, '{"question": "another one", "ans', *good[2:]])
    assert sorted(task.answer for task in everything(load(path, bad_rows="skip"))) == list(range(20))
    assert "6 of 26 rows are left out: 2, as not JSON: it is truncated; 1, as not JSON: Expecting" in caplog.text
    assert "1, as field 'question' is empty; 1, as the row has no field 'answer'" in caplog.text
    assert len(everything(load(path, bad_rows="skip", limit=5))) == 5
    assert len(everything(load(path, bad_rows="skip", select={"question": ["q1", "q5", "q7"]}))) == 3
    with pytest.raises(DataError, match=r"data.jsonl:3: not JSON.*; data.bad_rows=skip leaves such rows out$"):
        load(path)


def test_without_a_good_row_there_is_nothing_to_skip_to(write):
    with pytest.raises(DataError, match="holds no rows to use; left out: 2, as field 'question' is empty"):
        load(write([{"question": "", "answer": 1}] * 2), bad_rows="skip")


def test_bad_rows_of_tables_and_endless_generators_are_left_out(tmp_path):
    (tmp_path / "data.csv").write_text("question,answer\nq1,1\nq2\nq3,3\n,4\nq5,5\n")
    splits = load(str(tmp_path / "data.csv"), bad_rows="skip", test_fraction=0)
    assert [task.prompt for task in all_of(splits.train)] == ["q1", "q3", "q5"]
    (tmp_path / "rows.py").write_text(
        "import itertools\n\ndef numbers():\n    for n in itertools.count():\n"
        "        yield {'question': f'q{n}' if n % 2 else '', 'answer': n}\n"
    )
    tasks = load(f"{tmp_path}/rows.py:numbers", bad_rows="skip", endless=True, test_fraction=0).train
    assert asyncio.run(tasks.get(2)).answer == 5


# -- columns that belong to the prompt ----------------------------------------------------------------------------

PIGS = "Ellen has six more balls than Marin. Marin has nine balls."


def as_pairs(prompt):
    return prompt if isinstance(prompt, str) else [(message.role, message.text) for message in prompt]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"body": PIGS, "question": "How many has Ellen?"}, f"{PIGS}\n\nHow many has Ellen?"),
        ({"question": "How many has Ellen?", "Context": PIGS}, f"{PIGS}\n\nHow many has Ellen?"),
        ({"passage": PIGS, "query": "How many has Ellen?"}, f"{PIGS}\n\nHow many has Ellen?"),
        ({"instruction": "Add.", "input": "1 and 2"}, "Add.\n\n1 and 2"),
        ({"instruction": "Add 1 and 2.", "input": ""}, "Add 1 and 2."),
        ({"instruction": "Sum it up.", "context": PIGS}, f"Sum it up.\n\n{PIGS}"),
        ({"instruction": "Be brief.", "question": "1 + 2?"}, "Be brief.\n\n1 + 2?"),
        ({"context": {"pages": [PIGS]}, "question": "How many?"}, "How many?"),
        ({"system": "Be brief.", "question": "1 + 2?"}, [("system", "Be brief."), ("user", "1 + 2?")]),
        ({"system_prompt": "Be brief.", "messages": [{"role": "user", "content": "1 + 2?"}]},
         [("system", "Be brief."), ("user", "1 + 2?")]),
        ({"system_prompt": "A", "messages": [{"role": "system", "content": "B"}, {"role": "user", "content": "1?"}]},
         [("system", "B"), ("user", "1?")]),
    ],
)  # fmt: skip
def test_columns_that_belong_to_the_prompt_are_in_it(row, prompt, write):
    [task] = everything(load(write([{**row, "answer": 3}]), test_fraction=0))
    assert as_pairs(task.prompt) == prompt


def test_what_the_prompt_shows_unasked_or_not_at_all_is_said(write, caplog):
    rows = [{"body": PIGS, "question": f"{n}?", "answer": n, "videos": ["a.mp4"] * (n % 2)} for n in range(4)]
    everything(load(write(rows), test_fraction=0))
    assert "the prompt is body and question; data.prompt=question makes it question alone (4 rows)" in caplog.text
    assert "videos is not shown: policies get text and images (2 rows)" in caplog.text
    caplog.clear()
    tasks = everything(load(write(rows), prompt="question", test_fraction=0))
    assert [task.prompt for task in tasks] == ["0?", "1?", "2?", "3?"]
    assert "body not in the prompt, which data.template can show (4 rows)" in caplog.text
    caplog.clear()
    [task, *_] = everything(load(write(rows), template="{body} {question}", test_fraction=0))
    assert task.prompt == f"{PIGS} 0?"
    assert "the prompt" not in caplog.text


def test_system_prompts_of_rows_are_before_the_settings_own_and_in_a_template_once(write):
    path = write(
        [{"system": "Be brief.", "question": "1?", "answer": 1}, {"question": "2?", "answer": 1, "system": ""}]
    )
    first, second = everything(load(path, system="Think."))
    assert as_pairs(first.prompt) == [("system", "Be brief."), ("user", "1?")]
    assert as_pairs(second.prompt) == [("system", "Think."), ("user", "2?")]
    first, _ = everything(load(path, template="{system} {}"))
    assert first.prompt == "Be brief. 1?"


def test_rows_that_differ_in_a_field_of_the_template_are_different_prompts(write):
    """One question about many passages: each passage is a task of its own, and no passage is in both splits."""
    rows = [{"question": "Who?", "text": f"passage {n // 2}", "answer": n, "line": n} for n in range(40)]
    path = write(rows)
    splits = load(path, template="{text}\n{}", test_fraction=0.3)
    train, test = ({task.prompt for task in all_of(tasks)} for tasks in (splits.train, splits.test))
    assert test
    assert not train & test
    assert len(train | test) == 20
    other = load(path, template="{}\nSee {text}!", test_fraction=0.3)
    assert {task.id for task in all_of(other.test)} == {task.id for task in all_of(splits.test)}
