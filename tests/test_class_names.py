"""A class name means one thing in the tree."""

import ast
from collections import defaultdict

from tests.test_layering import LINKED, ROOT, sources

TEMPLATES = ROOT / "envgym" / "cli" / "envs" / "templates"
"""Files of a user's own package, which `envgym envs new` writes one at a time."""


def test_no_two_classes_have_the_same_name():
    places = defaultdict(list)
    for path in (path for folder in ("envgym", *LINKED) for path in sources(folder)):
        if TEMPLATES in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}
