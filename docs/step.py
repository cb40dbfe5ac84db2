"""Write `reference/step.md`: the files that a training step passes, in their order, from a trace of a real step.

python docs/step.py             write the page
python docs/step.py --print     print it
python docs/step.py --pairs     print the pairs of files with the most moves between them
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from envgym.env.spec import first_sentence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "step.md"
SOURCES = ("envgym", "envs", "agents", "learners")
STEP = 3
"""The step that is traced. The first ones also look at the first answers, and the last one saves the model."""
JOB = (
    "train", "--env", "math_verify", "--name", "traced", "debug=true", f"steps={STEP + 1}", "eval.every=0",
    "rollout.tasks_per_step=4", "rollout.group_size=4",
)  # fmt: skip
TIMERS = ("envgym/processes/watch.py",)
"""Files that run by the clock, whatever the step does."""
HEAD = """# The files that a step passes

For a reader who wants to follow one training step through the code: every file whose functions it runs, in the order in
which it reaches them. The step is one of `math_verify` with the starter, 4 tasks × 4 episodes, everything in one
process (`debug=true`), with vLLM and DeepSpeed. [GRPO on one page](../../examples/grpo_in_one_file.py) is the same
algorithm without the rest.

**The step passes {files} files. There are {moves:,} moves between files, {room_moves:,} of them between rooms.** A move
leads from one called function to the next one, on the same thread, if that is in another file. A room is a folder of
`envgym/` or of `envs/`, or `agents/`, or `learners/`; the files directly in `envgym/` are one room. Written by
`python docs/step.py` from a trace; the numbers of moves differ a little from one trace to another.

| | file | its subject | moves to it |
|--:|---|---|--:|
"""


class Trace:
    """The files of `SOURCES` whose functions run while `is_on`, in order, and the moves from one to another."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: dict[str, None] = {}
        self.moves: Counter[tuple[str, str]] = Counter()
        self._last: dict[int, str] = {}
        """The file of the last call, by thread."""
        self._file_of_code: dict[Any, str | None] = {}
        self._starts = tuple(f"{ROOT / folder}{os.sep}" for folder in SOURCES)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Python calls this at each call of a function, and each time that a coroutine or generator continues."""
        if event != "call" or not self.is_on or (file := self._file(frame)) is None:
            return
        self.files.setdefault(file)
        previous = self._last.get(thread := threading.get_ident(), file)
        self._last[thread] = file
        if previous != file:
            self.moves[previous, file] += 1

    def _file(self, frame: FrameType) -> str | None:
        """The file of a frame's function, relative to the repository; None if it is of another package."""
        code = frame.f_code
        if code not in self._file_of_code:
            path = os.path.realpath(code.co_filename)
            is_ours = path.startswith(self._starts) and code.co_name != "<module>"
            file = str(Path(path).relative_to(ROOT)) if is_ours else None
            self._file_of_code[code] = None if file in TIMERS else file
        return self._file_of_code[code]


def trace_step() -> Trace:
    """Train for a few steps, and trace one of them, from its first task to the new weights in the engine."""
    from envgym.cli import main
    from envgym.training.trainer import Trainer

    trace, take_step = Trace(), Trainer.take_step

    async def traced(trainer: Trainer) -> None:
        trace.is_on = trainer.progress.step + 1 == STEP
        sys.setprofile(trace.note if trace.is_on else None)
        await take_step(trainer)
        trace.is_on = False

    threading.setprofile(trace.note)  # threads may start before the step
    Trainer.take_step = traced  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        status = main(list(JOB))
        os.chdir(ROOT)
    if status:
        raise SystemExit(f"the run ended with status {status}")
    return trace


def page(trace: Trace) -> str:
    """The text of the page."""
    room_moves = sum(count for (previous, file), count in trace.moves.items() if room(previous) != room(file))
    visits: Counter[str] = Counter()
    for (_, file), count in trace.moves.items():
        visits[file] += count
    rows = [
        f"| {number} | [`{file}`](../../{file}) | {subject(file)} | {visits[file]:,} |"
        for number, file in enumerate(trace.files, 1)
    ]
    head = HEAD.format(files=len(rows), moves=trace.moves.total(), room_moves=room_moves)
    return head + "\n".join(rows) + "\n"


def subject(file: str) -> str:
    """The first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or "")


def room(file: str) -> str:
    """The room of a file: its folder in `envgym/` or `envs/`, `agents`, `learners`, or `envgym` for a file there."""
    first, second, *deeper = Path(file).parts
    if first == "envgym":
        return second if deeper else first
    return f"{first}/{Path(second).stem}" if first == "envs" else first


def pairs(trace: Trace) -> str:
    """The pairs of files with the most moves, one per line."""
    return "\n".join(f"{count:6} {previous} -> {file}" for (previous, file), count in trace.moves.most_common(60))


if __name__ == "__main__":
    traced_step = trace_step()
    if "--pairs" in sys.argv:
        print(pairs(traced_step))
    elif "--print" in sys.argv:
        print(page(traced_step), end="")
    else:
        PAGE.write_text(page(traced_step), encoding="utf-8")
