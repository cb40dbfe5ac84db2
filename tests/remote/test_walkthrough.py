"""The walk-through of docs/environments/remote.md, in two processes and two folders that stand for two machines."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "environments" / "remote.md").read_text()
BIN = Path(sys.executable).parent


def lines(where: str) -> list[str]:
    """The commands that the page has run on one of the machines."""
    blocks = re.findall(rf"^```sh\n# {where}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return "".join(blocks).splitlines()


@pytest.fixture
def machines(tmp_path) -> Iterator[tuple[dict[str, Path], str]]:
    """The folders of both, with what the page copies, while the server runs; and the port that stands for its 8000."""
    folders = {name: tmp_path / name for name in ("env-box", "trainer")}
    for folder in folders.values():
        folder.mkdir()
    [block] = re.findall(r"^```python\n(# secret_number.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (folders["env-box"] / "secret_number.py").write_text(block)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    *prepare, serve = [here(line, port) for line in lines("on env-box")]
    for line in prepare:
        run(line, folders["env-box"])
    log = (folders["env-box"] / "log").open("w")
    server = subprocess.Popen(
        f"exec {serve}", shell=True, cwd=folders["env-box"], env=environment(tmp_path), stdout=subprocess.PIPE,
        stderr=log, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "serving" in server.stdout.readline()
        for name in ("token", "cert.pem"):
            run(f"cp -p {folders['env-box'] / name} .", folders["trainer"])
        yield folders, port
    finally:
        server.terminate()
        assert server.wait(40) == 0


def here(line: str, port: str) -> str:
    """A line of the page with this machine in place of `env-box`."""
    return line.replace("env-box", "localhost").replace("8000", port).replace("0.0.0.0", "127.0.0.1")


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(home / "config")}


def run(line: str, folder: Path) -> str:
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment(folder.parent), capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_what_is_served_is_registered_and_shown_from_another_folder(machines):
    folders, port = machines
    add, show, _, remove = [here(line, port) for line in lines("where the policy is trained")]
    assert "added secret in" in run(add, folders["trainer"])
    assert "Guess my number" in run(show, folders["trainer"])
    assert "removed secret" in run(remove, folders["trainer"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_walk_through_trains_and_its_token_is_nowhere_else(machines, tiny_model):
    folders, port = machines
    token = (folders["trainer"] / "token").read_text().strip()
    short = f" --model {tiny_model} steps=1 rollout.tasks_per_step=4 rollout.group_size=2 rollout.max_tokens=8"
    short += " eval.tasks=4"
    for line in lines("where the policy is trained"):
        run(here(line, port) + (short if " train " in line else ""), folders["trainer"])
    run_folder = folders["trainer"] / "runs" / "remote"
    assert '"status": "completed"' in (run_folder / "summary.json").read_text()
    written = [path for path in folders["trainer"].parent.rglob("*") if path.is_file() and path.name != "token"]
    assert run_folder / "summary.json" in written
    assert [path for path in written if token.encode() in path.read_bytes()] == []
