"""Saved episodes judged again: the same turns on the same tasks, by another judge."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from envgym import registry
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.episodes.files import Journal, read_episodes, write_episodes
from envgym.episodes.record import to_record
from envgym.errors import ConfigError, DataError, InvalidOutcome
from envgym.evaluation.changes import changes_of
from envgym.jobs.score import recorded_actions, saved_groups, score_to_file
from envgym.monitoring.display import Display
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Episode, Message, Outcome, Row, Segment, Status, StopReason, Task, TextPart, ToolCall, Turn

ENVGYM = Path(sys.executable).with_name("envgym")

GAME = '''
import envgym


class Game(envgym.Env):
    """Ends when it hears `stop`; pays a point a turn, and tells what it saw."""

    async def reset(self, *, seed=None, options=None):
        self.task, self.seed, self.draw, self.heard = options["task"], seed, self.rng.random(), []
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action):
        self.heard.append(action)
        with open("heard.txt", "a") as file:
            calls = [(call.name, dict(call.arguments), call.error) for call in action.tool_calls]
            said = (self.task.id, self.task.prompt, self.task.fields, self.seed, self.draw)
            file.write(repr((said, action.text, tuple(action.token_ids), calls, action.stop_reason.value)) + "\\n")
        over = action.text == "stop"
        return [{"role": "user", "content": "on"}], 1.0, over, False, {"metrics": {"turn": len(self.heard)}}
'''

LENGTH = """
import envgym

@envgym.reward
def length(completion, answer, level):
    return envgym.Reward(len(completion), score=1 / len(completion), metrics={"level": level})
"""

RANK = """
import envgym

@envgym.reward(batch=True)
def rank(completion, answer):
    assert len(set(answer)) == 1
    order = sorted(completion, key=len)
    return [order.index(text) / len(order) for text in completion]
"""

SELF_PLAY = """
import envgym
from envgym.services import Policy


class SelfPlay(envgym.EnvSpec):
    @property
    def services(self):
        return {"opponent": Policy()}


class Player(envgym.Env):
    spec_class = SelfPlay

    async def reset(self, *, seed=None, options=None):
        return "", {}

    async def step(self, action):
        return "", 1.0, True, False, {}


