"""Runs in notebooks, by the real kernel, and in asynchronous programs."""

import asyncio
import os
import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envgym
from envgym.cli import main
from envgym.view.notebook import ShownEpisode

CELL = """
import envgym, sys, time
import asyncio

class Up(envgym.Env):
    '''Say something.'''
    seconds = 0.0
    async def reset(self, *, seed=None, options=None):
        return "Say something.", {}
    async def step(self, action):
        await asyncio.sleep(self.seconds)
        return None, float(len(action.text) > 2), True, False, {}

@envgym.reward
def exact(completion, answer):
    return float(completion == answer)

rows = [{"question": f"What is {a} + 1?", "answer": str(a + 1)} for a in range(20)]
settings = {
    "engine.kind": "transformers", "debug": True, "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 2},
    "eval": {"tasks": 2, "samples": 1, "every": 0}, "learner.lr": 1e-3, "model": MODEL,
}
"""


def test_a_strangers_episode_runs_no_script():
    bad = '"><script>window.owned=1</script>'
    row = {"ids": [bad, bad], "texts": None, "logprobs": [None, -0.5], "advantages": None}
    shown = ShownEpisode({"rows": [row]}, bad, bad, 0.0, None)._repr_html_()
    assert "<script" not in shown
    assert shown.count("&quot;&gt;&lt;script&gt;") >= 4
    assert 'title="token &quot;&gt;&lt;script' in shown


class Cells:
    """A kernel, as a notebook starts it, in the folder `path`."""

    def __init__(self, path):
        manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
        self.manager = manager
        manager.start_kernel(cwd=str(path), env={**os.environ, "IPYTHONDIR": str(path / "ipython")})
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, source, interrupt_at=(), seconds=240):
        """The output of a cell: texts, HTML and its error. It is interrupted as each text of `interrupt_at` appears."""
        request, output, left = self.client.execute(source), "", list(interrupt_at)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if left and left[0] in output:
                del left[0]
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            output += content.get("text", "") + "".join(content.get("data", {}).values())
            output += f"{content['ename']}: {content['evalue']}" if message["msg_type"] == "error" else ""
            if content.get("execution_state") == "idle":
                return output
        pytest.fail(f"the cell still runs after {seconds} s: {output}")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    yield from started_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def kernel_to_end(tmp_path):
    yield from started_kernel(tmp_path)


def started_kernel(folder):
    cells = Cells(folder)
    yield cells
    cells.client.stop_channels()
    cells.manager.shutdown_kernel(now=True)


def begin(kernel, folder, model):
    """The kernel, in this folder, once it has run the first cell."""
    folder = f"import os\nos.chdir({str(folder)!r})\n"
    assert kernel.run(folder + CELL.replace("MODEL", repr(str(model)))) == ""
    return kernel


@pytest.fixture
def cells(kernel, tmp_path, tiny_model):
    """The kernel of all tests, in a folder of the test's."""
    return begin(kernel, tmp_path, tiny_model)


def test_a_notebook_trains_on_what_its_cells_define_and_shows_the_result(cells, tmp_path):
    output = cells.run('result = envgym.train(settings, env=Up, steps=2, name="first")\nresult')
    assert "step 1/2" in output
    assert "completed: 2 steps" in output
    assert "<table><tr><th" in output
    assert "data:image/png;base64," in output
    assert "class Up(envgym.Env)" in (tmp_path / "runs" / "first" / "cells.py").read_text()
    output = cells.run("result.episode(1)")
    assert "Say something." in re.sub("<[^>]*>", "", output)
    assert "advantage " in output

    again = cells.run('envgym.train(settings, env=Up, steps=2, name="first")')
    assert "run folder runs/first exists: choose another --name, or resume" in again
    assert "completed: 3 steps" in cells.run('envgym.train(resume="first", steps=3, debug=True)')
    assert "leave out env=…" in cells.run('envgym.train(resume="first", env=Up)')

    output = cells.run("envgym.evaluate(settings, env=exact, data=rows)")
    assert "EvalResult(" in output
    assert "<pre>environment" in output
    output = cells.run(
        "class Own(envgym.Learner):\n    def prepare(self, groups): ...\n    def loss(self, *inputs): ...\n"
        "envgym.train(settings, env=Up, learner=Own, steps=1, debug=False)"
    )
    assert "ConfigError: learner Own is defined in a notebook or an interactive session" in output


