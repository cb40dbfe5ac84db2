"""`envgym model`: make a model from a recipe that makes one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from envgym.errors import NameNotFound, did_you_mean

from .failures import Invocation
from .parser import Parser


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "model",
        "NAME",
        "Make a model from a recipe and print its folder. It is kept: the next one to ask finds it made.",
        "envgym model starter",
    )
    parser.add_argument("name", metavar="NAME", help="recipe that makes a model, such as starter")
    options, words = parser.parse_with_words(arguments)
    if [word for word in words if word != "debug=true"]:
        parser.error(f"a model is made as its recipe says: leave out {words[0]}")

    from envgym.recipes import makes_model, recipe_names

    makers = [name for name in recipe_names() if makes_model(name)]
    if options.name not in makers:
        near = did_you_mean(options.name, makers) or f" There is {', '.join(makers)}."
        raise NameNotFound(f"no recipe {options.name!r} that makes a model.{near}")

    from envgym.display import open_display
    from envgym.models import make_model

    display = open_display()
    try:
        path = asyncio.run(make_model(options.name, display))
    finally:
        display.close()
    print(path)
    return 0
