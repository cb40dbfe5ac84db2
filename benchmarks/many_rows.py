"""Start and memory of a run with two million rows, relative to one with a hundred.

    .venv/bin/python benchmarks/many_rows.py [--rows 2000000] [--repeats 3]

The rows are questions and answers of some 236 bytes each in one JSONL file. `first` is the time of `load_tasks` in a
new process without an index of the file, `later` with the one that the first start has saved. Memory is that of the
controller, of the processes that read rows for it, and of two that roll out (`rollout.processes=2`) in a run of two
steps with the starter, a first start: their proportional set sizes, in which pages that several processes share are
divided among them, added at the same moment. The page has the largest sum and that of the last moment at which the
controller and both others run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

NAME = "many_rows"
FEW = 100
SHARDS = 2
LOOK_SECONDS = 0.2
"""Seconds between two looks at the processes' memory."""
COMMAND = [sys.executable, "-c", "import sys; from envgym.cli import main; sys.exit(main())"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(load_seconds(options.load))
        return
    where = conditions(["envgym"])
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for n_rows in (FEW, options.rows):
            path = Path(folder, f"{n_rows}.jsonl")
            write_rows(path, n_rows)
            cases.append({"rows": n_rows, "bytes": path.stat().st_size, **measured(path, options.repeats)})
            print(cases[-1], flush=True)
    result = {"conditions": where, "repeats": options.repeats, "cases": cases}
    publish(NAME, result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    few, many = result["cases"]
    rows = [
        [
            f"{case['rows']:,}",
            f"{case['bytes'] / 1e6:,.1f}",
            *(f"{case[name]:.1f}" for name in ("first", "later")),
            *(f"{case[name]:,.0f}" for name in ("largest", "last")),
        ]
        for case in (few, many)
    ]
    names = ("first", "later", "largest", "last")
    rows.append(["difference", "", *(f"{many[name] - few[name]:,.{int(name in names[:2])}f}" for name in names)])
    header = ["rows", "MB", "first start, s", "later starts, s", "memory at most, MiB", "memory at the end, MiB"]
    words = f"Starts: medians of {result['repeats']}. {conditions_in_words(result['conditions'])}"
    return f"{table(header, rows)}\n\n{words}"


def write_rows(path: Path, n_rows: int) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(n_rows):
            boxes, screws = rng.randrange(10**6), rng.randrange(10**6)
            question = (
                f"In a warehouse there are {boxes} boxes with {screws} screws each, and {number} more boxes without "
                "any. How many screws are there in all of these boxes? Give the number."
            )
            row = {"question": question, "answer": str(boxes * screws), "level": number % 5, "source": "made"}
            file.write(json.dumps(row) + "\n")


def load_seconds(path: str) -> float:
    from envgym.tasks import DataConfig, load_tasks

    began = time.perf_counter()
    load_tasks(DataConfig(path=path))
    return time.perf_counter() - began


def measured(path: Path, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"first": [], "later": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            environ = {**os.environ, "ENVGYM_CACHE": cache}
            for start in times:
                words = [sys.executable, __file__, "--load", str(path)]
                done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=900, check=True)
                times[start].append(float(done.stdout))
    return {name: median(seconds) for name, seconds in times.items()} | memory(path)


def memory(path: Path) -> dict[str, float]:
    """MiB of the controller and the processes of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "ENVGYM_CACHE": f"{folder}/cache"}
        words = [
            "train", "--env", "math_verify", f"data.path={path}", f"rollout.processes={SHARDS}", "steps=2",
            "rollout.tasks_per_step=8", "rollout.group_size=4", "eval.every=0",
        ]  # fmt: skip
        with Path(folder, "output").open("w+") as output:
            run = subprocess.Popen(
                COMMAND + words, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True
            )
            sums = []
            while run.poll() is None:
                pids = [run.pid, *children_of(run.pid)]
                sizes = [size for pid in pids if (size := set_size(pid))]
                sums.append((len(sizes), sum(sizes)))
                time.sleep(LOOK_SECONDS)
            if run.returncode:
                output.seek(0)
                raise SystemExit(output.read()[-3000:])
    return {"largest": max(size for _, size in sums), "last": [size for n, size in sums if n == SHARDS + 1][-1]}


def children_of(controller: int) -> list[int]:
    """The processes whose output goes to the logs of processes that read rows or roll out."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == controller and (folder / "fd" / "1").readlink().name.startswith(("rows-", "rollout-")):
                children.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return children


def set_size(pid: int) -> float:
    """MiB of a process's proportional set size; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


if __name__ == "__main__":
    main()
