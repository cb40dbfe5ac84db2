"""Named task sets: which rows they take, where a user's own file may stand, and what is held out."""

import asyncio
import json
import logging
import warnings

import pytest
import yaml

import envgym
from envgym import registry
from envgym.errors import ConfigError, DataError, EnvgymError, NameNotFound, SettingsNote
from envgym.evaluation.compare import compare
from envgym.evaluation.suite import find_suite
from envgym.jobs.parts import parts_of_env, parts_of_suite
from envgym.tasks import hub
from envgym.tasks.config import DataConfig
from envgym.tasks.split import load_tasks


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(*texts):
    return [{"question": text, "answer": f"#### {len(text)}"} for text in texts]


def data_of(name, **settings):
    return registry.spec(name, **settings).config.data


# -- where the rows come from -----------------------------------------------------------------------------


def test_the_hub_s_data_set_is_pinned_to_a_revision():
    data = data_of("gsm8k")
    assert data.path == "openai/gsm8k:main@cc7b047b6e5bb11b4f1af84efc572db110a51b3c"
    assert (data.split, data.test_split) == ("train", "test")
    assert data_of("math_500").test_path == "HuggingFaceH4/MATH-500:default"
    assert data_of("math_500").path is None


def test_the_revision_is_passed_to_the_library(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*words, **settings):
        calls.append((words, settings))
        raise ValueError("Dataset 'a/b' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "ask_hub", lambda *_: "")
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"a/b is given only to users who accept its terms on its page and log in"):
        hub.fetch_data_set("a/b:c@deadbeef")
    assert calls == [(("a/b", "c"), {"revision": "deadbeef"})]


def test_paths_of_the_user_take_the_place_of_the_hub(tmp_path):
    train, test = write(tmp_path / "a.jsonl", problems("a", "b")), write(tmp_path / "b.jsonl", problems("c"))
    data = data_of("gsm8k", data={"path": train, "test_path": test})
    assert (data.path, data.test_path, data.split, data.prompt) == (train, test, None, ("question",))
    assert data_of("gsm8k", data=train).path == train
    assert data_of("gsm8k", data={"test_path": test}).path is None
    assert data_of("gsm8k", data={"limit": 3}).path.startswith("openai/gsm8k")
    held_out = data_of("math_500", data=train)
    assert (held_out.path, held_out.test_path) == (None, train)


def test_a_folder_holds_the_files_by_name(tmp_path):
    write(tmp_path / "gsm8k_train.jsonl", problems("a"))
    write(tmp_path / "gsm8k_test.jsonl", problems("b"))
    write(tmp_path / "svamp.jsonl", [{"Body": "a", "Question": "b", "Answer": 1.0, "ID": 1}])
    data = data_of("gsm8k", data={"folder": str(tmp_path)})
    assert (data.path, data.test_path) == (str(tmp_path / "gsm8k_train.jsonl"), str(tmp_path / "gsm8k_test.jsonl"))
    data = data_of("svamp", data={"folder": str(tmp_path)})
    assert (data.path, data.test_path) == (None, str(tmp_path / "svamp.jsonl"))
    (tmp_path / "gsm8k_train.jsonl").unlink()
    assert data_of("gsm8k", data={"folder": str(tmp_path)}).path is None
    with pytest.raises(ConfigError, match=r"data.folder holds the files of named task sets; this is none"):
        data_of("math_verify", data={"folder": str(tmp_path), "path": "a.jsonl"})


def test_a_description_is_read_back_as_the_same_environment(tmp_path):
    for spec in (registry.spec("gsm8k"), registry.spec("math_500", data={"limit": 2})):
        assert registry.spec_from_json(spec.to_json()) == spec


# -- rows by their fields ---------------------------------------------------------------------------------


def read(**settings):
    async def main():
        splits = await asyncio.to_thread(load_tasks, DataConfig(**settings))
        return [[(await tasks.get(n)).answer for n in range(tasks.size)] for tasks in (splits.train, splits.test)]

    return asyncio.run(main())


