"""Reward functions for OpenRLHF: as documents show them, and what a file of that kind may do."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from envgym import registry
from envgym.errors import ConfigError, NameNotFound
from envgym.types import Message, Status


def results(episodes):
    return [(episode.reward, episode.score) for episode in episodes]


# -- as documents show them -------------------------------------------------------------------------------


def test_a_share_of_the_group_is_a_metric(play, ok, shown, task):
    groups, engine = play(shown("reward_label"), [task()], lambda member, turn: ["it is 42", "no idea"][member])
    episodes = ok(groups, engine)
    assert results(episodes) == [(1.0, 1.0), (0.0, 0.0)]
    assert [episode.metrics for episode in episodes] == [{"custom_metric": 0.5}] * 2


def test_what_a_reward_function_draws_at_random_can_be_repeated(play, ok, shown, task):
    tasks = [task(id=f"t{index}") for index in range(3)]
    first, second = (ok(*play(shown("reward_random"), tasks, "hm", size=8)) for _ in range(2))
    assert {episode.reward for episode in first} == {0.0, 1.0}
    assert results(first) == results(second)
    rewards = [episode.reward for episode in first]
    assert rewards[:8] != rewards[8:16] or rewards[:8] != rewards[16:]
    assert first[0].metrics == {"custom_metric": sum(rewards[:8]) / 8}


def test_a_reward_function_has_a_metric_for_each_answer(play, ok, shown, task):
    groups, engine = play(shown("reward_each"), [task()], lambda member, turn: ["42", "41"][member])
    assert [(e.reward, e.metrics) for e in ok(groups, engine)] == [
        (1.0, {"custom_metric": 1.0}),
        (0.0, {"custom_metric": 0.0}),
    ]


def test_a_reward_function_runs_tests(play, ok, shown, task, monkeypatch):
    """It calls `python`, which must be one that has pytest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it allows five seconds
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    answers = [
        "def test_it():\n    assert 40 + 2 == 42",
        "def test_it():\n    assert 40 + 2 == 41",
        "answer = 42",
    ]
    groups, engine = play(shown("reward_tests"), [task("Write a test.")], lambda member, turn: answers[member], size=3)
    episodes = ok(groups, engine)
    assert results(episodes) == [(1.0, 1.0), (pytest.approx(0.3), pytest.approx(0.65)), (0.0, 0.5)]
    assert episodes[0].metrics == {"code_correctness": 1.0, "avg_correctness": pytest.approx(1.3 / 3)}


def test_a_reward_function_reads_numbers(play, ok, shown, task):
    answers = ["The answer is: 42", "#### 41", "I do not know"]
    groups, engine = play(shown("reward_math"), [task()], lambda member, turn: answers[member], size=3)
    episodes = ok(groups, engine)
    assert results(episodes) == [(1.0, 1.0), (0.0, pytest.approx(1 / 3)), (-0.5, 0.0)]
    assert episodes[2].metrics == {
        "math_accuracy": pytest.approx(1 / 3),
        "answer_formatted": pytest.approx(2 / 3),
    }


def test_a_reward_function_with_a_small_quality_model(play, ok, shown, task, tiny_model, tmp_path, monkeypatch):
    """Filled in is only the download: the name leads to a small model of the same kind, in the place where the
    downloaded one would be."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    name = "OpenAssistant/reward-model-deberta-v3-large"
    folder = tmp_path / name
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=2)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    answers = ["Short.", "This is an answer that has more than ten words, for which nothing is taken away."]
    groups, engine = play(
        shown("reward_quality"), [task()], lambda member, turn: answers[member], env={"call_timeout": 60}
    )
    short, long = ok(groups, engine)
    assert 0 < short.reward < 0.5
    assert 0 < long.score == long.reward < 1
    assert short.metrics["min_quality"] == pytest.approx(min(short.reward, long.reward))
    assert short.metrics["avg_quality"] == pytest.approx((short.reward + long.reward) / 2)


def test_a_reward_function_has_scores_apart_from_rewards(play, ok, shown, task):
    groups, engine = play(shown("reward_filter"), [task()], lambda member, turn: ["42", "41"][member])
    assert results(ok(groups, engine)) == [(1.5, 1.0), (-0.5, 0.0)]


def test_what_a_reward_function_prints_goes_to_a_log(play, ok, shown, task, tmp_path, capfd):
    """The function returns a tensor alone."""
    groups, engine = play(
        shown("reward_prints"), [task()], lambda member, turn: ["42", "41"][member], env={"logs": str(tmp_path)}
    )
    assert results(ok(groups, engine)) == [(1.0, 1.0), (0.0, 0.0)]
    [log] = tmp_path.glob("*.log")
    assert "Query sample: What is 40 + 2?42\nPrompt sample: What is 40 + 2?\nLabel sample: 42" in log.read_text()
    assert "Query" not in capfd.readouterr().out


# -- what such a file may do ---------------------------------------------------------------------------------

PLAIN = """
def reward_func(queries, prompts, labels, **kwargs):
    {body}
