"""`envgym show`: what was asked, what the policy said and what it was paid, as people read it."""

import json
import os
import re
import shutil

import pytest
from tokenizers import Tokenizer, models

from envgym.cli import main
from envgym.episodes.files import write_episodes
from envgym.episodes.record import write_rollouts
from envgym.types import Episode, Message, Outcome, Row, Segment, StopReason, Task, ToolCall, Turn


def episode(task, member, text, *, reward=1.0, outcome=None, messages=(), env=""):
    row = Row([Segment("prompt", [1, 2]), Segment("action", [3, 4, 5])], turns=[Turn(reward, StopReason.STOP)])
    said = [Message("user", f"What is {task}?"), Message("assistant", text), *messages]
    return Episode(
        f"{task}:{member}", Task(task, answer=46, env=env), outcome or Outcome.finish(), [row], reward, reward,
        answer=text[-2:], messages=said, member=member, metrics={"characters": float(len(text))},
    )  # fmt: skip


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; gives its exit status and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main(["show", *map(str, words)])
        printed = capsys.readouterr()
        return status, printed.err if status else printed.out

    return run


@pytest.fixture
def run(tmp_path):
    """A run of two steps with three episodes each of two tasks."""
    folder = tmp_path / "runs" / "first"
    for step in (1, 2):
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        episodes = [episode(task, n, f"At step {step} it is 4{n}") for task in ("12+34", "1+1") for n in range(3)]
        write_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet", episodes)
    return folder


def test_the_last_step_is_shown_unless_another_is_named(show, run):
    status, shown = show("first")
    assert (status, shown.count("\nuser:\n")) == (0, 4)
    assert shown.startswith("--- task 12+34, episode 12+34:0\nuser:\n")
    assert "user:\nWhat is 12+34?\nassistant:\nAt step 2 it is 40\n" in shown
    assert "reward 1, score 1, characters 18; read as '40', wanted '46'; completed, 3 tokens in 1 turn\n" in shown
    assert "4 of 6 episodes of step 2; others with --task KEY, --count N. Its tasks: 12+34, 1+1" in shown
    assert re.findall(r"^--- .* episode (\S+)", shown, re.MULTILINE) == ["12+34:0", "1+1:0", "12+34:1", "1+1:1"]
    assert "At step 1 it is 41" in show("first", "--step", "1")[1]
    assert show("runs/first", "--count", "6")[1].count("\nuser:\n") == 6


def test_a_prompt_is_shown_as_the_model_got_it(show, run, tiny_model, tmp_path):
    assert "--prompt needs the tokenizer" in show("first", "--prompt")[1]
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    shown = episode("1+1", 0, "It is 2")
    shown.rows[0].segments[0] = Segment("prompt", tokenizer.encode(text, add_special_tokens=False).ids)
    write_rollouts(run / "rollouts" / "step_000003.parquet", [shown])
    shutil.copy(tiny_model / "tokenizer.json", run)
    assert f"prompt, as the model got it:\n{text}\nuser:\nWhat is 1+1?" in show("first", "--prompt")[1]
    assert "as the model got it" not in show("first")[1]


def test_a_task_is_shown_with_all_its_episodes(show, run):
    _, shown = show("first", "--task", "1+1")
    assert re.findall(r"^--- task 1\+1, episode (\S+)", shown, re.MULTILINE) == ["1+1:0", "1+1:1", "1+1:2"]
    assert "3 of 3 episodes of task 1+1 in step 2" in shown


def test_of_several_stages_the_last_that_played_is_shown(show, tmp_path):
    for stage in ("1-sft", "2-grpo", "10-dpo", "11-sft"):
        (tmp_path / "runs" / "stages" / stage / "rollouts").mkdir(parents=True)
    for stage in ("2-grpo", "10-dpo"):
        write_rollouts(tmp_path / "runs/stages" / stage / "rollouts/step_000003.parquet", [episode("1+1", 0, stage)])
    assert "assistant:\n10-dpo\n" in show("stages")[1]
    assert "assistant:\n2-grpo\n" in show("runs/stages/2-grpo")[1]