def test_rows_are_selected_by_values_or_a_range(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": n, "level": n % 3} for n in range(9)])
    assert read(path=path, test_fraction=0, select={"level": [0, 1]}) == [[0, 1, 3, 4, 6, 7], []]
    assert read(path=path, test_fraction=0, select={"level": 2}) == [[2, 5, 8], []]
    assert read(path=path, test_fraction=0, select={"level": 2}, limit=2) == [[2, 5], []]
    split = {"select": {"answer": {"max": 5}, "level": 0}, "test_select": {"answer": {"min": 6, "max": 7}}}
    assert read(path=path, test_path=path, **split) == [[0, 3], [6, 7]]
    assert read(test_path=path, select={"level": 1}) == [[], [1, 4, 7]]
    with pytest.raises(DataError, match=r"a.jsonl:1: data.select names a field 'hard' that the row lacks"):
        read(path=path, select={"hard": True})
    with pytest.raises(DataError, match=r"holds no rows with the values of data.select"):
        read(path=path, select={"level": 7})


def test_an_answer_is_taken_out_of_its_field(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "9 (apples)"}, {"question": "r", "answer": "noon"}])
    assert read(path=path, test_fraction=0, answer_pattern=r"^(.*?)(?: \(.*\))?$") == [["9", "noon"], []]
    with pytest.raises(DataError, match=r"a.jsonl:2: field 'answer': data.answer_pattern finds no answer in 'noon'"):
        read(path=path, answer_pattern=r"(\d+)")
    with pytest.raises(ValueError, match="the pattern has one group"):
        DataConfig(path=path, answer_pattern="x")
    with pytest.raises(ValueError, match="not a regular expression"):
        DataConfig(path=path, answer_pattern="(")


def test_an_answer_of_several_values_is_a_list(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": ["2"]}, {"question": "r", "answer": [1, 3]}])
    assert read(path=path, test_fraction=0) == [["2", "1, 3"], []]


# -- held out means held out ------------------------------------------------------------------------------


def test_training_on_a_held_out_task_set_is_refused(run, tmp_path):
    write(tmp_path / "svamp.jsonl", [{"Body": "a", "Question": "b", "Answer": 1.0, "ID": 1}])
    result = run("train", "--env", "svamp", f"data.folder={tmp_path}")
    assert result.returncode == 2 or result.returncode == 1
    assert "environment svamp has no training tasks, all are held out: train on gsm8k, say" in result.stderr


def test_prompts_that_another_member_holds_out_are_dropped_and_counted(tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", [{"problem": text, "solution": "1"} for text in ("a", "b", "c")])
    test = write(tmp_path / "test.jsonl", [{"problem": "d", "solution": "1"}])
    held_out = write(tmp_path / "held_out.jsonl", [{"problem": "b", "answer": "1", "unique_id": "x"}])
    members = {
        "math": {"env": "math", "data": {"path": train, "test_path": test}},
        "math_500": {"env": "math_500", "data": held_out},
    }

    async def main():
        async with envgym.spec("mixture", members=members) as spec:
            prompts = {(await spec.tasks("train").get(n)).prompt for n in range(20)}
            tests = spec.tasks("test")
            return prompts, {(await tests.get(n)).prompt for n in range(tests.size)}

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main()) == ({"a", "c"}, {"b", "d"})
    assert "1 of the 3 tasks of" in caplog.text


def test_a_mixture_of_held_out_task_sets_has_nothing_to_train_on(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"problem": "b", "answer": "1", "unique_id": "x"}])

    async def main():
        async with envgym.spec("mixture", members={"a": {"env": "math_500", "data": path}}) as spec:
            assert spec.tasks("test").size == 1
            spec.tasks("train")

    with pytest.raises(ConfigError, match="all tasks of environment mixture-v0 are held out"):
        asyncio.run(main())


# -- files of users and packages --------------------------------------------------------------------------

OWN = {
    "description": "Mine.",
    "env": {"name": "math_verify", "read": "####"},
    "data": {"prompt": "question", "template": "Q: {}"},
    "sampling": {"temperature": 0, "max_tokens": 7},
}


