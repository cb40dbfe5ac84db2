"""`envgym ask`: the answer alone on standard output, whoever gives it, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from envgym.cli import main
from tests.chat_api import api

ENVGYM = Path(sys.executable).with_name("envgym")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, empty."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    return folder


def program(*words, typed=None):
    return subprocess.run([ENVGYM, "ask", *map(str, words)], input=typed, capture_output=True, text=True, timeout=300)


@contextmanager
def asked_api(message, status=200):
    """Settings for an API that gives every request this answer, and the bodies of the requests."""
    with api(lambda body: (status, message)) as (url, bodies):
        yield ["engine.kind=openai", f"engine.base_url={url}", "engine.tries=1"], bodies


def test_a_model_of_vllm_answers_and_nothing_is_left(temporary):
    question = r"What is 12 + 34? Put the final answer in \boxed{}."
    answer = program("--model", "starter", "rollout.temperature=0", "rollout.max_tokens=24", question)
    assert (answer.returncode, answer.stdout) == (0, "\\boxed{46}\n"), answer.stderr
    assert f"first prompt, as the model gets it:\n  <|im_start|>user\n  {question}<|im_end|>" in answer.stderr
    assert [*temporary.glob("envgym*")] == []  # torch keeps what it compiled
    assert [path.name for path in temporary.parent.iterdir()] == [temporary.name]


def test_the_api_of_eval_is_asked_the_words_as_they_are(temporary, capsys, monkeypatch):
    with asked_api({"content": "Seven.\x1b[2J\nIndeed."}) as (settings, asked):
        assert main(["ask", "x=3?", "--model", "m", *settings, "rollout.max_tokens=5", "data.system=Be brief."]) == 0
        assert capsys.readouterr().out == "Seven.\\x1b[2J\nIndeed.\n"
        assert main(["ask", *settings, "model=m", "Is 3 = {3}?\nOr [4]?"]) == 0
        assert main(["ask", *settings, "model=m", "-1 + 2?"]) == 0
        piped = program("-", "--model", "m", *settings, typed="héllo:\n\n  two\n")
        assert (piped.returncode, piped.stdout) == (0, "Seven.\\x1b[2J\nIndeed.\n")
    messages = [request["messages"] for request in asked if "Reply with the word OK." not in str(request)]
    system = {"role": "system", "content": "Be brief."}
    texts = ["x=3?", "Is 3 = {3}?\nOr [4]?", "-1 + 2?", "héllo:\n\n  two"]
    first, *others = ([{"role": "user", "content": text}] for text in texts)
    assert messages == [[system, *first], *others]
    assert asked[1]["max_tokens"] == 5
    assert [*temporary.iterdir()] == []


def test_an_answer_that_was_cut_says_so_beside_it(temporary, capsys):
    with asked_api({"content": "Seven and", "finish_reason": "length"}) as (settings, _):
        assert main(["ask", "3 + 4?", "--model", "m", *settings]) == 0
    answer = capsys.readouterr()
    assert answer.out == "Seven and\n"
    assert answer.err.splitlines()[-1] == "envgym: the answer is truncated (length)"


MISTAKES = {
    "question": (["--model", "starter"], "the following arguments are required: QUESTION. See: envgym ask --help"),
    "model": (["3 + 4?"], "envgym ask needs --model"),
    "key": (["3 + 4?", "--model", "starter", "rollout.max_token=9"], "Did you mean 'rollout.max_tokens'?"),
    "second question": (["3 + 4?", "5 + 6?", "--model", "starter"], "'5 + 6?' is neither an option nor a key=value"),
    "empty question": ([" \n", "--model", "starter"], "the question is empty"),
    "nothing typed": (["-", "--model", "starter"], "the question is empty"),
    "no UTF-8": (["\udcff?", "--model", "starter"], "the question is not text in UTF-8"),
    "model's folder": (["3 + 4?", "--model", "/nowhere"], "/nowhere does not exist"),
    "empty folder": (["3 + 4?", "--model", "."], "holds no model"),
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_2(temporary, words, said, capsys, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert main(["ask", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *progress, line = printed.err.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line
    assert all(text.startswith("setting up") for text in progress)
    assert [*temporary.iterdir()] == []


def test_a_refusal_of_the_api_is_one_line_and_exit_2(temporary, capsys):
    with asked_api({"error": {"message": "there is no such model"}}, 404) as (settings, _):
        assert main(["ask", "3 + 4?", "--model", "m", *settings, "rollout.retries=0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "there is no such model" in printed.err.splitlines()[-1]
    assert printed.err.count("envgym: error: ") == 1
    assert [*temporary.iterdir()] == []


def test_ctrl_c_is_one_line_and_exit_130(temporary):
    """Interrupted while it waits for an API that never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        url = f"engine.base_url=http://127.0.0.1:{silent.getsockname()[1]}/v1"
        words = ["3 + 4?", "--model", "m", "engine.kind=openai", url]
        asking = subprocess.Popen([ENVGYM, "ask", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        with connection:
            asking.send_signal(signal.SIGINT)
            stdout, stderr = asking.communicate(timeout=60)
    assert (asking.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1].startswith("envgym: interrupted")
    assert [*temporary.iterdir()] == []
