"""The README's commands, in a fresh clone, with the installation that `make demo` makes and an empty cache."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SHORTER = {
    "train": ["steps=1", "rollout.tasks_per_step=4", "rollout.group_size=2", "eval.tasks=4"],
    "eval": ["eval.tasks=4"],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(the clone, the environment variables, the seconds that `make demo` took)."""
    folder = tmp_path_factory.mktemp("fresh")
    clone = folder / "envgym"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["ENVGYM_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    done = subprocess.run(["make", "demo"], cwd=clone, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return clone, environ, time.monotonic() - began


def test_the_first_command_of_the_readme(demo, store):
    clone, _, seconds = demo
    [folder] = (clone / "runs").glob("math_verify-*")
    summary = json.loads((folder / "summary.json").read_text())
    store("fresh_clone", seconds=seconds, run_seconds=summary["seconds"], eval=summary["eval"])
    assert seconds < 720
    assert summary["eval"]["after"]["score"] >= 0.9


def test_all_commands_of_the_readme_run_in_order_after_the_first(demo):
    clone, environ, _ = demo
    environ = {**environ, "PATH": f"{clone / '.venv' / 'bin'}:{environ['PATH']}"}
    [model] = (clone / "runs").glob("math_verify-*")
    run_in_order((clone / "README.md").read_text(), clone, environ, model=str(model))


def run_in_order(readme: str, folder: Path, environ: dict[str, str], *, model: str) -> None:
    """Run the page's commands of envgym one after the other in `folder`, in a short form, with the files it shows."""
    for name, block in re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(block)
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    text = "".join(re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("envgym ")]
    assert len(commands) >= 7
    servers = []
    try:
        for command in commands:
            words = [word.replace("8000", port).replace("path/or/hub-id", model) for word in command]
            words += SHORTER.get(words[1], [])
            if words[1] == "serve":
                servers.append(subprocess.Popen(words, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True))
                assert port in servers[-1].stdout.readline()
                continue
            done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=20)
