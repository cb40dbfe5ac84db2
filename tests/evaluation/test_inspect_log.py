"""Our logs for inspect_ai: what is in them, and what inspect_ai makes of them."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envgym.errors import MissingDependency
from envgym.evaluation.result import result_of
from envgym.jobs.evaluation import new_evaluation, run_evaluation
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model
from envgym.types import (
    Episode,
    Group,
    ImagePart,
    Message,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    TextPart,
    ToolCall,
    Turn,
)

CREATED, COMPLETED = "2026-01-02T03:04:05+00:00", "2026-01-02T03:14:05+00:00"
PLAYED = {
    "env": {"name": "shop-v0", "nothing": float("nan")},
    "split": "test",
    "weight": 1.0,
    "cluster": None,
    "samples": 2,
    "sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 64},
    "fingerprints": {"spec": "s"},
}


def test_a_picture_is_in_the_log_and_its_size_where_its_file_is_gone():
    pytest.importorskip("inspect_ai")
    from envgym.evaluation.inspect_log import _message

    image = ImagePart.from_value(np.zeros((4, 6, 3), np.uint8))
    gone = replace(image, data=None)
    text = _message(Message("user", "tea"), None)
    shown = _message(Message("user", ["See:", image, gone]), None)
    result = _message(Message("tool", [image], tool_call_id="c", name="look"), None)
    assert text.content == "tea"
    assert [part.type for part in shown.content] == ["text", "image", "text"]
    assert (shown.content[1].image, shown.content[2].text) == (image.data_uri(), "[image 6 x 4]")
    assert (result.content[0].image, result.function) == (image.data_uri(), "look")


def row(*lengths, last=StopReason.STOP):
    """A row whose segments, prompt first and then actions and feedback in turns, are so long."""
    roles = ["prompt", *["action", "feedback"] * len(lengths)]
    segments = [Segment(role, list(range(length))) for role, length in zip(roles, lengths, strict=False)]
    turns = [Turn(None, StopReason.STOP) for segment in segments if segment.role == "action"]
    turns[-1].stop_reason = last
    return Row(segments, turns=turns)


def tool_episode(member):
    """A conversation with a tool: one call, its result, and an answer."""
    call = ToolCall("call-1", "stock", {"item": "tea", "shops": [1, 2]})
    return Episode(
        f"shop/00000:{member:03d}:0",
        Task("tea", "How much tea is left?", 12, fields={"shelf": "b", "when": Path("x")}),
        Outcome.finish(),
        rows=[row(5, 3, 4, 2)],
        reward=1.0,
        score=1.0,
        answer="12",
        metrics={"calls": 1.0, "odd": float("inf")},
        messages=[
            Message("system", "You keep a shop."),
            Message("user", "How much tea is left?"),
            Message("assistant", (TextPart("I look."),), (call, ToolCall("call-2", "", error="no JSON"))),
            Message("tool", (TextPart("12"),), tool_call_id="call-1", name="stock"),
            Message("assistant", "12"),
        ],
        env="shop-v0",
        group_id="shop/00000",
        member=member,
        seed=7 + member,
        seconds=1.5,
        fingerprints={"code": "c", "spec": "s", "task": "t"},
    )


def episode(group, member, task, outcome, score=None, **more):
    messages = [Message("user", f"{task.id}?"), *([Message("assistant", "so")] if "rows" in more else [])]
    if outcome.reason == "timeout":
        messages = []
    said = {"env": "shop-v0", "group_id": group, "member": member}
    said |= {"messages": messages, "reward": score, "score": score}
    return Episode(f"{group}:{member:03d}:0", task, outcome, **said, **more)


def all_kinds():
    """Groups with what an evaluation can come to: right, wrong, cut short, failed, unscored, a task asked twice."""
    coffee, milk = Task("coffee", "Coffee?", "none"), Task("milk", (Message("user", "Milk?"),), None, env="dairy")
    groups = [
        [tool_episode(0), tool_episode(1)],
        [
            episode(
                "shop/00001",
                0,
                coffee,
                Outcome.truncate("length"),
                0.0,
                rows=[row(4, 6, last=StopReason.LENGTH)],
            ),
            episode("shop/00001", 1, coffee, Outcome.fail("timeout", "no answer in 60 s", retryable=True)),
        ],
        [
            episode("shop/00002", 0, milk, Outcome.truncate("turns"), 0.25, rows=[row(4, 2, 1, 2)]),
            episode("shop/00002", 1, milk, Outcome.finish(), rows=[row(4, 2)]),
        ],
        [
            episode(
                "shop/00003",
                0,
                coffee,
                Outcome.finish(),
                1.0,
                rows=[Row([], turns=[Turn(1.0, StopReason.STOP)])],
                metrics={"prompt_tokens": 40.0, "completion_tokens": 9.0},
            ),
            episode("shop/00003", 1, coffee, Outcome.fail("environment", "KeyError: 'x'")),
        ],
    ]
    return [Group(of[0].group_id, of[0].task, of) for of in groups]


def result_with(**groups):
    """The result of an evaluation that played these groups, by environment."""
    return {
        "suite": "smoke",
        "seed": 42,
        "model": "models/starter",
        "began": CREATED,
        "ended": COMPLETED,
        "fingerprints": {"model": "m", "envgym": "0.1.0"},
        "envs": {name: {**result_of(of), **PLAYED} for name, of in groups.items()},
    }


def log_of(groups, env="shop-v0"):
    """The log as JSON."""
    pytest.importorskip("inspect_ai")
    from envgym.evaluation.inspect_log import inspect_log

    return inspect_log(env, result_with(**{env: groups}), groups).model_dump(mode="json", exclude_none=True)


def write(folder, groups, result=None):
    """Write the logs of environments into a folder, as an evaluation does."""
    pytest.importorskip("inspect_ai")
    from envgym.evaluation.inspect_log import write_inspect_logs

    asyncio.run(write_inspect_logs(folder, result or result_with(**groups), groups))


def by_sample(log):
    return {(sample["id"], sample["epoch"]): sample for sample in log["samples"]}


def test_every_episode_is_a_sample_and_a_task_asked_again_goes_on_counting():
    log = log_of(all_kinds())
    places = [("tea", 1), ("tea", 2), ("coffee", 1), ("coffee", 2), ("dairy/milk", 1), ("dairy/milk", 2)]
    assert list(by_sample(log)) == [*places, ("coffee", 3), ("coffee", 4)]
    assert log["eval"]["dataset"] == {
        "name": "shop-v0",
        "samples": 3,
        "sample_ids": ["tea", "coffee", "dairy/milk"],
        "shuffled": False,
    }
    assert log["eval"]["config"]["epochs"] == 4


def test_a_conversation_with_tools_has_inspect_s_form():
    sample = by_sample(log_of(all_kinds()))["tea", 2]
    assert [message["role"] for message in sample["input"]] == ["system", "user"]
    assert sample["messages"][:2] == sample["input"]
    assert sample["target"] == "12"
    called = sample["messages"][2]
    assert (called["role"], called["content"], called["source"]) == ("assistant", "I look.", "generate")
    assert called["tool_calls"][0] == {
        "id": "call-1",
        "function": "stock",
        "arguments": {"item": "tea", "shops": [1, 2]},
        "type": "function",
    }
    assert called["tool_calls"][1]["parse_error"] == "no JSON"
    told = sample["messages"][3]
    assert (told["role"], told["content"], told["tool_call_id"], told["function"]) == ("tool", "12", "call-1", "stock")
    assert sample["output"]["choices"] == [{"message": sample["messages"][4], "stop_reason": "stop"}]
    score = sample["scores"]["envgym"]
    assert (score["value"], score["answer"]) == (1.0, "12")
    # Two turns: the first reads 5 tokens, the second 5 + 3 + 4.
    assert sample["output"]["usage"] == {"input_tokens": 17, "output_tokens": 5, "total_tokens": 22}
    assert (sample["turn_count"], sample["total_time"]) == (2, 1.5)
    kept = sample["metadata"]
    assert (kept["seed"], kept["member"], kept["group_id"]) == (8, 1, "shop/00000")
    assert kept["fields"] == {"shelf": "b", "when": "x"}
    assert kept["metrics"] == {"calls": 1.0, "odd": None}
    assert kept["fingerprints"] == {"code": "c", "spec": "s", "task": "t"}


def test_failed_and_unscored_episodes_have_no_score_and_truncated_ones_say_their_limit():
    samples = by_sample(log_of(all_kinds()))
    failed = samples["coffee", 2]
    assert failed["error"]["message"] == "timeout: no answer in 60 s"
    assert "scores" not in failed
    assert (failed["input"], failed["output"]["choices"]) == ("Coffee?", [])
    assert "scores" not in samples["dairy/milk", 2]
    assert "error" not in samples["dairy/milk", 2]
    cut = samples["coffee", 1]
    assert cut["limit"] == {"type": "token", "limit": 6, "reason": "truncated: length"}
    assert cut["output"]["choices"][0]["stop_reason"] == "max_tokens"
    assert cut["scores"]["envgym"]["value"] == 0.0
    assert samples["dairy/milk", 1]["limit"] == {"type": "turn", "limit": 2, "reason": "truncated: turns"}
    assert "limit" not in samples["tea", 1]
    assert samples["coffee", 3]["output"]["usage"] == {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}


def test_examples_in_a_prompt_are_input_and_no_completion():
    prompt = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + 2?"))
    task = Task("sum", prompt, "4")
    answered, failed = tool_episode(0), episode("shop/00000", 1, task, Outcome.fail("timeout", ""))
    answered.task, answered.messages = task, [*prompt, Message("assistant", "4")]
    answered.rows = [row(4, 2)]
    answered, failed = log_of([Group("shop/00000", task, [answered, failed])])["samples"]
    assert [message["source"] for message in answered["messages"]] == ["input", "input", "input", "generate"]
    assert answered["input"] == answered["messages"][:3]
    assert answered["output"]["choices"][0]["message"]["content"] == "4"
    assert [message["source"] for message in failed["input"]] == ["input"] * 3
    assert failed["output"]["choices"] == []


def test_results_are_the_evaluation_s_own():
    groups = all_kinds()
    log, result = log_of(groups), result_of(groups)
    [scorer] = log["results"]["scores"]
    values = {name: metric["value"] for name, metric in scorer["metrics"].items()}
    assert values["mean"] == result["score"]
    assert (values["stderr"], values["ci95_low"], values["ci95_high"]) == (result["stderr"], *result["ci95"])
    assert values["pass@2"] == result["pass@k"]["2"]
    assert next(iter(values)) == "mean"
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (8, 6)
    assert log["eval"]["model_generate_config"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 64}
    assert log["eval"]["metadata"]["env"]["nothing"] is None
    assert log["stats"]["model_usage"]["none/models/starter"]["output_tokens"] == 5 + 5 + 6 + 4 + 2 + 9


def test_an_evaluation_in_which_everything_failed_has_a_log():
    task = Task("a", "A?", "b")
    groups = [Group("e/00000", task, [episode("e/00000", 0, task, Outcome.fail("timeout", ""))])]
    log = log_of(groups)
    assert log["results"]["scores"][0]["metrics"] == {}
    assert log["samples"][0]["error"]["message"] == "timeout"
    assert log_of([])["samples"] == []


def test_an_evaluation_leaves_a_log_for_each_environment(tmp_path):
    groups = {"shop": all_kinds(), "dairy, greedy": all_kinds()[2:3]}
    for _ in range(2):  # an evaluation whose failed episodes ran again writes the same files
        write(tmp_path / "inspect", groups)
    from inspect_ai.log import read_eval_log

    names = ["1-shop.eval", "2-dairy--greedy.eval"]
    assert sorted(path.name for path in (tmp_path / "inspect").iterdir()) == names
    log = read_eval_log(tmp_path / "inspect" / names[0])
    assert len(log.samples) == 8
    assert log.results.scores[0].metrics["mean"].value == result_with(**groups)["envs"]["shop"]["score"]
    played = {**PLAYED, "env": {"name": "shop-v0", "nothing": None}}
    assert log.eval.metadata == {"suite": "smoke", "seed": 42, **played, "model": "models/starter"}
    assert log.eval.model == "none/models/starter", "inspect_ai takes a model by API/NAME alone"
    assert log.eval.model_generate_config.temperature == 0.7


def test_logs_that_are_asked_for_without_inspect_ai_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "envgym.evaluation.inspect_log", raising=False)
    settings = {"env": "math_verify", "model": "starter", "evals_dir": str(tmp_path), "eval": {"inspect_logs": True}}
    folder = new_evaluation(settings)
    with pytest.raises(
        MissingDependency, match=r"^eval\.inspect_logs needs the package 'inspect_ai'.*install.*inspect"
    ):
        run_evaluation(folder, Display(), make_model)
    assert not folder.path.exists()


def test_an_evaluation_that_is_asked_for_its_log_writes_it(tiny_model, tmp_path):
    read_eval_log = pytest.importorskip("inspect_ai.log").read_eval_log
    settings = {
        "model": str(tiny_model), "env": "math_verify", "engine": {"kind": "transformers"}, "debug": True,
        "rollout": {"max_tokens": 4}, "evals_dir": str(tmp_path), "name": "run",
        "eval": {"tasks": 2, "greedy": False, "inspect_logs": True},
    }  # fmt: skip
    result = run_evaluation(new_evaluation(settings), Display(), make_model)
    [path] = (tmp_path / "run" / "inspect").iterdir()
    log = read_eval_log(path)
    assert log.results.scores[0].metrics["mean"].value == result["score"]
    assert [sample.epoch for sample in log.samples] == [1, 1]


@pytest.fixture
def logs(tmp_path):
    write(tmp_path, {"shop-v0": all_kinds(), "math_verify-v0": all_kinds()[:3]})
    return tmp_path


def test_inspect_ai_reads_our_log(logs):
    from inspect_ai.log import list_eval_logs, read_eval_log
    from inspect_ai.scorer import SampleScore, mean, mean_score, stderr

    listed = [read_eval_log(info, header_only=True) for info in list_eval_logs(str(logs))]
    assert {(header.status, header.eval.task) for header in listed} == {
        ("success", "shop-v0"),
        ("success", "math_verify-v0"),
    }
    log, once = read_eval_log(logs / "1-shop-v0.eval"), read_eval_log(logs / "2-math-verify-v0.eval")
    samples = {(sample.id, sample.epoch): sample for sample in log.samples}
    assert {place: sample.scores["envgym"].value for place, sample in samples.items() if sample.scores} == {
        ("tea", 1): 1.0, ("tea", 2): 1.0, ("coffee", 1): 0.0, ("dairy/milk", 1): 0.25, ("coffee", 3): 1.0,
    }  # fmt: skip
    assert {place: sample.error.message for place, sample in samples.items() if sample.error} == {
        ("coffee", 2): "timeout: no answer in 60 s",
        ("coffee", 4): "environment: KeyError: 'x'",
    }
    assert {place: sample.limit.type for place, sample in samples.items() if sample.limit} == {
        ("coffee", 1): "token",
        ("dairy/milk", 1): "turn",
    }
    tea = samples["tea", 1]
    assert tea.messages[2].tool_calls[0].arguments == {"item": "tea", "shops": [1, 2]}
    assert (tea.output.completion, tea.output.stop_reason) == ("12", "stop")
    # What inspect_ai makes of our samples, epochs averaged first, is what we report where no task is asked twice.
    scores = {}
    for sample in once.samples:
        if sample.scores:
            scores.setdefault(sample.id, []).append(sample.scores["envgym"])
    reduced = [SampleScore(score=mean_score()(of_task), sample_id=task) for task, of_task in scores.items()]
    metrics = once.results.scores[0].metrics
    assert [mean()(reduced), stderr()(reduced)] == pytest.approx([metrics["mean"].value, metrics["stderr"].value])


@pytest.mark.slow
def test_inspect_scores_our_log(logs):
    """It makes the model that a log names, before it scores anything."""
    score = [
        sys.executable,
        "-m",
        "inspect_ai",
        "score",
        logs / "1-shop-v0.eval",
        "--scorer",
        "match",
        "--action",
        "append",
    ]
    subprocess.run([*score, "--output-file", logs / "scored.eval"], check=True, timeout=120)


def answer(url, process):
    """What the viewer answers, once it does."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                return response.read()
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert process.poll() is None, "inspect view has ended"
            assert time.monotonic() < deadline, "inspect view does not answer"
            time.sleep(0.2)


@pytest.mark.slow
def test_inspect_view_shows_our_log(logs, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = tmp_path_factory.mktemp("view") / "output"
    command = [
        sys.executable,
        "-m",
        "inspect_ai",
        "view",
        "start",
        "--log-dir",
        logs,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            base = f"http://127.0.0.1:{port}"
            assert b"<html" in answer(base, process)
            files = {of["task"]: of["name"] for of in json.loads(answer(f"{base}/api/logs", process))["files"]}
            assert set(files) == {"shop-v0", "math_verify-v0"}
            name = urllib.parse.quote(files["shop-v0"], safe="")
            [header] = json.loads(answer(f"{base}/api/log-headers?file={name}", process))
            assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == result_of(all_kinds())["score"]
            shown = json.loads(answer(f"{base}/api/logs/{name}", process))
            assert by_sample(shown).keys() == by_sample(log_of(all_kinds())).keys()
            assert by_sample(shown)["tea", 1]["messages"][3]["content"] == "12"
            head = json.loads(answer(f"{base}/api/logs/{name}?header-only=0", process))
            assert (head["eval"]["task"], head.get("samples")) == ("shop-v0", None)
        finally:
            process.terminate()
            process.wait(30)