"""


@pytest.fixture
def reward_file(write):
    return lambda body: write(PLAIN.format(body=body), "reward_func.py")


def test_a_group_is_one_call_and_queries_begin_with_prompts(play, ok, reward_file, task):
    file = reward_file(
        "assert all(q.startswith(p) for q, p in zip(queries, prompts)); "
        "return [float(len(queries) == 4 and q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)]"
    )
    tasks = [
        task("Say 1.", "1", id="a"),
        task((Message("system", "Be."), Message("user", "Say 2.")), "2", id="b"),
    ]
    groups, engine = play(file, tasks, lambda member, turn: str(member), size=4)
    assert [e.reward for e in ok(groups, engine)] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert engine.engine.prompts()[0].endswith("<|im_start|>assistant\n"), "the policy reads a chat"


def test_prompts_as_raw_text_for_a_base_model(play, ok, reward_file, task):
    groups, engine = play(reward_file("return [1.0] * len(queries)"), [task()], "42", env={"chat": False})
    ok(groups, engine)
    assert engine.engine.prompts()[0] == "What is 40 + 2?"


BREAKS = {
    "raise KeyError('gold')": ("environment", "KeyError: 'gold'"),
    "return {'scores': [1, 1]}": ("invalid_environment", "no 'rewards', only scores"),
    "return [1.0]": ("invalid_environment", "1 values for 2 completions"),
    "return ['good', 'bad']": ("invalid_environment", ": it must be a finite number"),
    "return None": ("invalid_environment", "no 'rewards'"),
    "return {'rewards': [1, 1], 'scores': [1]}": ("invalid_environment", "1 values for 2 completions"),
    "raise SystemExit(3)": ("crash", "exit status 3"),
    "import os; os.abort()": ("crash", "SIGABRT"),
}


def test_a_function_that_breaks_fails_its_group_and_is_no_zero(play, reward_file, task):
    file = reward_file(
        "scope = {}; exec(f'def it():\\n    {labels[0]}', scope); return scope['it']()"  # does what the label says
    )
    groups, _ = play(file, [task(answer=body, id=f"t{index}") for index, body in enumerate(BREAKS)], "42")
    for group, (kind, says) in zip(groups, BREAKS.values(), strict=True):
        for episode in group.episodes:
            assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, kind)
            assert says in episode.outcome.message
            assert "\n" not in episode.outcome.message
            assert (episode.reward, episode.score) == (None, None)


def test_one_nan_fails_one_episode(play, reward_file, task):
    groups, _ = play(reward_file("return [float('nan'), 0.5, 1.0]"), [task()], "42", size=3)
    assert [(e.failed, e.reward) for e in groups[0].episodes] == [(True, None), (False, 0.5), (False, 1.0)]
    assert "nan" in groups[0].episodes[0].outcome.message


def test_a_score_outside_its_range_is_no_score_and_is_counted(play, ok, reward_file, task):
    """Files of that kind return any reward as score, and are not refused for it; clamping would invent a score."""
    groups, engine = play(reward_file("return {'rewards': [3.0, 0.5], 'scores': [3.0, 0.75]}"), [task()], "42")
    assert [(e.reward, e.score, e.metrics) for e in ok(groups, engine)] == [
        (3.0, None, {"invalid_scores": 1.0}),
        (0.5, 0.75, {}),
    ]


def test_scores_that_are_the_rewards_are_none_where_some_lie_outside(play, ok, reward_file, task):
    """Else the wins alone would have a score, and every evaluation would come to 1."""
    groups, engine = play(reward_file("return {'rewards': [-1.0, 1.0], 'scores': [-1.0, 1.0]}"), [task()], "42")
    assert [(e.reward, e.score) for e in ok(groups, engine)] == [(-1.0, None), (1.0, None)]
    groups, engine = play(reward_file("return {'rewards': [0.0, 1.0], 'scores': [0.0, 1.0]}"), [task()], "42")
    assert [e.score for e in ok(groups, engine)] == [0.0, 1.0]


def test_a_call_that_never_returns_is_killed_and_others_go_on(play, write, task):
    file = write(
        """
        def reward_func(queries, prompts, labels):
            while labels[0] == "hang":
                pass
            return [1.0] * len(queries)
        """,
        "reward_func.py",
    )
    tasks = [task(answer="hang", id="a"), task(id="b"), task(answer="hang", id="c"), task(id="d")]
    groups, _ = play(file, tasks, "42", env={"call_timeout": 1.0})
    outcomes = [{(e.outcome.reason, e.reward) for e in group.episodes} for group in groups]
    assert outcomes == [{("timeout", None)}, {("", 1.0)}, {("timeout", None)}, {("", 1.0)}]


@pytest.mark.parametrize("module", ["openrlhf.utils", "openrlhf.utils.math_utils"])
def test_mathematics_that_such_files_import_is_there(play, ok, write, task, module):
    file = write(
        f"""
        from {module} import extract_boxed_answer, grade_answer

        def reward_func(queries, prompts, labels):
            answers = [extract_boxed_answer(query[len(prompt):]) for query, prompt in zip(queries, prompts)]
            return [float(grade_answer(answer, label)) for answer, label in zip(answers, labels)]
        """,
        "reward_func.py",
    )
    said = [
        r"so \boxed{41}, no: \boxed{\text{42}}",
        r"\boxed{41}",
        "42",
        r"\boxed{40 + 2}",
        r"\boxed{84/2}",
        r"\boxed{",
    ]
    halves = [r"\boxed{0.5}", r"\boxed{\dfrac{1}{2}}", r"\boxed{2}", r"\boxed{}", "", r"\boxed{(1, 2)}"]
    tasks = [task(answer=42, id="a"), task(answer=r"\frac{1}{2}", id="b")]
    groups, engine = play(file, tasks, lambda member, turn: said[member], size=6, env={"call_timeout": 60})
    assert [e.reward for e in ok(groups, engine)[:6]] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    groups, engine = play(file, tasks, lambda member, turn: halves[member], size=6, env={"call_timeout": 60})
    assert [e.reward for e in ok(groups, engine)[6:]] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_function_has_the_main_thread_and_may_run_a_loop_of_its_own(play, ok, write, task):
    """Timeouts by signal work there; they do not in the threads that such functions run in where they come from."""
    file = write(
        """
        import asyncio
        import signal
        import time

        def ring(*_):
            raise TimeoutError

        async def half():
            await asyncio.sleep(0)
            return 0.5

        def reward_func(queries, prompts, labels):
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                time.sleep(30)
            except TimeoutError:
                return [asyncio.run(half()) for _ in queries]
        """,
        "reward_func.py",
    )
    groups, engine = play(file, [task()], "42")
    assert results(ok(groups, engine)) == [(0.5, 0.5)] * 2


def test_the_file_is_not_imported_here_and_its_spec_is_json(write):
    import pickle

    file = write("import no_such_module_anywhere\n\ndef reward_func(queries, prompts, labels): ...\n", "heavy.py")
    spec = registry.spec(str(file), processes=2)
    assert registry.spec_from_json(spec.to_json()) == spec == pickle.loads(pickle.dumps(spec))
    assert registry.spec(f"{file}:reward_func").config.processes == 1
    assert not any("heavy" in name for name in sys.modules)
    before = spec.fingerprint()
    file.write_text(file.read_text() + "\n# changed\n")
    assert spec.fingerprint()["code"] != before["code"]
    assert spec.fingerprint()["spec"] == before["spec"]


def test_without_tasks_nothing_is_started(reward_file, monkeypatch):
    monkeypatch.setattr("envgym.envs.openrlhf.Processes", None)
    with pytest.raises(ConfigError, match=r"has no default tasks: give it some with data\.path=FILE"):
        asyncio.run(registry.spec(str(reward_file("return [0.0]"))).ensure_setup())


def test_an_import_that_fails_is_one_line_when_the_environment_is_set_up(play, write, task):
    file = write("import no_such_module_anywhere\n\ndef reward_func(queries, prompts, labels): ...\n", "heavy.py")
    with pytest.raises(ConfigError, match=r"heavy.py, line 1: ModuleNotFoundError: .*no_such_module_anywhere") as error:
        play(file, [task()], "42")
    assert "\n" not in str(error.value)


def test_which_files_are_of_this_kind(write):
    other = write("def my_reward(queries, prompts, labels): ...\n", "named.py")
    assert registry.spec(f"{other}:my_reward").path == other
    with pytest.raises(NameNotFound, match="defines no environment"):
        registry.spec(str(other))
    ours = write(
        """
        import envgym

        def reward_func(queries, prompts, labels): ...

        @envgym.reward
        def brevity(completion):
            return 1.0
        """,
        "ours.py",
    )
    assert registry.spec(str(ours)).function.__name__ == "brevity"
    assert registry.spec(str(write("from elsewhere import reward_func\n", "reexport.py"))).name == "reward_func"
