"""The project's words: names are nouns and verbs of the field, and sentences use the glossary's terms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("envgym", "envs", "agents", "learners") for path in (ROOT / folder).rglob("*.py"))
SOURCES = [path for path in SOURCES if path.resolve() == path]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})

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
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Why"}

PHRASES = {
    r"\b(paid|pays?|earn(s|ed|ing)?)\b(?! 20\.)": "reward, is rewarded, gets a reward of",
    r"(?<!\.)\b(teach(es)?|taught)\b": "train on",
    r"\blearn(s|ed)? from\b": "train on",
    r"\b(in play|beside each other)\b": "concurrent, in flight",
    r"\bplay(s|ed)? again\b": "retry",
    r"\b(go|goes|going|went) on\b": "resume, continue",
    r"\bfor good\b": "permanently",
    r"\bpassed over\b": "skipped",
    r"\bas (it|they) stands?\b": "unmodified",
    r"\bof ours\b": "of envgym's, or another noun",
    r"\bmend(s|ed|ing)?\b": "fix, recover",
    r"\b(tasks|episodes|steps|tokens|seconds|rows)"
    r" an? (step|task|second|token|episode|run|rank|turn|group|rollout)\b": "per",
    r"\b(likeliest|commonest)\b": "most likely, most common",
    r"\bshare (rows|layers)\b": "sequence parallelism, tensor parallelism",
}
"""Phrases that no page, docstring, comment or message may have, and what the field says instead."""


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


def questions(source: str) -> list[str]:
    """Docstrings that begin with a question word."""
    texts = (
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return [f"{line}: {text[:40]}" for line, text in texts if re.split(r"\W", text)[0] in QUESTIONS]


def prose(source: str) -> str:
    """The texts and comments of Python code."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return "\n".join([*(text for text in texts if isinstance(text, str)), *comments])


def phrases(text: str) -> list[str]:
    """The phrases of `PHRASES` in a text, code in backticks left aside, each with what to write instead."""
    text = re.sub(r"`[^`\n]*`", "", text)
    return [f"{match[0]!r} -> {better}" for pattern, better in PHRASES.items() for match in re.finditer(pattern, text)]


def test_the_rules_find_what_they_are_for() -> None:
    assert empty_names("def told(x):\n    found_rows = self.kept = x\n    mask = x") == [
        "1: told",
        "2: found_rows",
        "2: kept",
    ]
    assert questions('def f():\n    """What it is."""') == ["2: What it is."]
    assert prose("x = 'a'  # b") == "a\n# b"
    assert phrases("the task is paid `paid` 1 tokens a second") == [
        "'paid' -> reward, is rewarded, gets a reward of", "'tokens a second' -> per",
    ]  # fmt: skip


def test_code_names_things_and_uses_the_terms_of_the_field() -> None:
    problems = {}
    for path in SOURCES:
        source, name = path.read_text(), str(path.relative_to(ROOT))
        names = [line for line in empty_names(source) if line.split()[1] not in EXCEPTIONS.get(name, ())]
        problems[name] = names + questions(source) + phrases(prose(source))
    assert {name: lines for name, lines in problems.items() if lines} == {}


def test_pages_use_the_terms_of_the_field() -> None:
    texts = {
        str(path.relative_to(ROOT)): re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S) for path in PAGES
    }
    assert {name: phrases(text) for name, text in texts.items() if phrases(text)} == {}
