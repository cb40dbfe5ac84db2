"""Suites: files that ship, sizes, what wins over what, and mistakes in them."""

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, EnvgymError, NameNotFound
from envgym.evaluation.suite import Suite, find_suite, suite_names
from envgym.jobs.parts import Part, parts_of_env, parts_of_suite

SUMS = Suite(sizes={"smoke": 4, "standard": 32}, samples=2, environments={"sums": "math_verify"})


def write(folder, text):
    path = folder / "own.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", suite_names())
def test_every_environment_of_a_shipped_suite_can_be_made(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for task_set in ("amc_2023", "minerva_math", "olympiadbench"):  # they have no address of a hub
        (tmp_path / f"{task_set}.jsonl").write_text("{}")
    _, suite, size = find_suite(name)
    parts = parts_of_suite(suite, size, {"model": "starter"})
    assert parts
    assert all(part.env.tasks for part in parts)
    assert suite.description


def test_the_suites_of_everything_have_their_size_of_each():
    for size in ("smoke", "standard", "full"):
        _, suite, _ = find_suite(size)
        found = suite.sized_environments(None)
        assert {name.partition("/")[0] for name in found} == {"arithmetic", "reasoning", "tool_use", "multi_turn"}
        _, arithmetic, _ = find_suite("arithmetic")
        assert found["arithmetic/addition"].tasks == arithmetic.sizes[size]


def test_a_size_says_how_many_tasks_and_standard_is_the_one_unless_asked():
    assert SUMS.sized_environments("smoke")["sums"].tasks == 4
    assert SUMS.sized_environments(None)["sums"].tasks == 32
    own = Suite(sizes={"tiny": 2, "big": 9}, environments={"a": "math_verify", "b": {"env": "math_verify", "tasks": 5}})
    assert [env.tasks for env in own.sized_environments(None).values()] == [2, 5]
    with pytest.raises(ConfigError, match=r"no size 'smke'.*Did you mean 'smoke'"):
        SUMS.sized_environments("smke")


def test_a_file_is_a_suite_too(tmp_path):
    path = write(tmp_path, "sizes: {a: 3}\nenvironments:\n  sums: math_verify\n")
    name, suite, size = find_suite(f"{path}:a")
    assert (name, size, suite.sized_environments(size)["sums"].tasks) == ("own", "a", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("environments: {}\n", "needs environments"),
        ("samples: 4\ninclude: [arithmetic:smoke]\n", "keep their own tasks, samples and sampling"),
        ("environments: {a/b: math_verify}\n", "without a slash"),
        ("tasks: 3\nsizes: {a: 2}\nenvironments: {a: math_verify}\n", "either `tasks` or `sizes`"),
        ("enviroments: {a: math_verify}\n", "Did you mean 'environments'"),
        ("environments: {a: {env: math_verify, wieght: 2}}\n", "weight"),
        ("environments: {a: {env: math_verify, success: 2}}\n", "success"),
        ("environments: [math_verify]\n", "environments"),
    ],
)
def test_a_mistake_in_a_suite_is_said_in_a_line(tmp_path, text, said):
    with pytest.raises(EnvgymError, match=said) as error:
        find_suite(write(tmp_path, text))
    assert "\n" not in str(error.value)
    assert "own.yaml" in str(error.value)


def test_files_include_each_other_by_where_they_lie_and_none_itself(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/inner.yaml").write_text(
        "tasks: 3\nenvironments: {a: math_verify, shown: {env: math_verify, weight: 0}}\n"
    )
    (tmp_path / "sub/outer.yaml").write_text(
        "include: [inner.yaml, 'tool_use:smoke']\ntasks: 5\nenvironments: {b: math_verify}\n"
    )
    _, suite, _ = find_suite(str(tmp_path / "sub/outer.yaml"))
    found = suite.sized_environments(None)
    assert [name for name in found if not name.startswith("tool_use/")] == ["inner/a", "inner/shown", "b"]
    assert (found["inner/a"].tasks, found["b"].tasks, found["tool_use/one_call"].tasks) == (3, 5, 16)
    (tmp_path / "sub/inner.yaml").write_text("include: [outer.yaml]\n")
    with pytest.raises(ConfigError, match=r"outer\.yaml includes itself"):
        suite.sized_environments(None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("environments: {sums: {env: math_verify, weight: 0}}\n", "weight 0"),
        ("include: ['arithmetic:smoke', 'arithmetic:full']\n", "two suites named 'arithmetic'"),
    ],
)
def test_what_only_all_environments_together_show(tmp_path, text, said):
    _, suite, _ = find_suite(write(tmp_path, text))
    with pytest.raises(ConfigError, match=said):
        suite.sized_environments(None)


