"""Calls across processes are made on the worker's class, which type checkers can follow."""

import ast
import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.processes.runtime import InlineRuntime, message_of

ROOT = Path(__file__).parents[2]
CALLS = {"call", "run", "send", "load", "on_all", "on_first", "on_each"}


def text_named_calls(tree):
    """Line and method of the calls that name a method as text: `handle.call("method", …)`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CALLS
            and node.args
        ):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"_*[a-z]\w*", name):  # `DELETE` is one of HTTP
                yield node.lineno, name


@pytest.mark.parametrize(
    ("line", "names"),
    [('handle.call("add", 1)', ["add"]), ("handle.call(lambda w: w.add(1))", []), ('api.call("DELETE", "/x")', [])],
)
def test_the_reader_of_calls_sees_them(line, names):
    assert [name for _, name in text_named_calls(ast.parse(line))] == names


def test_no_method_of_a_worker_is_called_by_its_name():
    found = {
        (str(path.relative_to(ROOT)), *call)
        for folder in ("envgym", "envs", "agents", "learners", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if "templates" not in path.parts
        for call in text_named_calls(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_a_call_is_evaluated_at_once():
    """It runs later, when the loop's variable has another value."""
    assert message_of(lambda worker: worker.add(2, b=3)) == ("add", (2,), {"b": 3})

    async def main():
        value = await InlineRuntime().start("builtins:list", {}, name="list")
        await asyncio.gather(*[value.run(lambda value: value.append(number)) for number in range(3)])
        return await value.run(lambda value: value.copy())

    assert asyncio.run(main()) == [0, 1, 2]


CHANGES = [
    ("envgym/workers/export.py", "def send_nccl(self)", "def send_by_nccl(self)", "training/weight_sync.py"),
    ("envgym/services/reward_worker.py", "address: str | None)", "address: int)", "services/reward.py"),
    ("envgym/env/host.py", "async def setup(", "def setup(", "env/in_processes.py"),
    ("envgym/engines/transformers.py", "async def can_read(", "async def is_readable(", "engines/transformers.py"),
    ("envgym/training/weight_sync.py", 'rank.offload(role == "actor")', "rank.offload(role)",
     "training/weight_sync.py"),
    ("envgym/training/checkpoints.py", "rank.load_state(", "rank.load_states(", "training/checkpoints.py"),
    ("envgym/training/weight_sync.py", "engine.end_weights(n_buckets, version))\n        check_arrival(",
     "engine.end_weights(n_buckets, version, 1))\n        check_arrival(", "training/weight_sync.py"),
]  # fmt: skip
"""What is changed on one side, and the file that does not fit then."""


@pytest.mark.slow
def test_the_type_checker_compares_both_sides(tmp_path):
    pytest.importorskip("mypy")
    for folder in ("envgym", "envs", "agents", "learners"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, old, new, _ in CHANGES:
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert old in text, (file, old)
        (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    wrong = {line.partition(":")[0] for line in output.splitlines() if ": error:" in line}
    assert {f"envgym/{file}" for *_, file in CHANGES} <= wrong, output