def test_a_file_of_the_user_s_works_as_ours_do(tmp_path, run):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(OWN))
    write(tmp_path / "mine_train.jsonl", problems("a"))
    write(tmp_path / "mine_test.jsonl", problems("b"))
    result = run("envs", "show", "mine.yaml", "data.folder=.")
    assert result.returncode == 0, result.stderr
    assert "Q: a\n" in result.stdout
    assert "train tasks: 1" in result.stdout
    [part] = parts_of_env({"env": str(tmp_path / "mine.yaml"), "data": {"folder": str(tmp_path)}})
    assert part.sampling(()).temperature == 0
    assert part.sampling(()).max_tokens == 7


def test_a_package_brings_its_own(tmp_path, monkeypatch):
    package = tmp_path / "their_sets"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "theirs.yaml").write_text(yaml.safe_dump(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    from envgym.tasks import named_sets

    monkeypatch.setattr(named_sets, "entry_points", lambda group: {"them": "their_sets", "gone": "no_such_module"})
    named_sets.task_set_files.cache_clear()
    try:
        assert registry.find("theirs").task_set.description == "Mine."
        assert "theirs" in registry.list_ids()
    finally:
        named_sets.task_set_files.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": {"read": "box"}}, "env names no environment"),
        ({"env": "no_such"}, "task set mine needs environment no_such, which is not installed"),
        ({"data": {"promt": "q"}}, "unknown key 'data.promt'. Did you mean 'prompt'?"),
        ({"licens": "MIT"}, "unknown key 'licens'"),
        ({"description": None}, "description"),
    ],
)
def test_a_faulty_file_is_one_line(change, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**OWN, **change}))
    with pytest.raises(EnvgymError, match=r".*") as error:
        registry.spec(str(tmp_path / "mine.yaml"), data="x.jsonl")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_misspelled_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"mine.yaml"):
        registry.spec(str(tmp_path / "mine.yaml"))
    with pytest.raises(NameNotFound, match=r"Did you mean 'gsm8k'"):
        registry.spec("gsm8")


def test_the_list_has_a_sentence_on_each(run):
    lines = run("envs", "list").stdout.splitlines()
    [line] = [line for line in lines if line.startswith("gsm8k ")]
    assert line.endswith("Word problems of grade-school mathematics.")


# -- evaluations ------------------------------------------------------------------------------------------


def test_evaluations_are_sampled_as_the_file_says_unless_the_user_does(tmp_path):
    path = write(tmp_path / "a.jsonl", problems("a"))
    settings = {"env": "gsm8k", "data": {"test_path": path}}
    [part] = parts_of_env(settings)
    assert (part.sampling(()).temperature, part.sampling(()).max_tokens) == (0.0, 1024)
    parts = parts_of_env({**settings, "rollout": {"temperature": 0.5, "max_tokens": 9}})
    assert (parts[0].sampling(()).temperature, parts[0].sampling(()).max_tokens) == (0.5, 9)


def test_a_suite_takes_its_files_from_a_folder(tmp_path):
    write(tmp_path / "gsm8k_test.jsonl", problems("a"))
    (tmp_path / "suite.yaml").write_text("environments: {words: gsm8k, sums: math_verify}\ntasks: 5\n")
    _, suite, size = find_suite(str(tmp_path / "suite.yaml"))
    words, sums = parts_of_suite(suite, size, {"data": {"folder": str(tmp_path)}})
    assert words.stage.make_spec().config.data.test_path == str(tmp_path / "gsm8k_test.jsonl")
    assert words.sampling(()).max_tokens == 1024
    assert sums.stage.data == {}
    with pytest.raises(ConfigError, match=r"Only data.folder=DIR"):
        parts_of_suite(suite, size, {"data": {"path": "a.jsonl"}})


def test_a_suite_hands_its_size_to_what_it_includes(tmp_path):
    (tmp_path / "inner.yaml").write_text("environments: {a: math_verify}\nsizes: {smoke: 2, standard: 9}\n")
    (tmp_path / "outer.yaml").write_text("include: [inner.yaml, 'arithmetic:full']\n")
    _, suite, size = find_suite(f"{tmp_path / 'outer.yaml'}:smoke")
    environments = suite.sized_environments(size)
    assert environments["inner/a"].tasks == 2
    assert environments["arithmetic/addition"].tasks == 512
    assert suite.sized_environments(None)["inner/a"].tasks == 9
    with pytest.raises(ConfigError, match="no size 'huge'"):
        suite.sized_environments("huge")