def test_the_caller_may_want_the_likeliest_tokens():
    settings = {"model": "starter", "rollout": {"temperature": 0, "max_tokens": 5}}
    (part,) = parts_of_suite(SUMS, None, settings)
    assert (part.sampling(()).temperature, part.sampling(()).max_tokens) == (0.0, 5)
    (part,) = parts_of_env({**settings, "env": "math_verify"})
    assert (part.sampling(()).temperature, part.env.weight) == (0.0, 1.0)


def test_an_unknown_suite_names_the_nearest():
    with pytest.raises(NameNotFound, match=r"Did you mean 'arithmetic'\?.*smoke"):
        find_suite("arithmetc")
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        find_suite("none.yaml")


# -- what wins --------------------------------------------------------------------------------------------


def test_the_callers_settings_win_over_the_suites_and_those_over_the_models():
    suite = Suite(
        tasks=8,
        sampling={"temperature": 0.5, "max_tokens": 100},
        environments={"a": "math_verify", "b": {"env": {"name": "math_verify", "digits": 3}, "samples": 4}},
    )
    a, b = parts_of_suite(suite, None, {"model": "starter"})
    assert a.sampling(()).max_tokens == b.sampling(()).max_tokens == 100  # the starter's own is 16
    assert a.sampling(()).temperature == 0.5
    assert (a.samples, b.samples, a.env.tasks) == (1, 4, 8)
    assert b.stage.env.settings["digits"] == 3
    words = {"model": "starter", "rollout": {"max_tokens": 7, "temperature": 2.0}, "eval": {"tasks": 3, "samples": 2}}
    a, b = parts_of_suite(suite, None, words)
    assert [part.sampling(()).max_tokens for part in (a, b)] == [7, 7]
    assert [part.sampling(()).temperature for part in (a, b)] == [2.0, 2.0]
    assert [(part.env.tasks, part.samples) for part in (a, b)] == [(3, 2), (3, 2)]


def test_an_environments_own_sampling_wins_over_its_suites():
    suite = Suite(
        sampling={"temperature": 0.5, "top_p": 0.9},
        environments={"a": {"env": "math_verify", "sampling": {"temperature": 0}}, "b": "math_verify"},
    )
    a, b = parts_of_suite(suite, None, {"model": "starter"})
    greedy = a.sampling((7,))
    assert (greedy.temperature, greedy.top_p, greedy.stop_token_ids) == (0.0, 1.0, (7,))
    assert (b.sampling(()).temperature, b.sampling(()).top_p) == (0.5, 0.9)
    a, _ = parts_of_suite(suite, None, {"model": "starter", "rollout": {"temperature": 0.25}})
    assert a.sampling(()).temperature == 0.25


def test_a_suite_and_an_environment_at_once_are_refused():
    with pytest.raises(ConfigError, match="either --suite or --env"):
        parts_of_suite(SUMS, None, {"model": "starter", "env": "math_verify"})


def test_a_mistake_in_one_environment_names_it():
    suite = Suite(environments={"good": "math_verify", "bad": {"env": {"name": "math_verify", "digts": 2}}})
    with pytest.raises(ConfigError, match=r"bad: .*'digts'. Did you mean 'digits'"):
        parts_of_suite(suite, None, {"model": "starter"})


def test_one_environment_is_played_as_it_is_trained_on_and_greedily_beside():
    sampled, greedy = parts_of_env({"env": "math_verify", "model": "starter", "eval": {"tasks": 5, "samples": 3}})
    assert (sampled.name, sampled.env.tasks, sampled.samples, sampled.env.weight) == ("math_verify", 5, 3, 1.0)
    assert (greedy.env.tasks, greedy.samples, greedy.env.weight, greedy.sampling(()).temperature) == (5, 1, 0.0, 0.0)
    assert len(parts_of_env({"env": "math_verify", "model": "starter", "eval": {"greedy": False}})) == 1


def test_a_pipelines_file_evaluates_the_model_that_the_caller_names(tmp_path):
    """Its last stage begins with what an earlier one leaves, which an evaluation has not."""
    saved, written = tmp_path / "config.yaml", tmp_path / "pipeline.yaml"
    saved.write_text(resolve({"env": "math_verify"}, recipe="sft_grpo").to_yaml())
    written.write_text("stages: [{learner: sft}, {learner: grpo}]")
    parts = parts_of_env({"model": "runs/own"}, file=saved)
    assert {part.stage.model for part in parts} == {"runs/own"}
    (part,) = parts_of_suite(SUMS, "smoke", {"model": "runs/own"}, file=written)
    assert part.stage.model == "runs/own"


def test_a_part_comes_back_from_its_folder_as_it_was():
    (part,) = parts_of_suite(SUMS, "smoke", {"model": "starter", "rollout": {"temperature": 0.25}})
    assert Part(**part.model_dump(mode="json")) == part