SelfPlay.env_class = Player
"""


def saved(texts, *, member=0, group="rollout/00000", task=None, outcome=None, stop=StopReason.STOP, prompt=(), **said):
    """An episode with a turn for each text, its tokens the characters'."""
    task = task or Task("sum", "1 + 1 = ?", answer="2", fields={"level": 3})
    segments, messages = [Segment("prompt", [1])], [*prompt, Message("user", "1 + 1 = ?")]
    for number, text in enumerate(texts):
        if number:
            segments.append(Segment("feedback", [9]))
            messages.append(Message("user", "on"))
        segments.append(Segment("action", [ord(letter) for letter in text], logprobs=[-0.5] * len(text)))
        messages.append(Message("assistant", text))
    turns = [Turn(0.25, StopReason.STOP) for _ in texts]
    if turns:
        turns[-1].stop_reason = stop
    return Episode(
        f"{group}:{member:03d}:1",
        task,
        outcome or Outcome.finish(),
        rows=[Row(segments, turns=turns)],
        messages=messages,
        env="sums-v0",
        group_id=group,
        member=member,
        seed=77,
        attempt=1,
        seconds=2.5,
        **said,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"game": GAME, "length": LENGTH, "rank": RANK, "self_play": SELF_PLAY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def judge(folder, episodes, env, suffix=".jsonl", **settings):
    """The episodes after they were saved and judged by `env`, and what was said of that."""
    source, out = folder / f"saved{suffix}", folder / f"judged{suffix}"
    write_episodes(source, episodes)
    before, after, _ = score_to_file(resolve({"env": env, **settings}), source, out, Display(), overwrite=True)
    return read_episodes(out), changes_of(before, after)


def heard(folder):
    return [eval(line) for line in (folder / "heard.txt").read_text().splitlines()]


# -- what is judged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_reward_function_judges_the_saved_task_and_the_old_judgement_is_kept(folder, suffix):
    old = saved(["two"], reward=1.0, score=0.5, answer="2", metrics={"boxed": 1.0})
    [new], result = judge(folder, [old], "length.py", suffix)
    assert (new.reward, new.score, new.answer) == (3.0, 1 / 3, None)
    assert new.metrics == {"level": 3.0, "boxed_before": 1.0, "reward_before": 1.0, "score_before": 0.5}
    assert new.rows[0].turns == [Turn(3.0, StopReason.STOP)]
    assert new.fingerprints.keys() == {"code", "spec", "task"}
    # Nothing else of it is changed.
    kept = {"reward", "score", "answer", "metrics", "rows", "env", "fingerprints"}
    before, after = to_record(old), to_record(new)
    assert {k: v for k, v in before.items() if k not in kept} == {k: v for k, v in after.items() if k not in kept}
    assert before["rows"][0]["segments"] == after["rows"][0]["segments"]
    assert (result["judged"], result["changed"], result["failures"]) == (1, 1, {})
    earlier, new = result["earlier"]["all"], result["new"]["all"]
    assert (earlier["score"], new["score"]) == (0.5, 1 / 3)
    assert (earlier["reward"]["score"], new["reward"]["score"]) == (1.0, 3.0)


def test_judging_again_keeps_the_last_judgement_alone(folder):
    [once], _ = judge(folder, [saved(["two"], reward=1.0, score=1.0, metrics={"boxed": 1.0})], "length.py")
    [twice], result = judge(folder, [once], "length.py")
    assert twice.metrics == {"level": 3.0, "level_before": 3.0, "reward_before": 3.0, "score_before": 1 / 3}
    assert result["changed"] == 0


def test_the_environment_hears_what_was_said_and_is_reset_as_it_was(folder):
    calls = (ToolCall("1", "add", {"a": 1}), ToolCall("2", "", {}, error="no JSON"))
    task = Task("seed-5", "what is it?", fields={"level": 3}, seed=5)
    episode = saved(["first", "stop"], task=task, stop=StopReason.LENGTH)
    episode.messages[1] = Message("assistant", (TextPart("first"),), calls)
    [new, _], _ = judge(folder, [episode, saved(["stop"], member=1)], "game.py")
    by_text = sorted(heard(folder), key=lambda each: (each[0][0], each[1]))
    (posed, *first), (_, *second), (other, *_) = by_text
    assert posed[:4] == ("seed-5", "what is it?", {"level": 3}, 5)
    assert first == ["first", tuple(map(ord, "first")), [("add", {"a": 1}, ""), ("", {}, "no JSON")], "stop"]
    assert second == ["stop", tuple(map(ord, "stop")), [], "length"]
    assert other[3] == 77  # a task without a seed of its own is reset with the episode's
    assert posed[4] == other[4]  # and so is the environment's generator
    assert [turn.reward for turn in new.rows[0].turns] == [1.0, 1.0]
    assert (new.reward, new.outcome) == (2.0, Outcome.truncate("length"))


def test_turns_of_the_task_are_not_the_policy_s(folder):
    shown = (Message("user", "2 + 2 = ?"), Message("assistant", "four"))
    [new], _ = judge(folder, [saved(["stop"], prompt=shown)], "game.py")
    assert [text for _, text, *_ in heard(folder)] == ["stop"]
    assert new.messages[1].text == "four"


def test_an_episode_by_an_api_has_no_tokens(folder):
    episode = saved(["on", "stop"])
    episode.rows = [Row([], turns=episode.rows[0].turns)]
    [new], _ = judge(folder, [episode], "game.py")
    assert [token_ids for _, _, token_ids, *_ in heard(folder)] == [(), ()]
    assert (new.reward, [turn.reward for turn in new.rows[0].turns]) == (2.0, [1.0, 1.0])


def test_turns_in_several_rows_are_paid_where_they_are(folder):
    episode = saved(["on", "stop"])
    row = episode.rows[0]
    episode.rows = [Row(row.segments[:2], turns=row.turns[:1]), Row([row.segments[3]], turns=row.turns[1:])]
    [new], _ = judge(folder, [episode], "game.py")
    assert [[turn.reward for turn in row.turns] for row in new.rows] == [[1.0], [1.0]]


# -- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Outcome.finish(), Outcome.truncate("recording")),
        (Outcome.truncate("environment"), Outcome.truncate("recording")),
        (Outcome.truncate("context"), Outcome.truncate("context")),
        (Outcome.truncate("turns"), Outcome.truncate("turns")),
    ],
)
def test_an_environment_that_wants_more_turns_truncates_the_episode(folder, before, after):
    [new], result = judge(folder, [saved(["on", "on"], outcome=before)], "game.py")
    assert (new.outcome, new.reward) == (after, 2.0)
    assert result["short"] == (after.reason == "recording")


