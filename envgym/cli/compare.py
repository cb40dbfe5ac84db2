"""`envgym compare`: one evaluation against another, on the tasks they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import Invocation
from .parser import Parser

if TYPE_CHECKING:
    from envgym.evaluation.compare import Comparison

SHOWN_FLIPS = 5
"""Number of flipped tasks to name per environment and direction."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Compare two evaluations task by task: the score difference B - A, its confidence, and the tasks that flipped.

    usage: A B [--fail-below X] [--json]
    example: envgym compare evals/before evals/after --fail-below -0.01
    """
    parser = Parser("compare", main)
    parser.add_argument("a", metavar="A", help="baseline evaluation: its name or folder")
    parser.add_argument("b", metavar="B", help="candidate evaluation: its name or folder")
    parser.add_argument("--fail-below", type=float, metavar="X", help="exit with 1 if the difference is below X")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options, evals_dir = parser.parse_with_folder(arguments, "evals_dir")

    from envgym.evaluation.compare import compare
    from envgym.jobs.folder import find_folder

    comparison = compare(find_folder(options.a, evals_dir), find_folder(options.b, evals_dir))
    bound, suite = options.fail_below, comparison.suite
    passed = bound is None or (suite is not None and suite["difference"] >= bound)
    gate = [] if bound is None else [("gate", f"{'passed: not' if passed else 'failed:'} below {bound:g}")]
    if suite is None and bound is not None:
        gate = [("gate", "failed: there is no difference of the whole")]
    print(json.dumps(comparison.as_dict(), indent=2) if options.json else _text(comparison, gate))
    return 0 if passed else 1


def _text(comparison: Comparison, gate: Sequence[tuple[str, str]]) -> str:
    from envgym.monitoring.report import aligned

    header = ["environment", "difference", "p", "better", "worse", "equal", "detectable"]
    rows = [[name, *_cells(env.paired.as_dict())] for name, env in comparison.envs.items()]
    table = aligned([header, *rows], right=True)
    flipped = [f"{name}: {text}" for name, env in comparison.envs.items() for text in _flipped(env.flips)]
    summary = [("A", comparison.a), ("B", comparison.b)]
    if (suite := comparison.suite) is None:
        summary.append(("difference", f"none of the whole: {', '.join(comparison.unpaired)} cannot be compared"))
    else:
        size = f"{suite['n_tasks']} pairs"
        summary.append(("difference", f"{_difference(suite)}   B less A, 95% interval, {size}"))
        summary.append(("p", _p(suite["p_value"])))
        if suite["detectable"] is not None:
            summary.append(("detectable", f"{_detectable(suite)}   found four times in five, were it there"))
    notes = aligned([("note", note) for note in comparison.notes]) if comparison.notes else ""
    return "\n\n".join(filter(None, [notes, table, "\n".join(flipped), aligned([*summary, *gate])]))


def _cells(paired: dict[str, Any]) -> list[str]:
    counts = [str(paired[name]) for name in ("better", "worse", "equal")]
    return [_difference(paired), _p(paired["p_value"]), *counts, _detectable(paired)]


def _detectable(paired: dict[str, Any]) -> str:
    """The detectable difference; ">1" if it is above 1, the maximum difference of two scores."""
    if paired["detectable"] is None:
        return ""
    return f"{paired['detectable']:.3f}" if paired["detectable"] <= 1 else ">1"


def _difference(paired: dict[str, Any]) -> str:
    if paired["ci95"] is None:
        return f"{paired['difference']:+.3f}"
    low, high = paired["ci95"]
    return f"{paired['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _flipped(flips: Sequence[Any]) -> list[str]:
    """A line on the tasks that flipped to done, and one on those that flipped back."""
    lines = []
    for word, sign in (("now done", 1), ("no longer done", -1)):
        if tasks := list(dict.fromkeys(flip.task for flip in flips if (flip.b - flip.a) * sign > 0)):
            ellipsis = f" and {len(tasks) - SHOWN_FLIPS} more" if len(tasks) > SHOWN_FLIPS else ""
            lines.append(f"{len(tasks)} {word}: {', '.join(tasks[:SHOWN_FLIPS])}{ellipsis}")
    return lines
