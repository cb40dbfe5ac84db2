"""Duration of `import envgym` and `envgym --help`, relative to a Python that does nothing.

    .venv/bin/python benchmarks/startup.py [--repeats 21]

A start-up time depends on the machine, its ratio to `python -c pass` on the same machine much less: compare the ratios.
The three commands alternate, so that a slow minute slows all three; the result of each is its median after one
unmeasured round, which leaves byte code and pages in the cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from record import conditions, conditions_in_words, publish, table

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import envgym": [sys.executable, "-c", "import envgym"],
    "envgym --help": [str(Path(sys.executable).with_name("envgym")), "--help"],
}
BASE = "python -c pass"


def seconds(command: list[str]) -> float:
    """Run `command` and return its wall-clock seconds, from the start of its process to its exit."""
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=True)
    return time.perf_counter() - began


def measure(repeats: int) -> dict[str, Any]:
    """Time every command `repeats` times in turn: median, quartiles, and median over the bare interpreter's."""
    for command in COMMANDS.values():
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    base = median(times[BASE])
    return {
        name: {
            "seconds": round(median(taken), 4),
            "quartiles": [round(q, 4) for q in quantiles(taken, n=4)[::2]],
            "ratio": round(median(taken) / base, 2),
        }
        for name, taken in times.items()
    }


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the table of the docs."""
    return table(
        ["command", "seconds (median)", "quartiles", "ratio to `python -c pass`"],
        [
            [f"`{name}`", f"{row['seconds']:.3f}", "{:.3f} to {:.3f}".format(*row["quartiles"]), f"{row['ratio']:.2f}"]
            for name, row in result["commands"].items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    where = conditions(["envgym"])
    result = {"conditions": where, "repeats": repeats, "commands": measure(repeats)}
    publish("startup", result, f"{markdown(result)}\n\nMedian of {repeats}. {conditions_in_words(where)}")


if __name__ == "__main__":
    main()