def test_evaluations_and_files_of_episodes_are_shown(show, tmp_path):
    (tmp_path / "evals" / "smoke").mkdir(parents=True)
    for path in ("evals/smoke/episodes.jsonl", "best.jsonl"):
        write_episodes(tmp_path / path, [episode("7", 0, path, env="math")])
    assert "task math/7, episode 7:0" in show("smoke")[1]
    assert "assistant:\nbest.jsonl\n" in show("best.jsonl", "--task", "7")[1]


def test_calls_of_tools_and_failures_are_told(show, tmp_path):
    call = ToolCall("c1", "add", {"a": 12, "b": "zwölf"})
    broken = ToolCall("c2", "", error="no JSON")
    messages = [
        Message("assistant", (), (call, broken)),
        Message("tool", "46", tool_call_id="c1", name="add"),
    ]
    failed = Outcome.fail("timeout", "the episode took longer than 3 s")
    write_episodes(tmp_path / "a.jsonl", [episode("1", 0, "Hm", reward=None, outcome=failed, messages=messages)])
    _, shown = show("a.jsonl")
    assert 'calls add({"a": 12, "b": "zwölf"})\na call that cannot be read: no JSON\ntool add:\n46\n' in shown
    assert "failed (timeout): the episode took longer than 3 s, 3 tokens in 1 turn" in shown


def test_what_a_model_says_does_not_command_the_terminal(show, tmp_path):
    write_episodes(tmp_path / "a.jsonl", [episode("1", 0, "\x1b[2J\rgone [bold] stays\n\x07\x9b5A")])
    assert "\\x1b[2J\\x0dgone [bold] stays\n\\x07\\x9b5A\n" in show("a.jsonl")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "envgym show is followed by a run"),
        (["frist"], "there is no run, evaluation or file 'frist' (see: envgym runs). Did you mean 'first'?"),
        (["first", "--step", "9"], "has no episodes of step 9, but of 2 steps from 1 to 2"),
        (["first", "--step", "last"], "argument --step: a number is expected, not 'last'"),
        (["first", "--count=-1"], "argument --count: a number is expected, not '-1'"),
        (
            ["first", "--task", "12+35"],
            "step 2 has no episode of task '12+35'. Did you mean '12+34'? Its tasks: 12+34,",
        ),
        (["first", "step=3"], "envgym show has no settings: leave out step=3"),
        (["first", "3"], "'3' is neither an option nor a key=value setting"),
        (["taught"], "taught holds no episodes: it has taken no step, or trained on recorded data only"),
        (["a.txt"], "a.txt: episodes are read from files that end with"),
        (["a.txt", "--step", "1"], "a.txt has no steps with episodes: leave out --step"),
        (["torn", "--step", "1"], "cannot be read as a Parquet file"),
    ],
)
def test_a_mistake_is_one_line(show, run, tmp_path, words, says):
    (tmp_path / "runs" / "taught" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "torn" / "rollouts").mkdir(parents=True)
    (tmp_path / "runs" / "torn" / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_text("text")
    status, error = show(*words)
    assert status == 2
    [line] = error.splitlines()
    assert says in line


def test_a_tokenizer_that_lengthens_texts_without_bounds_decodes_no_prompt(show, run):
    tokenizer = json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")).to_str())
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [double] * 33}
    (run / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, says = show("first", "--prompt")
    assert (status, says.count("\n")) == (2, 1)
    assert "tokenizer.json is not used: it may make texts more than 1000 times as long" in says


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.parquet", "endless.jsonl", "endless.parquet"])
def test_episodes_are_read_from_regular_files_alone(show, tmp_path, name):
    os.mkfifo(tmp_path / name) if "pipe" in name else (tmp_path / name).symlink_to("/dev/zero")
    assert show(name) == (2, f"envgym: error: {name} cannot be read: {name} is not a regular file\n")