def test_a_comparison_names_the_settings_that_differ(monkeypatch, tmp_path):
    from envgym.evaluation import compare as module

    assert compare is module.compare
    a = {"read": "box", "data": {"test_path": "x@1", "template": "{}"}}
    b = {"read": "ANSWER:", "data": {"test_path": "x@2", "template": "{}", "limit": 3}}
    assert module._setting_differences(a, b) == [
        "env.read is 'box' in A and 'ANSWER:' in B",
        "data.test_path is 'x@1' in A and 'x@2' in B",
        "data.limit is not set in A and 3 in B",
    ]


def test_a_suite_names_every_file_that_its_folder_lacks(run, tmp_path):
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}')
    result = run("eval", "--suite", "math", "data.folder=.", "--model", "starter")
    assert result.returncode == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("envgym: error: ")]
    assert "no file aime_2024.jsonl in" in line
    assert "minerva_math" in line
    assert "gsm8k" not in line
    assert "a suite of your own" in line


def test_rows_without_a_test_file_are_split_with_a_note(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 20)
    note = "gsm8k: 10% of data.path are held out; a test file is data.test_path=FILE"
    assert note in run("envs", "show", "gsm8k", "data.path=rows.jsonl").stderr
    assert note not in run("envs", "show", "gsm8k", "data.test_path=rows.jsonl").stderr
    assert note not in run("envs", "show", "gsm8k", "data.path=rows.jsonl", "data.test_path=rows.jsonl").stderr


# -- a user's own file ------------------------------------------------------------------------------------


def own_set(folder, **keys):
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump({"description": "Ours.", "env": {"name": "multiple_choice"}, **keys}))
    return str(file)


def test_rows_are_where_the_file_says_unless_the_caller_says_it(tmp_path):
    rows = [{"question": "1 + 1?", "choices": ["2", "3"], "answer": "A"}]
    a, b, c = (write(tmp_path / f"{name}.jsonl", rows) for name in "abc")
    name = own_set(tmp_path, data={"path": a, "test_path": b, "prompt": "question"})
    data = data_of(name)
    assert (data.path, data.test_path, data.prompt) == (a, b, ("question",))
    assert data_of(name, data={"limit": 1}).path == a
    changed = data_of(name, data=c)
    assert (changed.path, changed.test_path, changed.prompt) == (c, None, ("question",))
    assert data_of(own_set(tmp_path, data={"sources": {"x": {"path": a}}})).sources["x"].path == a
    hub_set = own_set(tmp_path, data={"path": "our/rows", "split": "train"})
    assert (data_of(hub_set).path, data_of(hub_set).split) == ("our/rows", "train")
    assert (data_of(hub_set, data=a).path, data_of(hub_set, data=a).split) == (a, None)
    held_out = data_of(own_set(tmp_path, data={"path": a}, train_on="gsm8k"))
    assert (held_out.path, held_out.test_path) == (None, a)
    write(tmp_path / "own_train.jsonl", rows)
    assert data_of(own_set(tmp_path, data={"folder": str(tmp_path)})).path == str(tmp_path / "own_train.jsonl")


@pytest.mark.parametrize("nested", [False, True])
def test_the_programs_that_a_file_starts_are_told(tmp_path, nested):
    tools = {"name": "tool_use", "mcp": [{"command": ["touch", "started\x1b[2J"]}]}
    env = {"name": "mixture", "envs": {"a": tools}} if nested else tools
    task_set = registry.find(own_set(tmp_path, env=env)).task_set
    with pytest.warns(SettingsNote, match=r'own: this task set starts programs: .*"touch", "started\\u001b\[2J"'):
        task_set.settings({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_set.settings({"mcp": [], "envs": {}})
        registry.find(own_set(tmp_path)).task_set.settings({})
