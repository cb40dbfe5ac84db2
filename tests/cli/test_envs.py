"""`envgym envs check`, `try` and `new` as a user meets them: with text on standard input, and at a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from envgym.cli.envs.new import FOLDER, KINDS

ENVGYM = Path(sys.executable).with_name("envgym")
ZOO = Path(__file__).parents[1] / "check" / "zoo"

GUESS = """
import envgym

class Guess(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        self.number, self.left = self.rng.randint(1, 9), 3
        return [{"role": "system", "content": "[bold]Numbers[/bold]"}, {"role": "user", "content": "Guess!"}], {}

    async def step(self, action):
        self.left -= 1
        if action.text == "tell":
            return f"it is {self.number}", 0.0, False, False, {}
        if "\\n" in action.text:
            return f"{len(action.text.splitlines())} lines", 0.25, False, False, {}
        won = action.text == str(self.number)
        return "right" if won else "wrong", float(won), won, self.left == 0, {"metrics": {"left": self.left}}

    async def close(self):
        print("closed")
"""


# -- check ------------------------------------------------------------------------------------------------


def test_check_passes_with_0_and_one_line_a_check(start, tmp_path):
    (tmp_path / "temporary").mkdir()
    result = start("envs", "check", f"{ZOO}/healthy.py:Sums", TMPDIR=tmp_path / "temporary")
    assert (result.returncode, result.stderr) == (0, "")
    _, *lines, summary, advice = result.stdout.splitlines()
    assert len(lines) == 22
    assert all(re.match(r"(ok|not applicable)  +\w", line) for line in lines)
    assert re.fullmatch(r"22 checks: 21 ok, 1 not applicable \(\d+ s\)", summary)
    assert advice == f"whether its rewards can be forged: envgym envs attack {ZOO}/healthy.py:Sums"
    assert list((tmp_path / "temporary").glob("envgym-*")) == []


def test_check_fails_with_1_and_says_what_to_do(run):
    result = run("envs", "check", f"{ZOO}/returns.py:FourTuple")
    assert (result.returncode, result.stderr) == (1, "")
    line, advice = re.search(r"^(FAILED .*)\n +-> (.*)$", result.stdout, re.MULTILINE).groups()
    assert re.match(r"FAILED +types +.*not \(None, 1.0, True, \{\}\)", line)
    assert "docs/environments/environments.md" in advice
    assert not re.search("^not applicable", result.stdout, re.MULTILINE)  # nothing repeats that none could be played


def test_check_takes_data_and_settings(run, tmp_path):
    rows = [{"question": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(20, 60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("envs", "check", "math_verify", "data.path=sums.jsonl", "env.instruction=Use a box.")
    assert result.returncode == 0, result.stdout
    assert "train: 36, test: 4" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no file"),
        (["math_verify", "env.digts=1"], "Did you mean 'digits'?"),
        (["math_verify", "data.path=none.jsonl"], "none.jsonl"),
        (["empty.py"], "defines no environment"),
        ([], "E"),
    ],
)
def test_a_mistake_is_no_failed_check(run, tmp_path, words, said):
    (tmp_path / "empty.py").write_text("")
    result = run("envs", "check", *words)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line


def family(mark):
    """Processes that inherited `mark` in their environment: the program and all its descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.mark.parametrize(
    "animal",
    ["endings.py:LeavesAProcess", pytest.param("returns.py:HoldsTheLoopForGood", marks=pytest.mark.slow)],
)
def test_ctrl_c_ends_a_check_and_all_that_it_started(tmp_path, animal):
    mark, playing = f"ENVGYM_TEST_MARK={tmp_path}", tmp_path / "playing"
    file, _, name = animal.partition(".py:")
    (tmp_path / "animal.py").write_text(
        f"import pathlib, sys\n"
        f"sys.path.insert(0, {str(ZOO)!r})\n"
        f"from {file} import {name}\n"
        f"class Animal({name}):\n"
        f"    async def step(self, action):\n"
        f"        pathlib.Path({str(playing)!r}).touch()\n"
        f"        return await super().step(action)\n"
    )
    with subprocess.Popen(
        [ENVGYM, "envs", "check", "animal.py:Animal"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "ENVGYM_TEST_MARK": str(tmp_path)},
    ) as program:  # fmt: skip
        deadline = time.monotonic() + 60
        while not playing.exists():
            assert time.monotonic() < deadline
            assert program.poll() is None
            time.sleep(0.02)
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate(timeout=60)
    assert (program.returncode, stderr) == (130, "envgym: interrupted\n")
    deadline = time.monotonic() + 60
    while family(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_served_environment_is_examined_as_far_as_it_can_be_seen(run, tmp_path):
    with subprocess.Popen(
        [ENVGYM, "serve", f"{ZOO}/healthy.py:Sums", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline()).group()
            result = run("envs", "check", url)
            tried = run("envs", "try", url, typed="?\n?\n")
        finally:
            server.send_signal(signal.SIGINT)
    assert result.returncode == 0, result.stdout
    on_its_server = re.findall(r"^not applicable  (.{16})  it runs on its server", result.stdout, re.MULTILINE)
    assert [name.strip() for name in on_its_server] == ["generators", "surroundings"]
    assert "terminated after 2 turns: reward 0, score 0" in tried.stdout


# -- try --------------------------------------------------------------------------------------------------


@pytest.fixture
def guess(tmp_path):
    (tmp_path / "guess.py").write_text(GUESS)
    return "guess.py"


def test_an_episode_from_a_pipe(run, guess):
    first = run("envs", "try", guess, "--seed", 5, typed="tell\n")
    number = re.search(r"it is (\d)", first.stdout).group(1)
    assert first.stdout.endswith("closed\nleft after 1 turn\n")
    result = run("envs", "try", guess, "--seed", 5, typed=f'"""\none\ntwo\n"""\n{number}\nnever read\n')
    assert (result.returncode, result.stderr) == (0, "")
    said = result.stdout.splitlines()
    assert "[bold]Numbers[/bold]" in said  # text is text, whatever it looks like
    assert said.index("2 lines") < said.index("reward 0.25") < said.index("right")
    assert said[-2:] == ["closed", "terminated after 2 turns: reward 1.25, left 1"]
    assert "--seed 5" in said[0]


def test_input_that_ends_leaves_the_episode(run, guess):
    result = run("envs", "try", guess, typed="1\n")
    assert result.returncode == 0
    assert "left after 1 turn" in result.stdout or "terminated after 1 turn" in result.stdout  # it may be right
    assert result.stdout.count("closed") == 1


def test_tools_are_called_by_hand(run):
    typed = '/call total {"order": 3}\n/call total {figs}\n"""\n/call total {"order": 1}\n/call prize {}\n"""\n14\n'
    result = run("envs", "try", FOLDER / "tools.py", "--task", "test:8", typed=typed)
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        'tool total(order: integer)\n  The total of an order.\n  /call total {"order": "<integer>"}\n' in result.stdout
    )
    assert "tool total:\n38\n" in result.stdout
    assert "not sent: the arguments of total are no JSON" in result.stdout
    assert re.search(r"tool total:\n47\ntool prize:\nError: .*prize", result.stdout)
    assert re.search(r"^terminated after 3 turns: reward \d, score \d, tool_calls 3", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--task", "first"], "a task is a number"), (["--task", "test:99"], "there is no task 99 in test: it has 12")],
)
def test_a_task_that_is_not_there(run, words, said):
    result = run("envs", "try", FOLDER / "tools.py", *words)
    assert result.returncode == 2
    assert said in result.stderr


def test_without_training_tasks_a_held_out_one_is_shown_and_played(run, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "What is 1 + 2?", "answer": 3}\n')
    words = ("math_verify", f"data.test_path={path}")
    shown = run("envs", "show", *words)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "user: What is 1 + 2?" in shown.stdout
    for number in ([], ["--task", "0"], ["--task", "test:0"]):
        played = run("envs", "try", *words, *number, typed="\\boxed{3}\n")
        assert (played.returncode, played.stderr) == (0, "")
        assert "task tasks-1" in played.stdout
        assert "reward 1" in played.stdout
    missing = run("envs", "try", *words, "--task", "train:0")
    assert "there is no task 0 in train: it has 0" in missing.stderr


class Terminal:
    """A program whose input and output are a terminal."""

    def __init__(self, folder, *words):
        ours, theirs = pty.openpty()
        self.ours, self.text = ours, ""
        self.program = subprocess.Popen(
            [ENVGYM, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm"}, preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text):
        os.write(self.ours, text.encode())

    def wait_for(self, pattern, seconds=60):
        """Read until `pattern` has appeared since the last call."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, self.text
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.ours, 65536).decode()
                except OSError:  # the program has closed its side
                    break
        assert found, self.text
        self.text = self.text[found.end() :]

    def wait_until_it_reads(self, seconds=60):
        """Wait until the program sleeps and uses no time any more."""
        program, deadline = psutil.Process(self.program.pid), time.monotonic() + seconds
        seen = []
        while len(seen) < 10 or len(set(seen[-10:])) > 1 or seen[-1][0] != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, seen[-10:]
            time.sleep(0.02)
            seen.append((program.status(), program.cpu_times()))

    def end(self):
        status = self.program.wait(30)
        os.close(self.ours)
        return status


def take_terminal():
    """Let Ctrl-C on the terminal reach this process."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_an_episode_at_a_terminal(tmp_path, guess):
    terminal = Terminal(tmp_path, "envs", "try", guess, "--seed", "5")
    terminal.wait_for("Guess!")
    terminal.wait_for("> ")
    terminal.type("tell\r")
    terminal.wait_for(r"it is \d")
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("left after 1 turn")
    assert terminal.end() == 0


def test_ctrl_c_at_a_terminal_closes_the_environment(tmp_path, guess):
    terminal = Terminal(tmp_path, "envs", "try", guess)
    terminal.wait_for("> ")
    terminal.wait_until_it_reads()  # quicker than any hand, Ctrl-C would come between the prompt and the reading
    terminal.type("\x03")
    terminal.wait_for("closed")
    terminal.wait_for("envgym: interrupted")
    assert terminal.end() == 128 + signal.SIGINT


# -- new --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_new_environment_passes_every_check_and_can_be_trained(run, tmp_path, tiny_model, kind):
    made = run("envs", "new", "my_first_env", "--kind", kind)
    assert (made.returncode, made.stderr) == (0, "")
    words = [
        "steps=1",
        "rollout.tasks_per_step=2",
        "rollout.group_size=2",
        "rollout.max_tokens=8",
        "eval.every=0",
        "engine.kind=transformers",
    ]
    commands = re.findall(r"^  envgym (.+)$", made.stdout, re.MULTILINE)
    assert [command.split()[:2] for command in commands] == [["envs", "check"], ["envs", "try"], ["train", "--env"]]
    checked = run(*commands[0].split())
    assert checked.returncode == 0, checked.stdout
    assert "warning" not in checked.stdout
    assert run(*commands[1].split(), typed="what?\n").returncode == 0
    trained = run(*commands[2].split(), "--recipe", "grpo", "--model", tiny_model, *words)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "runs" / "my_first_env" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 1, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_environment_has_its_own_name(run, tmp_path, kind):
    assert run("envs", "new", "my_first_env.py", "--kind", kind).returncode == 0
    text = (tmp_path / "my_first_env.py").read_text()
    assert "MyFirstEnv" in text or "def my_first_env(" in text
    assert "new_environment" not in text.lower().replace("newenvironment", "new_environment")
    assert run("envs", "show", "my_first_env.py").returncode == 0


def test_a_new_file_takes_nobodys_place(run, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    for words, said in (
        (["mine"], "mine.py exists already"),
        (["folder/mine"], "there is no folder"),
        (["two words"], "cannot be the name of a Python file"),
        (["class"], "cannot be the name of a Python file"),
        (["other", "--kind", "tool"], "Did you mean 'tools'?"),
        (["other", "seed=1"], "leave out seed=1"),
    ):
        result = run("envs", "new", *words)
        assert result.returncode == 2
        assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "precious"


# -- show -------------------------------------------------------------------------------------------------


def test_arguments_of_a_constructor_are_set_like_settings(run, tmp_path):
    (tmp_path / "sized.py").write_text(
        "import envgym\n\n"
        "class Sized(envgym.Env):\n"
        "    def __init__(self, size: int, hint='none'):\n"
        "        self.text = f'{size} {hint}'\n\n"
        "    async def reset(self, *, seed=None, options=None):\n"
        "        return self.text, {}\n\n"
        "    async def step(self, action): ...\n"
    )
    shown = run("envs", "show", tmp_path / "sized.py:Sized", "env.size=5", "env.hint=a word").stdout
    assert "  env.size=5\n  env.hint='a word'\n" in shown
    assert shown.endswith("  5 a word\n")
    missing = run("envs", "show", tmp_path / "sized.py")
    assert missing.returncode != 0
    assert "key 'size' is required" in missing.stderr


def test_show_says_agent_and_tools(run):
    shown = run("envs", "show", FOLDER / "tools.py").stdout
    assert "agent: tool_calling\n" in shown
    assert "  total(order: integer)  The total of an order.\n" in shown
