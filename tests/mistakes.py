"""Deliberate mistakes: does the fast tier notice when a line of the product is wrong?

    .venv/bin/python tests/mistakes.py draw [--seed 0] [--count 40] [--since COMMIT]
    .venv/bin/python tests/mistakes.py run [--seed 0] [--count 40] [--since COMMIT] [--only 3,7]

Every place of the product that one of the operators below can change is a candidate, so that a file is drawn as often
as it is long: in Python, in the page's scripts, and in the YAML tables (recipes, suites, alarms, flags of OpenRLHF).
Each drawn mistake is made in a copy of the checkout, and the tests run until one fails: first those of the folder that
mirrors the file's, then those that name the file's folder, then all of the fast tier. With `--since` the candidates are
the lines that were written after a commit. What survives is printed as a diff. A mistake that changes nothing a user
could see (an equivalent) is argued by hand, and another is drawn in its place by a higher `--count`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("envgym", "envs", "agents", "learners")
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
"""The operators: each is replaced by its neighbour."""
Pattern = tuple[str, str, Callable[[re.Match[str]], str]]
IN_SCRIPTS: tuple[Pattern, ...] = (
    ("border", r"(?<= )[<>]=?(?= )", lambda match: match[0][0] if "=" in match[0] else f"{match[0]}="),
    ("equality", r"[!=]==", lambda match: ("!" if match[0][0] == "=" else "=") + "=="),
    ("and, or", r"&&|\|\|", lambda match: "||" if match[0] == "&&" else "&&"),
    ("sum", r"(?<= )[-+*/](?= )", lambda match: "-" if match[0] == "+" else "+"),
    ("condition left out", r"\bif \(", lambda match: "if (false && "),
    ("switch", r"\b(true|false)\b", lambda match: "false" if match[0] == "true" else "true"),
    ("number", r"(?<![\w.#$-])\d+(?![\w.%])", lambda match: str(int(match[0]) + 1)),
    ("returns nothing", r"\breturn (?=\S)", lambda match: "return void "),
)
IN_TABLES: tuple[Pattern, ...] = (
    ("number", r"(?<=[:,] )-?\d+(\.\d+)?(e[-+]?\d+)?(?=[],}]|$)", lambda match: repr(json.loads(match[0]) * 2 + 1)),
    ("switch", r"(?<=: )(true|false)(?=[],}]|$)", lambda match: "false" if match[0] == "true" else "true"),
    ("line left out", r"^ +[\w.+]+: [^|>&{\[].*$", lambda match: ""),
)
TEXTUAL = {".js": IN_SCRIPTS, ".yaml": IN_TABLES}
"""What is changed in files that are no Python, outside comments: its name, what it matches, what takes its place."""
SECONDS = 1800  # of one selection of tests


@dataclass(frozen=True)
class Mistake:
    path: Path
    line: int
    kind: str
    number: int
    """Which of the file's candidates it is."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}"