def test_an_environment_that_ends_earlier_leaves_turns_unpaid(folder):
    [new], result = judge(folder, [saved(["on", "stop", "on", "on"])], "game.py")
    assert (new.outcome.status, new.reward) == (Status.COMPLETED, 2.0)
    assert new.metrics["unused_turns"] == 2
    assert [turn.reward for turn in new.rows[0].turns] == [1.0, 1.0, None, None]
    assert result["unused"] == 1


def test_failed_episodes_stay_as_they_are_and_new_failures_are_counted(folder):
    failed = saved([], outcome=Outcome.fail("timeout", "too slow", retryable=True), member=1)
    silent = saved([""], member=2, reward=0.5)  # the function divides by the length
    episodes = [saved(["two"]), failed, silent]
    (good, same, broken), result = judge(folder, episodes, "length.py")
    assert good.reward == 3.0
    assert to_record(same) == to_record(failed)
    assert (broken.outcome.reason, broken.reward, broken.score) == ("environment", None, None)
    assert "ZeroDivisionError" in broken.outcome.message
    assert broken.metrics == {"reward_before": 0.5}
    assert broken.messages == silent.messages
    assert [each.id for each in (good, same, broken)] == [each.id for each in episodes]
    assert (result["judged"], result["skipped"], result["failures"]) == (1, {"timeout": 1}, {"environment": 1})


def test_a_judgement_that_fails_for_good_is_not_asked_for_again(folder):
    """It would be of the same episode."""
    calls = folder / "calls.txt"
    (folder / "fails.py").write_text(
        "import envgym\n\n@envgym.reward\ndef fails(completion, answer):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n        file.write('x')\n    raise ValueError('no')\n"
    )
    _, result = judge(folder, [saved(["two"])], "fails.py")
    assert (result["failures"], calls.read_text()) == ({"environment": 1}, "x")


def test_a_record_without_its_turns_is_a_failure_of_its_own_kind():
    with pytest.raises(InvalidOutcome) as raised:
        recorded_actions(saved([]))
    assert raised.value.kind == "recording"
    lost = replace(saved(["on", "stop"]), messages=[Message("assistant", "stop")])
    with pytest.raises(InvalidOutcome, match="2 turns are recorded, and the messages hold 1"):
        recorded_actions(lost)


# -- groups, mixtures, services ---------------------------------------------------------------------------


def test_a_group_is_judged_together_without_its_failed_members(folder):
    texts = {0: "aaa", 1: "a", 2: "aa"}
    group = [saved([text], member=member) for member, text in texts.items()]
    failed = saved([], member=3, outcome=Outcome.fail("timeout", "too slow"))
    other = saved(["b"], group="rollout/00001", task=Task("other", answer="4"))
    new, _ = judge(folder, [*group, failed, other], "rank.py")
    assert [each.reward for each in new] == [2 / 3, 0.0, 1 / 3, None, 0.0]


def test_groups_of_several_files_with_equal_names_are_kept_apart():
    episodes = [saved(["a"], member=m) for m in (0, 1)] * 2 + [saved(["b"], task=Task("other"))]
    assert [len(group.episodes) for group in saved_groups(episodes)] == [2, 2, 1]


def test_a_mixture_judges_each_task_by_its_member(folder):
    members = {"long": {"env": "length.py"}, "game": {"env": "game.py"}}
    first = saved(["stop"], task=Task("a", answer="2", fields={"level": 1}, env="long"))
    second = saved(["stop"], task=Task("b", env="game"), group="rollout/00001")
    new, _ = judge(folder, [first, second], {"name": "mixture", "members": members})
    assert [each.reward for each in new] == [4.0, 1.0]
    with pytest.raises(ConfigError, match="has no member 'else' for task 'c'"):
        judge(folder, [saved(["stop"], task=Task("c", env="else"))], {"name": "mixture", "members": members})


def test_an_environment_that_asks_the_policy_is_refused(folder):
    with pytest.raises(ConfigError, match="asks the policy itself"):
        judge(folder, [saved(["stop"])], "self_play.py:SelfPlay")
    assert not list(folder.glob("judged*"))


