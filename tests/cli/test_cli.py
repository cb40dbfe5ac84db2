"""The program as a user meets it, judged by its exit status and output: commands in this process, and a few real starts
for what only a process has."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from envgym.cli import summaries_of_commands
from envgym.cli.envs import ACTIONS
from envgym.cli.errors import Invocation, report
from envgym.disk import folder_lock

COMMANDS = summaries_of_commands()
ENVGYM = Path(sys.executable).with_name("envgym")
HEAVY = {
    "aiohttp", "datasets", "deepspeed", "matplotlib", "numpy", "pyarrow", "pydantic", "ray", "rich", "tokenizers",
    "torch", "transformers", "vllm",
}  # fmt: skip

BROKEN_ENV = """
import envgym

class Broken(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        raise ZeroDivisionError("a mistake of the author")

    async def step(self, action):
        return "", 0.0, True, False, {}
"""


def error_of(result) -> str:
    """The one line that a mistake is answered with, once everything that must hold for all of them does."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("envgym: error: ")
    return line


# -- help and start-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command_and_exits_0(run, arguments):
    result = run(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"envs {action}" for action in ACTIONS), "model merge"])
def test_help_of_a_command_holds_an_example_of_it(run, command):
    result = run(*command.split(), "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"example:\n  envgym {command}" in result.stdout


def test_version(run):
    from importlib.metadata import version

    assert run("--version").stdout == f"envgym {version('envgym')}\n"


def test_another_package_adds_a_command(start, tmp_path):
    info = tmp_path / "package" / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[envgym.commands]\nsay = stranger\nworse = stranger_without_module\n")
    (info.parent / "stranger.py").write_text(
        'SUMMARY = "print words"\ndef main(arguments, invocation):\n    print(*arguments)\n    return 3\n'
    )
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    shown = start("--help", PYTHONPATH=path).stdout
    assert re.search(r"^  say +print words$", shown, re.MULTILINE)
    assert re.search(r"^  worse +\(cannot be used: ", shown, re.MULTILINE)
    done = start("say", "a", "b", PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a b\n", "")


def test_help_imports_nothing_heavy():
    program = f"""
import contextlib, io, sys
import envgym
from envgym.cli import main
for arguments in (["--help"], ["train", "--help"], ["--version"], ["no-such-command"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
print(*sorted({HEAVY!r} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "\n"


def test_commands_that_only_look_load_no_training_library(tmp_path):
    program = f"""
import contextlib, io, sys
from envgym.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    for arguments in (["envs", "list"], ["config", "--env", "math_verify"], ["config", "recipes"], ["runs"]):
        assert main(arguments) == 0
print(*sorted({HEAVY - {"pydantic", "aiohttp"}!r} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "\n"


# -- mistakes ---------------------------------------------------------------------------------------------

MISTAKES = {
    "command": (["trian"], "'trian'. Did you mean 'train'?"),
    "option of the program": (["--versoin"], "'--versoin'. Did you mean '--version'?"),
    "option": (["train", "--evn", "math_verify"], "no option '--evn'. Did you mean '--env'?"),
    "option cut short": (["train", "--rec", "grpo"], "no option '--rec'. Did you mean '--recipe'?"),
    "key as option": (["train", "--env", "math_verify", "--steps", "3"], "written steps=…"),
    "nested key as option": (["train", "--learner.lr=1"], "written learner.lr=…"),
    "another program's option": (
        ["train", "--batch-size", "3"],
        "written learner.minibatches=… or rollout.tasks_per_step=…",
    ),
    "option without value": (["train", "--env"], "--env: expected one argument"),
    "stray word": (["train", "math_verify"], "'math_verify' is neither an option nor a key=value setting"),
    "no environment": (["train"], "which environment? Give one with --env"),
    "environment": (["train", "--env", "math_verfy"], "no environment 'math_verfy'. Did you mean 'math_verify'?"),
    "environment's file": (["train", "--env", "nowhere.py"], "nowhere.py"),
    "key like no other": (["train", "--env", "math_verify", "env.x=3"], "unknown key 'x'. There is boxed_share, "),
    "setting like no other": (["train", "--env", "math_verify", "qqq=3"], "unknown key 'qqq'. There is agent, "),
    "a list's key": (["envs", "show", "tool_use", "env.mcp={a: 1}"], "key 'mcp' holds a list ([…, …]), not {'a': 1}"),
    "address without a scheme": (["train", "--env", "localhost:8000/x"], "write http://localhost:8000/x, or https"),
    "learner": (["train", "--env", "math_verify", "--learner", "grop"], "no learner 'grop'. Did you mean 'grpo'?"),
    "recipe": (["train", "--env", "math_verify", "--recipe", "grop"], "no recipe 'grop'. Did you mean 'grpo'?"),
    "runtime": (["train", "--env", "math_verify", "--runtime", "slurm"], "got 'slurm'"),
    "config file": (["train", "--config", "none.yaml"], "none.yaml does not exist"),
    "run to resume": (["train", "--resume", "nothing"], "'nothing'"),
    "settings of a resumed run": (
        ["train", "--resume", "nothing", "--env", "x", "learner.gamma=1", "steps=9"],
        "leave out --env, learner.gamma=…, or begin a new run with --from",
    ),
    "evaluation without model": (["eval", "--env", "math_verify"], "needs --model"),
    "evaluation without environment": (["eval", "--model", "starter"], "which environment?"),
    "envs action": (["envs", "lst"], "'lst'. Did you mean 'list'?"),
    "envs alone": (["envs"], "followed by list or show"),
    "shown environment": (["envs", "show", "math_verfy"], "Did you mean 'math_verify'?"),
    "shown environment's key": (["envs", "show", "math_verify", "digits=3"], "written env.KEY=VALUE"),
    "no shown environment": (["envs", "show"], "E"),
    "shown environment as option": (["envs", "show", "--env", "x"], "is a separate word: envgym envs show E. See"),
    "served environment": (["serve", "math_verfy"], "Did you mean 'math_verify'?"),
    "port": (["serve", "math_verify", "--port", "http"], "--port: invalid int value: 'http'"),
    "address": (["serve", "math_verify", "--host", "0.0.0.0"], "127.0.0.1"),
    "model": (["model", "startr"], "Did you mean 'starter'?"),
    "model that is not made": (["model", "grpo"], "'grpo'"),
    "model with settings": (["model", "starter", "seed=1"], "leave out seed=1"),
    "stop": (["stop", "x", "dir=x"], "runs_dir=FOLDER"),
    "runs": (["runs", "dir=x"], "runs_dir=FOLDER"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_2(run, arguments, said):
    assert said in error_of(run(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", "env=math_verify", "model=nothing.yaml", "--out", "o.jsonl"],
        ["rollout", "--env", "math_verify", "--model", "nothing.yaml", "--out", "o.jsonl"],
        ["eval", "env=math_verify", "model=nothing.yaml"],
        ["eval", "--env=math_verify", "--model=nothing.yaml"],
        ["score", "env=math_verify", "model=nothing.yaml", "missing.jsonl"],
        ["score", "--env", "math_verify", "--model", "nothing.yaml", "missing.jsonl"],
        ["serve-reward-model", "model=nothing.yaml", "--port", "0"],
        ["envs", "try", "--model", "nothing.yaml", "recorded", "data.path=one.jsonl"],
        ["train", "--env", "math_verify", "model=nothing.yaml"],
    ],
    ids=" ".join,
)
def test_every_command_takes_the_model_as_an_option_and_as_a_setting(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert "nothing.yaml" in error_of(run(*arguments))


def test_an_option_of_a_run_is_a_setting_everywhere(run):
    assert "got 'slurm'" in error_of(run("eval", "--env", "math_verify", "--model", "starter", "--runtime", "slurm"))


def test_the_program_ends_with_the_status_of_its_command(start):
    arguments, said = MISTAKES["environment"]
    assert said in error_of(start(*arguments))


def test_settings_that_another_learner_does_not_have_are_said_in_a_line_beside_the_output(run):
    result = run("config", "--env", "math_verify", "--recipe", "gspo", "--learner", "sft")
    (line,) = result.stderr.splitlines()
    assert line.startswith("envgym: note: learner sft does not have these settings of grpo")
    assert yaml.safe_load(result.stdout)["stages"][0]["learner"]["weight_decay"] == 0.1  # as the recipe says


def test_a_server_that_is_not_there(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert url in error_of(run("envs", "show", url))


def test_a_taken_port_says_so(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in error_of(run("serve", "math_verify", "--port", port))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "math_verify", "--model", "/nowhere"], "/nowhere does not exist"),
        (["--env", "math_verify", "--model", "empty"], "empty holds no model: there is no config.json in it"),
        (["--env", "math_verify", "--model", "MODEL", "data.path=bad.jsonl"], "bad.jsonl:2: not JSON"),
        (
            ["--env", "math_verify", "--model", "MODEL", "data.path=good.jsonl", "data.test_fraction=0"],
            "no held-out tasks: set eval.every=0",
        ),
        (
            ["--env", "http://127.0.0.1:9", "--model", "MODEL"],
            "http://127.0.0.1:9: cannot be reached (connection refused); start it there",
        ),
    ],
    ids=["no model", "no model in the folder", "malformed row", "nothing held out", "no server"],
)
def test_what_only_a_start_can_tell_is_one_line_too(run, tmp_path, tiny_model, words, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": oops}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    result = run("train", "--name", "first", *(tiny_model if word == "MODEL" else word for word in words))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line
    assert run("runs").stdout == "no runs in runs\n"  # it never began: its name is free again


def test_a_run_folder_that_exists(run, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    line = error_of(run("train", "--env", "math_verify", "--name", "first"))
    assert "--name" in line
    assert "--resume" in line
    assert list((tmp_path / "runs" / "first").iterdir()) == []  # untouched


WITHOUT = """
import contextlib, io, json, sys

sys.modules.update(dict.fromkeys({absent!r}))  # each is as if it were not installed
from envgym.cli import main
for arguments in {commands!r}:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = main(arguments)
    print(json.dumps([status, stdout.getvalue(), stderr.getvalue()]))
"""


def test_without_the_training_packages_a_command_names_what_installs_them(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    commands = [
        ["train", "--env", "math_verify"],
        ["eval", "--env", "math_verify", "--model", "starter"],
        ["model", "starter"],
        ["rollout", "--env", "math_verify", "--model", "starter", "--out", "x.jsonl"],
        ["score", "x.jsonl", "--env", "math_verify", "--out", "y.jsonl"],
    ]
    absent = {*HEAVY - {"aiohttp", "pydantic", "rich"}, "safetensors"}
    program = WITHOUT.format(absent=absent, commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    for arguments, line in zip(commands, done.stdout.splitlines(), strict=True):
        assert "-m pip install 'deepspeed>=" in error_of(subprocess.CompletedProcess(arguments, *json.loads(line)))


def test_an_environments_words_command_no_terminal(run, tmp_path, capsys):
    """Whether they come in an error of its own, in an observation or in a log."""
    loud = r"\x1b[2J\x1b]0;title\x07"
    broken, talking = tmp_path / "broken.py", tmp_path / "talking.py"
    broken.write_text(BROKEN_ENV.replace("a mistake of the author", loud))
    talking.write_text(
        BROKEN_ENV.replace('raise ZeroDivisionError("a mistake of the author")', f'return "{loud}", {{}}')
    )
    results = [
        run("envs", "check", broken),
        run("envs", "show", talking),
        run("envs", "show", "\x1b[2J\x1b]0;title\x07"),
    ]
    logging.lastResort.handle(logging.makeLogRecord({"msg": "\x1b[2J\x1b]0;title\x07", "levelno": logging.WARNING}))
    for text in (*(result.stdout + result.stderr for result in results), capsys.readouterr().err):
        assert loud in text
        assert "\x1b" not in text
        assert "\x07" not in text


LOUD = "\x1b[2J\x1b]0;title\x07\x9b5A"
SHOWN = r"\x1b[2J\x1b]0;title\x07\x9b5A"
LOUD_ENV = f'''
import envgym
from envgym.types import Message, Observation, ToolSpec

class Loud(envgym.Env):
    """Documented {LOUD} there."""

    async def reset(self, *, seed=None, options=None):
        schema = {{"type": "object", "properties": {{"named{LOUD}": {{"type": "typed{LOUD}"}}}}}}
        tool = ToolSpec("tool{LOUD}", "described{LOUD}", schema)
        return Observation(messages=[Message("user", "asked{LOUD}")], tools=(tool,)), {{}}

    async def step(self, action):
        return None, 0.0, True, False, {{}}
'''


def test_words_of_environments_task_sets_and_runs_command_no_terminal(run, tmp_path):
    (tmp_path / "loud.py").write_text(LOUD_ENV)
    fields = dict.fromkeys(["description", "source", "licence", "published_reading"], f"written{LOUD}")
    task_set = {**fields, "env": {"name": "multiple_choice"}, "data": {"path": "rows.jsonl"}}
    (tmp_path / "set.yaml").write_text(json.dumps(task_set))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": f"asked{LOUD}", "choices": ["a", "b"], "answer": "a"}))
    folder = tmp_path / "runs" / f"run{LOUD}\nfake  completed"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    results = {
        "env": run("envs", "show", "loud.py"),
        "task set": run("envs", "show", "set.yaml"),
        "runs": run("runs"),
        "no runs": run("runs", f"runs_dir={LOUD}"),
    }
    for name, result in results.items():
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.stdout + result.stderr), name
    shown = results["env"].stdout
    for word in ("Documented ", "tool", "described", "named", "typed", "asked"):
        assert word + SHOWN in shown
    assert results["task set"].stdout.count(f"written{SHOWN}") == 4
    assert f"run{SHOWN}\\nfake  completed" in results["runs"].stdout
    assert not re.search("^fake", results["runs"].stdout, re.MULTILINE)


def test_what_ends_the_loop_while_a_model_is_made_ends_the_command_in_a_line(run, monkeypatch):
    """The tasks whose text a new tokenizer learns are drawn by a user's code."""

    async def leaves(*_, **__):
        sys.exit(3)

    monkeypatch.setattr("envgym.training.new_model.make_model", leaves)
    result = run("model", "starter")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


def test_debug_shows_the_traceback_of_a_mistake(run):
    result = run("train", "--env", "math_verfy", "debug=true")
    assert result.returncode == 2
    assert result.stderr.startswith("Traceback")
    assert "Did you mean 'math_verify'?" in result.stderr.splitlines()[-1]


def test_a_mistake_of_an_author_is_one_line_with_its_place_and_the_file_with_the_traceback(run, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN_ENV)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("envs", "show", "broken.py")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    raised = next(n for n, text in enumerate(BROKEN_ENV.splitlines(), 1) if "raise ZeroDivisionError" in text)
    assert f"error: {tmp_path}/broken.py, line {raised}: ZeroDivisionError: a mistake of the author" in line
    assert "mistake in envgym" not in line
    traceback = Path(re.search(r"traceback is in (\S+)\)", line).group(1))
    assert "in reset" in traceback.read_text()
    assert traceback.parent == tmp_path


def test_an_unexpected_error_is_one_line_that_names_the_file_with_the_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert report(IndexError("nobody expected this"), Invocation()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "unexpected IndexError: nobody expected this (a mistake in envgym; the traceback is in" in line


# -- what the commands do ---------------------------------------------------------------------------------


def test_config_gives_back_the_run_it_was_given(run, tmp_path):
    words = ["--env", "math_verify", "env.digits=3", "steps=7", "learner.lr=1e-5"]
    first = run("config", words[0], words[1], "seed=4", *words[2:])  # words stand anywhere
    assert first.returncode == 0, first.stderr
    config = yaml.safe_load(first.stdout)
    (stage,) = config["stages"]
    assert config["seed"] == 4
    assert (stage["env"]["name"], stage["env"]["digits"]) == ("math_verify", 3)
    assert (stage["steps"], stage["learner"]["lr"]) == (7, 1e-5)
    (tmp_path / "run.yaml").write_text(first.stdout)
    assert run("config", "--config", "run.yaml").stdout == first.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]  # nothing was started


def test_a_word_wins_over_an_option(run):
    shown = run("config", "--env", "math_verify", "--model", "one", "model=two").stdout
    assert yaml.safe_load(shown)["stages"][0]["model"] == "two"


def test_recipes_are_listed_with_what_they_are(run):
    result = run("config", "recipes")
    assert re.search(r"^grpo +\w", result.stdout, re.MULTILINE)


def test_envs_list_and_show(run):
    listed = run("envs", "list").stdout
    assert re.search(r"^math_verify-v0 +\w", listed, re.MULTILINE)
    assert [line for line in listed.splitlines() if not line.endswith(".")] == []  # whole sentences
    shown = run("envs", "show", "math_verify", "env.digits=1").stdout
    assert "env.digits=1" in shown
    assert "test tasks: 512" in shown or re.search(r"test tasks: \d+", shown)
    assert re.search(r"user: .*\d \+ \d", shown)


def test_runs_lists_newest_first_with_scores_and_unfinished_ones(run, tmp_path):
    assert run("runs").stdout == "no runs in runs\n"
    evaluation = {"score": 0.9, "ci95": [0.85, 0.95], "n_tasks": 10}
    for index, name in enumerate(("older", "killed")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
        os.utime(folder / "config.yaml", (index, index))
    (tmp_path / "runs" / "older" / "summary.json").write_text(
        json.dumps({"status": "completed", "steps": 60, "eval": {"before": evaluation, "after": evaluation}})
    )
    (tmp_path / "runs" / "killed" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    _, killed, older, _, hint = run("runs").stdout.splitlines()
    assert killed.split() == ["killed", "unfinished", "2"]
    assert hint == "resume with: envgym train --resume killed"
    assert older.split("  ")[0] == "older"
    assert older.count("0.900 [0.850, 0.950]") == 2


def test_a_run_that_goes_on_is_listed_with_its_place_and_stopped_there(run, tmp_path):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    assert "run runs/first is not running" in error_of(run("stop", "first"))
    assert "there is no run 'second'" in error_of(run("stop", "second"))
    asked = threading.Event()

    def until_asked():
        with folder_lock(folder, "envgym train"):
            begun.set()
            while not (folder / "stop").exists():
                time.sleep(0.01)
            asked.set()

    begun, thread = threading.Event(), threading.Thread(target=until_asked)
    thread.start()
    begun.wait()
    listed = run("runs").stdout.splitlines()[1]
    assert re.match(rf"first +runs on {socket.gethostname()} \(process {os.getpid()}\) since \d{{4}}-", listed)
    said = run("stop", "first").stdout
    assert asked.is_set()
    assert "it has stopped; resume it with: envgym train --resume runs/first" in said
    thread.join()


def test_runs_tells_of_the_stage_that_a_run_came_to(run, tmp_path):
    folder = tmp_path / "runs" / "stages"
    for number, (stage, steps, status) in enumerate([("1-sft", 3, "completed"), ("2-grpo", 2, "stopped")]):
        (folder / stage).mkdir(parents=True)
        metrics = folder / stage / "metrics.jsonl"
        metrics.write_text("".join(f'{{"step": {n}}}\n' for n in range(steps + 1)))
        os.utime(metrics, (number, number))
        (folder / stage / "summary.json").write_text(json.dumps({"status": status, "steps": steps}))
    (folder / "config.yaml").write_text("{}")
    assert run("runs").stdout.splitlines()[1].split() == ["stages", "stopped", "2"]
    (folder / "2-grpo" / "summary.json").unlink()  # as where it goes on, or was killed
    assert run("runs").stdout.splitlines()[1].split() == ["stages", "unfinished", "2"]


def test_serve_serves_until_ctrl_c(tmp_path, run):
    with subprocess.Popen(
        [ENVGYM, "serve", "math_verify", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            line = server.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", line).group()
            assert "user: " in run("envs", "show", url).stdout
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    "words", [("train", "--env"), ("eval", "--env", "math_verify", "--model"), ("train", "--resume"), ("view",)]
)
def test_a_name_that_is_too_long_for_a_file_names_none(run, words):
    message = f"envgym: error: there is no file '{'a' * 60}…': its name would be too long\n"
    result = run(*words, "a" * 300)
    assert (result.returncode, result.stderr.splitlines(keepends=True)[-1]) == (2, message)


# -- terminals, pipes and signals -------------------------------------------------------------------------


def test_a_full_disk_is_no_mistake_of_ours(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [ENVGYM, "config", "recipes"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "envgym: error: a file cannot be written: No space left on device\n")


@pytest.mark.parametrize("command", ["config --env math_verify", "envs try math_verify --task 0"])
def test_a_reader_that_has_enough_is_no_mistake(command, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody_reads:
        result = subprocess.run(
            [ENVGYM, *command.split()],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=nobody_reads,
            stderr=subprocess.PIPE,
        )
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_terminal_without_unicode_gets_the_help_all_the_same(start):
    result = start("--help", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_is_one_line_and_exit_130(tmp_path):
    """Interrupted while it waits for a server that accepts and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(30)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        program = subprocess.Popen([ENVGYM, "envs", "show", url], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()  # it is waiting now
        with connection:
            program.send_signal(signal.SIGINT)
            _, stderr = program.communicate(timeout=30)
    assert (program.returncode, stderr) == (130, "envgym: interrupted\n")


LEAVES = """
'''What it leaves is named by a variable.

It says nothing else.
'''
import asyncio, multiprocessing, os, subprocess, threading, time
import envgym, envgym.processes.shutdown, envgym.processes.cancellation

envgym.processes.cancellation.GRACE_SECONDS = envgym.processes.shutdown.PATIENCE_SECONDS = 0.1

async def deaf():
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            pass

class Leaves(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        match os.environ["LEAVES"]:
            case "processes":
                subprocess.Popen(["sleep", "1000"])
                subprocess.Popen("setsid sleep 1000 &", shell=True)
                multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
            case "thread":
                threading.Thread(target=time.sleep, args=(1000,), name="pump").start()
            case "task":
                self.task = asyncio.create_task(deaf())
            case "exit":
                raise SystemExit(0)
        return "Well?", {}

    async def step(self, action):
        return "", 0.0, True, False, {}
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("processes", 0, ""),
        ("thread", 0, "envgym: threads that do not end are abandoned: pump\n"),
        ("task", 0, ""),
        ("exit", 2, "envgym: error: the called code ended the program: SystemExit: 0 (LEAVES, line 30)\n"),
    ],
)
def test_nothing_that_an_environment_leaves_holds_the_end_up_or_outlives_it(start, tmp_path, what, status, said):
    file = tmp_path / "leaves.py"
    file.write_text(LEAVES)
    result = start("envs", "show", file, LEAVES=what, ENVGYM_TEST_MARK=str(tmp_path))
    assert (result.returncode, result.stderr) == (status, said.replace("LEAVES", str(file)))
    assert ("Well?" in result.stdout) == (status == 0)
    about = f"{file}  What it leaves is named by a variable.\n\nIt says nothing else.\ntrain tasks: no end\n"
    assert result.stdout.startswith(about)
    assert family(f"ENVGYM_TEST_MARK={tmp_path}") == []


# -- a run that is stopped --------------------------------------------------------------------------------


def family(mark: str) -> list[int]:
    """Processes that inherited `mark` in their environment: the program and all its descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sampling", "learning"])
def test_ctrl_c_keeps_a_checkpoint_leaves_no_process_and_can_be_resumed(tmp_path, tiny_model, run, moment):
    mark = f"ENVGYM_TEST_MARK={tmp_path}"
    words = ["steps=50", "rollout.tasks_per_step=8", "rollout.group_size=4", "rollout.max_tokens=16", "eval.every=0"]
    folder = tmp_path / "runs" / "first"
    with open(tmp_path / "stdout", "w") as stdout:
        program = subprocess.Popen(
            [ENVGYM, "train", "--env", "math_verify", "--model", tiny_model, "--name", "first", *words],
            cwd=tmp_path,
            env={**os.environ, "ENVGYM_TEST_MARK": str(tmp_path)},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
    if moment == "learning":  # a step's rollouts are written when it has sampled, and then it learns
        wait_for((folder / "rollouts" / "step_000002.parquet").exists)
    else:  # a step's metrics are written at its end, and then the next one samples
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    assert len(family(mark)) >= 3  # the controller, the engine and the actor
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=60)
    assert program.returncode == 130
    last = stderr.splitlines()[-1]
    assert last.startswith("envgym: interrupted: ")
    assert "Traceback" not in stderr
    assert re.search(r"envgym train --resume \S+", last)
    (kept,) = (folder / "checkpoints").glob("step_*")
    assert kept.name in last
    wait_for(lambda: not family(mark), 10)
    assert re.search(r"^first +stopped +\d", run("runs").stdout, re.MULTILINE)
    done = subprocess.run(
        [ENVGYM, "train", "--resume", "first"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [*range(51)]


@pytest.mark.slow
def test_ctrl_c_while_a_run_starts_ends_it_at_once(tmp_path, tiny_model):
    program = subprocess.Popen(
        [ENVGYM, "train", "--env", "math_verify", "--model", tiny_model, "--name", "first"],
        cwd=tmp_path,
        env={**os.environ, "ENVGYM_TEST_MARK": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((tmp_path / "runs" / "first" / "logs" / "engine.log").exists)
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=30)
    assert program.returncode == 130
    assert stderr == "envgym: interrupted: run first was stopped before its first step\n"
    wait_for(lambda: not family(f"ENVGYM_TEST_MARK={tmp_path}"), 10)
