"""A run as one file that a browser opens from the disk: the page with its answers inside."""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import DataError

from .episodes import Listing, listing
from .server import PAGE, Answers, dumped

MODULES = ("api", "dom", "charts", "home", "run", "list", "episode", "lanes", "compare", "app")
"""The page's modules, each after those that it uses."""
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
ROWS = 2000
"""Episodes of a step that the file lists."""


def export(source: Path, out: Path, *, episodes: int, megabytes: float) -> tuple[int, int, int]:
    """Write the file and return its bytes, the number of episodes in it and the number there are.

    Of each step the best, the worst, those that failed and the most surprising come first. It stays below `megabytes`:
    episodes that go beyond are left out.
    """
    answers = Answers([source])
    if not answers.sources:
        raise DataError(f"{source} is no run, no evaluation and no file of episodes")
    held: dict[str, Any] = {}
    room, whole, kept = int(megabytes * 2**20) - 300_000, 0, 0  # the page itself, and what base64 adds, are below that

    def hold(path: str) -> bool:
        nonlocal room
        text = dumped(answers(path))
        size = len(gzip.compress(text.encode())) * 4 // 3
        if size > room:
            return False
        room -= size
        held[path] = text
        return True

    hold("index")
    wanted: list[list[str]] = []
    for name in answers.sources:
        hold(f"run|{name}")
        hold(f"metrics|{name}|0")
        for step in sorted(answers.sources[name].files()):
            found = listing(answers.sources[name], step)
            whole += len(found)
            hold(f"list|{name}|{step}|0|{ROWS}")
            hold(f"lanes|{name}|{step}")
            wanted.append([f"episode|{name}|{step}|{index}" for index in telling(found)])
    for path in in_turns(wanted, episodes):
        kept += hold(path)
    content = "{" + ",".join(f"{dumped(path)}:{text}" for path, text in held.items()) + "}"
    write_atomically(out, _page(source.name, content))
    return out.stat().st_size, kept, whole


def telling(found: Listing) -> Iterator[int]:
    """The numbers of a list's first episodes, the most telling first, in turns by why."""
    columns = found.slice(0, ROWS)
    numbers = range(len(columns["id"]))
    ways = [
        [n for n in numbers if columns["status"][n] == "failed"],
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: -columns["reward"][n]),
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: columns["reward"][n]),
        sorted((n for n in numbers if columns["surprise"][n] is not None), key=lambda n: -columns["surprise"][n]),
    ]
    seen: set[int] = set()
    for number in in_turns(ways, len(found) * 4):
        if number not in seen:
            seen.add(number)
            yield number


def in_turns(lists: list[list[Any]], most: int) -> Iterator[Any]:
    """The first of each list, then the second of each, and so on."""
    found = (one for places in itertools.zip_longest(*lists) for one in places if one is not None)
    return itertools.islice(found, most)


def _page(title: str, content: str) -> str:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = "".join((PAGE / name).read_text(encoding="utf-8") for name in ("uplot.css", "style.css"))
    script = "".join(IMPORT.sub("", (PAGE / f"{name}.js").read_text(encoding="utf-8")) for name in MODULES)
    script = re.sub(r"^export ", "", script, flags=re.MULTILINE)
    charts = (PAGE / "uplot.js").read_text(encoding="utf-8")
    packed = base64.b64encode(gzip.compress(content.encode())).decode()
    body = page[page.index("<body>") : page.index("</body>")]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{style}</style>{body}"
        f"<script type='text/plain' id='held'>{packed}</script>"
        f"<script>{charts}</script><script type=module>{script}</script></body>"
    )