def test_the_first_interrupt_saves_a_checkpoint_and_the_second_ends_the_run(cells):
    cells.run("Up.seconds = 0.1")
    output = cells.run('envgym.train(settings, env=Up, steps=500, name="a")', interrupt_at=["step  "])
    assert "stopping after this step's work; once more to stop immediately" in output
    assert "KeyboardInterrupt: checkpoint runs/a/checkpoints/step_0" in output
    cells.run("Up.seconds = 100.0")
    start = time.monotonic()
    train = 'envgym.train(settings, env=Up, steps=500, name="b")'
    output = cells.run(train, interrupt_at=["loading the actor", "stopping after"])
    assert "KeyboardInterrupt: " in output
    assert time.monotonic() - start < 60
    assert "1\n" in cells.run("print(1)")


def test_a_call_that_blocks_the_loop_is_interrupted(cells):
    source = "async def step(self, action):\n    print('blocks')\n    while True: time.sleep(0.01)\nUp.step = step\n"
    output = cells.run(f'{source}envgym.train(settings, env=Up, steps=5, name="a")', interrupt_at=["blocks", "blocks"])
    assert "KeyboardInterrupt" in output
    assert "1\n" in cells.run("print(1)")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["restart", "kill"])
def test_a_kernel_that_is_restarted_or_killed_leaves_no_process(kernel_to_end, tmp_path, tiny_model, ending):
    cells = begin(kernel_to_end, tmp_path, tiny_model)
    pid = cells.manager.provisioner.process.pid
    train = "import threading\nwork = dict(settings, debug=False)\n"
    cells.client.execute(f'{train}envgym.train(work, env=exact, data=rows, steps=5000, name="a")')
    deadline = time.monotonic() + 120
    while len(descendants(pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(5)
    family = descendants(pid)
    if ending == "restart":
        cells.manager.restart_kernel()
    else:
        os.kill(pid, 9)
    deadline = time.monotonic() + 30
    while running := [child for child in family if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, running
        time.sleep(0.5)


def descendants(pid):
    """The processes that a process has started, and that they have, without those that have ended."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    parents = {
        int(line.split()[0]): int(line.split()[1]) for line in listing.splitlines() if "Z" not in line.split()[2]
    }
    found = {pid}
    for _ in parents:
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


class Once(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    async def step(self, action):
        return None, 1.0, True, False, {}


def test_an_asynchronous_program_trains_evaluates_and_checks(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {
        "engine.kind": "transformers", "debug": True, "eval": {"tasks": 2, "samples": 1, "every": 0},
        "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 2}, "model": str(tiny_model),
    }  # fmt: skip

    async def program():
        run = envgym.train(settings, env=Once, steps=1, quiet=True)
        in_thread = await asyncio.to_thread(envgym.train, settings, env=Once, steps=1, quiet=True)
        result = envgym.evaluate(settings, env=Once, quiet=True)
        words = [f"{key}={value}" for key, value in settings.items() if "." in key or key == "debug"]
        words += ["--env", f"{__file__}:Once", "--model", str(tiny_model), "rollout.max_tokens=2"]
        status = main(["rollout", "--out", "o.jsonl", "--tasks", "0:4", *words])
        return run.steps, in_thread.steps, result.score, status, main(["envs", "check", f"{__file__}:Once"])

    assert asyncio.run(program())[:4] == (1, 1, 1.0, 0)
    assert "Once" in capsys.readouterr().out


def test_an_error_of_the_run_is_raised_in_the_cell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def program():
        envgym.train(env=Once, model="nowhere/at/all", quiet=True)

    with pytest.raises(envgym.EnvgymError, match="model folder nowhere/at/all does not exist"):
        asyncio.run(program())


def test_the_display_of_results_imports_nothing_heavy():
    code = "import envgym.view.notebook, sys; print({'torch', 'IPython', 'matplotlib', 'pyarrow'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