def test_a_function_that_wants_what_the_tasks_lack_is_refused_before_anything_is_judged(folder):
    with pytest.raises(ConfigError, match="level"):
        judge(folder, [saved(["two"], task=Task("t", "?", answer="2"))], "length.py")


def test_math_verify_judges_what_another_system_wrote(folder):
    right, wrong = saved([r"\boxed{2}"]), saved([r"\boxed{3}"], member=1)
    new, _ = judge(folder, [right, wrong], "math_verify")
    assert [(each.score, each.answer) for each in new] == [(1.0, "2"), (0.0, "3")]


def test_demonstrations_with_real_tools_earn_what_they_show(folder, tiny_model):
    """Turns with tool calls, recorded by a replay and heard again by the tools."""
    from envgym.agents.replay import Replay, ReplayConfig
    from envgym.engine import SamplingParams
    from envgym.render import load_tokenizer, make_renderer
    from envgym.rollout.config import RolloutConfig

    async def demonstrated():
        agent = Replay(make_renderer("auto", load_tokenizer(str(tiny_model))), ReplayConfig())
        async with registry.spec("tool_use", call_share=1.0) as spec:
            tasks = [await spec.tasks("train").get(index) for index in range(4)]
            runner = Runner(spec, agent, None, RolloutConfig(), max_model_len=0, seed=0, deterministic=False)
            groups = await runner.roll_out(tasks, SamplingPlan("shown", SamplingParams(max_tokens=1), 1))
        return [episode for group in groups for episode in group.episodes]

    episodes = asyncio.run(demonstrated())
    assert [each.outcome for each in episodes] == [Outcome.finish()] * 4
    assert all(each.score is None and sum(len(row.turns) for row in each.rows) > 1 for each in episodes)
    new, result = judge(folder, episodes, "tool_use", ".parquet")
    assert [each.score for each in new] == [1.0] * 4
    assert (result["short"], result["unused"], result["failures"]) == (0, 0, {})


def test_a_real_reward_model_judges_as_it_does_in_a_run(folder, tiny_reward_model):
    episodes = [saved([text], member=member) for member, text in enumerate(["two", "46", "two"])]
    new, result = judge(folder, episodes, {"name": "reward_model", "models": str(tiny_reward_model)}, debug=True)
    first, second, third = (each.reward for each in new)
    assert first == pytest.approx(third, abs=1e-5)
    assert abs(first - second) > 1e-4
    assert first == pytest.approx(expected_reward(tiny_reward_model, episodes[0]), abs=1e-4)
    assert result["failures"] == {}


def test_the_answers_of_recorded_data_are_judged(folder, tiny_reward_model):
    """By themselves, or at the end of a conversation; equal ones alike."""
    asked = {"role": "user", "content": "1 + 1?"}
    rows = [{"q": "1 + 1?", "a": "two", "talk": [asked, {"role": "assistant", "content": "two"}]}] * 2
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps({**row, 'n': n})}\n" for n, row in enumerate(rows)))
    words = ["score", "rows.jsonl", "--env", "reward_model", f"env.models={tiny_reward_model}", "data.test_fraction=0"]
    assert main([*words, "data.prompt=q", "data.answer=a", "--out", "one.jsonl", "debug=true"]) == 0
    assert main([*words, "data.prompt=talk", "--out", "two.jsonl", "debug=true"]) == 0
    judged = [episode for name in ("one", "two") for episode in read_episodes(folder / f"{name}.jsonl")]
    assert [told.text for told in judged[2].messages] == ["1 + 1?", "two"]
    assert [episode.reward for episode in judged] == pytest.approx([judged[0].reward] * 4, abs=1e-5)


def expected_reward(folder, episode):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template([message.as_dict() for message in episode.messages], tokenize=False)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()


# -- several parts ----------------------------------------------------------------------------------------


def test_tasks_of_one_key_in_several_parts_are_several_problems(folder):
    """As in a suite, whose environments each call their first task `test-0`."""
    easy = Task("test-0", "?", answer="1", fields={"level": 1})
    hard = Task("test-0", "??", answer="2", fields={"level": 2})
    episodes = [saved(["a"], group="easy/00000", task=easy, member=member, score=1.0) for member in range(3)]
    episodes.append(saved(["four"], group="hard/00000", task=hard, score=0.0))
    _, result = judge(folder, episodes, "length.py")
    assert {name: of["score"] for name, of in result["earlier"].items()} == {"all": 0.5, "easy": 1.0, "hard": 0.0}
    assert {name: of["score"] for name, of in result["new"].items()} == {"all": 0.625, "easy": 1.0, "hard": 0.25}
    assert (result["earlier"]["all"]["reward"]["score"], result["new"]["all"]["reward"]["score"]) == (None, 2.5)
    assert result["new"]["all"]["n_tasks"] == 2
    assert result["new"]["all"]["ci95"] is not None