class Mutator(ast.NodeTransformer):
    """Visits a file's candidates in order; `chosen` is made a mistake, the others stay."""

    def __init__(self, chosen: int | None = None) -> None:
        self.found: list[tuple[int, str]] = []
        self.chosen = chosen

    def _is_chosen(self, node: ast.AST, kind: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), kind))
        return len(self.found) - 1 == self.chosen

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for at, operator in enumerate(node.ops):
            other = SWAPPED[type(operator)]
            if self._is_chosen(node, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[at] = other()  # type: ignore[call-overload]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, f"{type(node.op).__name__} -> {SWAPPED[type(node.op)].__name__}"):
            node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPPED.get(type(node.op))
        is_text = any(isinstance(side, ast.JoinedStr | ast.Constant) and isinstance(getattr(side, "value", ""), str)
                      for side in (node.left, node.right))  # fmt: skip
        if other and not is_text and self._is_chosen(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and self._is_chosen(node, "without not"):
            return node.operand
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        self.generic_visit(node)
        if self._is_chosen(node, "if False"):
            node.test = ast.Constant(False)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._is_chosen(node, f"{node.value} -> {node.value + 1}"):
            return ast.Constant(node.value + 1)
        if type(node.value) is bool and self._is_chosen(node, f"{node.value} -> {not node.value}"):
            return ast.Constant(not node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node  # a docstring
        self.generic_visit(node)
        return ast.Pass() if self._is_chosen(node, "call left out") else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        is_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        return ast.Return(None) if not is_none and self._is_chosen(node, "returns None") else node


def matches(path: Path, text: str) -> Iterator[tuple[int, str, int, int, str]]:
    """Where the operators for a file that is no Python match: line, kind, start, end, what takes its place."""
    start = 0
    for line, content in enumerate(text.splitlines(keepends=True), 1):
        if not content.strip().startswith(("#", "//", "*", "/*")):
            for kind, pattern, replace in TEXTUAL[path.suffix]:
                for match in re.finditer(pattern, content.rstrip("\n")):
                    yield line, kind, start + match.start(), start + match.end(), replace(match)
        start += len(content)


def changed(mistake: Mistake, text: str) -> tuple[str, str]:
    """A file's text before and after, as they are to be compared."""
    if mistake.path.suffix == ".py":
        tree = Mutator(mistake.number).visit(ast.parse(text))
        return ast.unparse(ast.parse(text)), ast.unparse(ast.fix_missing_locations(tree))
    _, _, start, end, instead = list(matches(mistake.path, text))[mistake.number]
    return text, text[:start] + instead + text[end:]


def candidates() -> Iterator[Mistake]:
    """Every place where a mistake can be made, file by file."""
    words = ["git", "ls-files", *FOLDERS]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in sorted(listed):
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or "templates" in path.parts:
            continue
        places: list[tuple[int, str]] = []
        if path.suffix == ".py":
            mutator = Mutator()
            mutator.visit(ast.parse(path.read_text()))
            places = mutator.found
        elif path.suffix in TEXTUAL:
            places = [(line, kind) for line, kind, *_ in matches(path, path.read_text())]
        for number, (line, kind) in enumerate(places):
            yield Mistake(Path(name), line, kind, number)


def lines_since(commit: str) -> set[tuple[Path, int]]:
    """The lines that were written after `commit`, by file and number."""
    words = ["git", "diff", "-U0", "--no-renames", "--dst-prefix=b/", commit, "--", *FOLDERS]
    lines, path = set(), Path()
    for line in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            path = Path(line.removeprefix("+++ b/"))
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines |= {(path, number) for number in range(first, first + count)}
    return lines


def drawn(seed: int, count: int, since: str | None) -> list[Mistake]:
    everything = list(candidates())
    if since is not None:
        lines = lines_since(since)
        everything = [mistake for mistake in everything if (mistake.path, mistake.line) in lines]
    return random.Random(seed).sample(everything, count)


def selections(mistake: Mistake) -> Iterator[list[str]]:
    """Tests to run until one fails, the likeliest first."""
    parts = mistake.path.parts
    below = parts[1:] if parts[0] == "envgym" else parts
    own = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(f"test_{mistake.path.stem}*.py")]
    folder = ROOT / "tests" / Path(*below[:-1])
    while not folder.is_dir():
        folder = folder.parent
    if own:
        yield own
    if folder != ROOT / "tests":
        yield [str(folder.relative_to(ROOT))]
    yield ["tests"]


def is_caught(mistake: Mistake, copy: Path) -> str | None:
    """The first test that fails, or None. The copy is as it was afterwards."""
    path = copy / mistake.path
    before = path.read_text()
    plain, after = changed(mistake, before)
    names = [str(mistake.path)] * 2
    diff = difflib.unified_diff(plain.splitlines(), after.splitlines(), *names, n=2, lineterm="")
    path.write_text(after)
    try:
        for selection in selections(mistake):
            words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *selection]
            environ = {**os.environ, "PYTHONPATH": str(copy)}
            try:
                run = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                return "hangs"
            if run.returncode == 1 or run.returncode == 2:
                failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0] if failed else run.stdout.strip()[-200:]
        print("\n".join(diff), flush=True)
        return None
    finally:
        path.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("draw", "run"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--since", metavar="COMMIT", help="draw from the lines that were written after this commit")
    parser.add_argument("--only", help="numbers of drawn mistakes, with commas")
    options = parser.parse_args()
    mistakes = list(enumerate(drawn(options.seed, options.count, options.since)))
    if options.only:
        wanted = {int(number) for number in options.only.split(",")}
        mistakes = [(number, mistake) for number, mistake in mistakes if number in wanted]
    if options.action == "draw":
        for number, mistake in mistakes:
            print(f"{number:3} {mistake}")
        return
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "*_cache"))
        egg = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
        subprocess.run(egg, cwd=copy, check=True)
        for number, mistake in mistakes:
            by = is_caught(mistake, copy)
            caught += by is not None
            print(f"{number:3} {mistake}: {by or 'SURVIVED'}", flush=True)
    print(f"{caught} of {len(mistakes)} caught")


if __name__ == "__main__":
    main()
