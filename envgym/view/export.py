"""A run as one file that a browser opens from the disk: the page with its answers inside."""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from envgym.disk import write_atomically
from envgym.errors import ConfigError, DataError, EnvgymError, reported_as

from .server import PAGE, Answers, dumped

MODULES = ("api", "dom", "plot", "charts", "home", "run", "list", "episode", "lanes", "compare", "app")
"""The page's modules, each after those that it uses."""
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
ROWS = 2000
"""Episodes of a step that the file lists."""
MARK = "<meta name=generator content=envgym>"
"""Mark in the beginning of a file that was written here."""


class Held(NamedTuple):
    """Content of a file of `bytes`: episodes with their tokens, steps with their lists, each of how many, and the
    sources of which something is `unread`."""

    bytes: int
    episodes: int
    of_episodes: int
    steps: int
    of_steps: int
    unread: list[str]


def is_export(path: Path) -> bool:
    """Tell whether the file was written by `export`."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.read(200)


def export(source: Path, out: Path, *, episodes: int, megabytes: float) -> Held:
    """Write the file.

    Of each step the best, the worst, those that failed and the most surprising come first. It stays below `megabytes`:
    lists of the newest steps take half of that, then come episodes, then older lists, and what goes beyond is left
    out. In place of what cannot be read stands the reason, as the server answers it. Raises `DataError` where no source
    can be read, `ConfigError` where the page with its curves alone goes beyond, or `out` cannot be written.
    """
    answers = Answers([source])
    if not answers.sources:
        raise DataError(f"{source} is no run, no evaluation and no file of episodes")
    held: dict[str, str] = {}
    unread: dict[str, str] = {}
    room = int(megabytes * 2**20) - 300_000  # the page itself, and what base64 adds, are below that

    def ask(path: str) -> Any:
        try:
            return answers(path)
        except EnvgymError as error:
            unread[path] = str(error)
            return {"error": str(error)}

    def hold(path: str, answer: Any, leave: int = 0) -> bool:
        nonlocal room
        text = dumped(answer)
        size = len(gzip.compress(text.encode())) * 4 // 3
        if size > room - leave:
            return False
        room -= size
        held[path] = text
        return path not in unread

    lines = answers("index")
    curves: dict[str, Any] = {"index": lines}
    steps: list[tuple[str, int]] = []
    for line in lines:
        questions = f"run|{line['id']}", f"metrics|{line['id']}|0"
        if line.get("why"):
            continue
        answered = {path: ask(path) for path in questions}
        if reasons := [unread[path] for path in questions if path in unread]:
            line |= {"state": "unreadable", "why": reasons[0]}
        else:
            curves |= answered
            steps += [(line["id"], step) for step in reversed(answered[questions[0]]["steps"])]
    if len(curves) == 1:
        raise DataError(lines[0]["why"])
    if not all(hold(path, answer) for path, answer in curves.items()):
        raise ConfigError(
            f"--megabytes {megabytes:g} is too little for the page and its curves: give more, or leave it out"
        )
    leave, whole, wanted, older = room // 2, 0, [], []
    for name, step in steps:
        path = f"list|{name}|{step}|0|{ROWS}"
        answer = ask(path)
        whole += answer.get("total", 0)
        if hold(path, answer, leave):
            hold(f"lanes|{name}|{step}", ask(f"lanes|{name}|{step}"), leave)
            wanted.append([f"episode|{name}|{step}|{index}" for index in telling(answer["columns"])])
        elif path not in unread:
            older.append(path)
    kept = sum(hold(path, ask(path)) for path in itertools.islice(in_turns(wanted), episodes))
    lists = len(wanted) + sum(hold(path, ask(path)) for path in older)
    content = "{" + ",".join(f"{dumped(path)}:{text}" for path, text in held.items()) + "}"
    with reported_as(ConfigError, f"--out {out} cannot be written"):
        write_atomically(out, _page(source.name, content))
    names = {line["id"] for line in lines if line.get("why")} | {path.split("|")[1] for path in unread}
    return Held(out.stat().st_size, kept, whole, lists, len(steps), sorted(names))


def telling(columns: dict[str, Any]) -> Iterable[int]:
    """The numbers of a list's episodes, the most telling first, in turns by why."""
    numbers = range(len(columns["id"]))
    ways = [
        [n for n in numbers if columns["status"][n] == "failed"],
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: -columns["reward"][n]),
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: columns["reward"][n]),
        sorted((n for n in numbers if columns["surprise"][n] is not None), key=lambda n: -columns["surprise"][n]),
    ]
    return dict.fromkeys(in_turns(ways))


def in_turns(lists: list[list[Any]]) -> Iterator[Any]:
    """The first of each list, then the second of each, and so on."""
    return (one for places in itertools.zip_longest(*lists) for one in places if one is not None)


def _page(title: str, content: str) -> str:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = "".join(IMPORT.sub("", (PAGE / f"{name}.js").read_text(encoding="utf-8")) for name in MODULES)
    script = re.sub(r"^export ", "", script, flags=re.MULTILINE)
    packed = base64.b64encode(gzip.compress(content.encode())).decode()
    body = page[page.index("<body>") : page.index("</body>")]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>{MARK}<meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{style}</style>{body}"
        f"<script type='text/plain' id='held'>{packed}</script>"
        f"<script type=module>{script}</script></body>"
    )