def test_steps_of_training_are_one_part(folder):
    episodes = [saved(["a"], group=f"step-00000{step}-0/00000", score=1.0) for step in (1, 2)]
    assert judge(folder, episodes, "length.py")[1]["new"].keys() == {"all", "training"}


def test_before_and_after_are_of_the_same_episodes(folder):
    fails = saved([""], score=0.0)  # the function divides by the length
    unscored = saved(["four"], task=Task("other", answer="4", fields={"level": 3}), group="rollout/00001")
    _, result = judge(folder, [fails, saved(["a"], member=1, score=1.0), unscored], "length.py")
    assert (result["earlier"]["all"]["score"], result["new"]["all"]["score"], result["compared"]) == (1.0, 1.0, 1)
    done = run(folder, "saved.jsonl", "--env", "length.py", "--out", "again.jsonl")
    assert re.search(r"^score .* of the 1 episodes that have both$", done.stdout, re.MULTILINE)


# -- scoring that is stopped ------------------------------------------------------------------------------

SLOW_JUDGE = GAME.replace('"go"}], {}', '"go"}], await asyncio.sleep(0.2) or {}').replace("\n", "\nimport asyncio\n", 1)


def test_what_was_judged_before_ctrl_c_is_not_judged_again(folder):
    (folder / "slow.py").write_text(SLOW_JUDGE)
    tasks = [Task(f"t{number}", str(number)) for number in range(8)]
    write_episodes(folder / "saved.jsonl", [saved(["stop"], task=task, group=f"eval/{task.id}") for task in tasks])
    command = ["saved.jsonl", "--env", "slow.py", "--out", "judged.jsonl", "rollout.concurrency=2"]
    program = subprocess.Popen([ENVGYM, "score", *command], cwd=folder, stderr=subprocess.PIPE, text=True)
    journal = folder / "judged.jsonl.unfinished" / "episodes.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=60)
    count = journal.read_bytes().count(b"\n")
    assert program.returncode == 130
    assert said == (
        f"envgym: interrupted: {count} episodes are saved in judged.jsonl.unfinished; the same command resumes from "
        "there\n"
    )
    changed = run(folder, *command, "env.call_timeout=5")
    assert "env.call_timeout was 120.0 and is 5.0" in changed.stderr
    done = run(folder, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{count} saved episodes are reused" in done.stdout
    assert [each.reward for each in read_episodes(folder / "judged.jsonl")] == [1.0] * 8
    assert [each.task.id for each in read_episodes(folder / "judged.jsonl")] == [task.id for task in tasks]
    assert sorted(each[0][0] for each in heard(folder)) == [task.id for task in tasks]
    assert not journal.parent.exists()


def test_a_group_that_is_judged_together_is_so_when_it_goes_on(folder, monkeypatch):
    texts = ["aaa", "a", "aa"]
    episodes = [saved([text], member=member) for member, text in enumerate(texts)]
    write = Journal.write
    written = []

    def full(journal, episode):
        written.append(episode)
        if len(written) > 2:
            raise DataError("the disk is full")
        write(journal, episode)

    monkeypatch.setattr(Journal, "write", full)
    with pytest.raises(DataError, match="the disk is full"):
        judge(folder, episodes, "rank.py")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert len(Journal(folder / "judged.jsonl.unfinished" / "episodes.jsonl").originals()) == 2
    new, _ = judge(folder, episodes, "rank.py")
    assert [each.reward for each in new] == [2 / 3, 0.0, 1 / 3]
    assert [each.group_id for each in new] == ["rollout/00000"] * 3


def test_episodes_that_changed_since_are_judged_anew_only_when_told(folder):
    heard_by = 'open("heard.txt", "a") as file:'
    blocks = '__import__("os").path.exists("rude") and __import__("os").mkdir("o.jsonl")'
    (folder / "rude.py").write_text(GAME.replace(heard_by, f"{heard_by}\n            {blocks}"))
    (folder / "rude").touch()
    write_episodes(folder / "saved.jsonl", [saved(["stop"])])
    command = ["saved.jsonl", "--env", "rude.py", "--out", "o.jsonl"]
    assert "1 episodes are saved in o.jsonl.unfinished" in run(folder, *command).stderr
    (folder / "o.jsonl").rmdir()
    (folder / "rude").unlink()
    write_episodes(folder / "saved.jsonl", [saved(["on", "stop"])])
    assert re.search(r"recordings was '[0-9a-f]{16}' and is '[0-9a-f]{16}'\)", run(folder, *command).stderr)
    assert run(folder, *command, "--overwrite").returncode == 0
    assert [each.reward for each in read_episodes(folder / "o.jsonl")] == [2.0]


def test_a_target_that_cannot_be_written_in_the_end_costs_nothing(folder):
    mkdir = 'open("heard.txt", "a") as file:'
    (folder / "rude.py").write_text(GAME.replace(mkdir, f'{mkdir}\n            __import__("os").mkdir("judged.jsonl")'))
    write_episodes(folder / "saved.jsonl", [saved(["stop"])])
    command = ["saved.jsonl", "--env", "rude.py", "--out", "judged.jsonl"]
    failed = run(folder, *command)
    assert failed.returncode == 2
    assert re.fullmatch(
        r"envgym: error: judged.jsonl cannot be written: Is a directory; 1 episodes are saved in "
        r"judged.jsonl.unfinished; the same command resumes from there\n",
        failed.stderr,
    )
    (folder / "judged.jsonl").rmdir()
    assert run(folder, *command).returncode == 0
    assert len(heard(folder)) == 1


# -- the command ------------------------------------------------------------------------------------------


def run(folder, *words):
    """The command, which leaves no temporary file."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        [ENVGYM, "score", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=environ
    )
    assert list(temporary.glob("envgym-*")) == []
    return done


def test_the_command_says_what_came_of_it(folder):
    write_episodes(folder / "saved.jsonl", [saved(["two"], score=0.5, reward=0.5), saved(["to"], member=1, score=0.5)])
    done = run(folder, "saved.jsonl", "--env", "length.py", "--out", "judged.parquet")
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if "  " in line)
    assert lines["judged"] == "2 of 2 episodes"
    assert lines["score"].startswith("0.500 [")
    assert "->  0.417 [" in lines["score"]
    assert lines["changed"] == "2 episodes"
    assert not (folder / "judged.parquet.unfinished").exists()
    assert len(read_episodes(folder / "judged.parquet")) == 2


def test_a_suite_has_a_line_for_each_environment(folder):
    tasks = {part: Task("test-0", part, answer="1", fields={"level": 1}) for part in ("easy", "hard")}
    episodes = [saved(["a"], group=f"{part}/00000", task=task, score=0.0) for part, task in tasks.items()]
    write_episodes(folder / "saved.jsonl", episodes)
    done = run(folder, "saved.jsonl", "--env", "length.py", "--out", "judged.jsonl")
    assert re.findall(r"^( *\w+) +(\S+) .*->  (\S+)", done.stdout, re.MULTILINE) == [
        ("score", "0.000", "1.000"),
        ("  easy", "0.000", "1.000"),
        ("  hard", "0.000", "1.000"),
    ]
    assert "reward" not in done.stdout  # the rewards are the scores


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "length.py", "--out", "o.jsonl"], "which episodes?"),
        (["missing.jsonl", "--env", "length.py", "--out", "o.jsonl"], "there is no file missing.jsonl"),
        (["saved.jsonl", "--out", "o.jsonl"], "needs --env"),
        (["saved.jsonl", "--env", "lenght", "--out", "o.jsonl"], "there is no environment 'lenght'"),
        (["saved.jsonl", "--env", "length.py", "--out", "o.csv"], ".jsonl or .parquet"),
        (["saved.jsonl", "--env", "length.py", "--out", "saved.jsonl"], "--overwrite"),
        (["length.py", "--env", "length.py", "--out", "o.jsonl"], "length.py:2: not JSON"),
    ],
)
def test_a_mistake_is_one_line(folder, words, said):
    write_episodes(folder / "saved.jsonl", [saved(["two"])])
    done = run(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line
    assert not list(folder.glob("o.jsonl*"))
