"""Names are nouns and verbs of the field. Sentences have no test: they are judged by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("envgym", "envs", "agents", "learners") for path in (ROOT / folder).rglob("*.py"))
SOURCES = [path for path in SOURCES if path.resolve() == path]

EMPTY_NAMES = frozenset(
    """
about above accepted added after again against alike all alone also always among another answered any anyone
anything apart around as aside asked at away back before began begun behind below beside better beyond both by deep
different done down due during each early either else empty ended enough equal even ever every everything far few
fewer fitting following for foreign found free fresh from full further gathered given gone grown had half has hear
heard held here how if in inside instead is it its itself judged just kept known larger largest late later least
less like likeliest likely listed little long longer lost lower made many may meant meanwhile more most moved much
must named near nearest needed never newest no nobody none not nothing now of off older oldest on once one ones only
opened other others otherwise ours out outside over own paid past picked played posed possible prepared present
quick reached real refused rest round running said same seen several shown silent single slow small smallest so some
something spare spared spent still such sure taken taught that their theirs them then there these they things this
those through tied till to together told too twice under unlike unseen until up used usual wanted was went what when
where whether which while who whole whom whose with without written wrong yes yet
""".split()  # noqa: SIM905
)
"""Words that may not be a name by themselves: they point at a thing, and do not say what it is."""
EMPTY_BEGINNINGS = ("found_", "own_", "kept_", "given_", "what_", "where_", "one_", "said_", "made_", "still_")
EXCEPTIONS = {
    "envgym/config/schema.py": {"every"},
    "envgym/remote/wire.py": {"about"},
    "envgym/tools/mcp_server.py": {"only"},
    "envs/openrlhf/package.py": {"given_answer"},
}
"""Keys of settings and of the wire, which stay, and a parameter of another program's function."""


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that code binds: variables, attributes, parameters, functions and classes, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def empty_names(source: str) -> list[str]:
    names = ((name.strip("_"), line) for name, line in bindings(ast.parse(source)) if not name.startswith("__"))
    return [f"{line}: {name}" for name, line in names if name in EMPTY_NAMES or name.startswith(EMPTY_BEGINNINGS)]


def test_the_rule_finds_empty_names() -> None:
    assert empty_names("def told(x):\n    found_rows = self.kept = x\n    mask = x") == [
        "1: told",
        "2: found_rows",
        "2: kept",
    ]


def test_names_say_what_they_name() -> None:
    problems = {}
    for path in SOURCES:
        file = str(path.relative_to(ROOT))
        names = empty_names(path.read_text())
        problems[file] = [line for line in names if line.split()[1] not in EXCEPTIONS.get(file, ())]
    assert {file: lines for file, lines in problems.items() if lines} == {}
