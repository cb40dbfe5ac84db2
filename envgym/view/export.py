"""A run as one self-contained HTML file: the page with its data."""

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
from envgym.images import RECORDED

from .server import PAGE, Answers, to_json

MODULES = ("api", "dom", "plot", "charts", "home", "run", "overlay", "list", "episode", "lanes", "compare", "app")
"""The page's modules, in import order."""
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
ROWS = 2000
"""Maximum number of listed episodes per step."""
MARK = "<meta name=generator content=envgym>"
"""Mark at the beginning of an exported file."""


class Exported(NamedTuple):
    """What an exported file holds: its size in `bytes`, and how many of all episodes and of all steps' lists. `unread`
    names the sources that could not be read completely."""

    bytes: int
    episodes: int
    all_episodes: int
    steps: int
    all_steps: int
    unread: list[str]


def is_export(path: Path) -> bool:
    """True if the file was written by `export`."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.read(200)


def export(source: Path, path: Path, *, episodes: int, megabytes: float) -> Exported:
    """Write the file, smaller than `megabytes`.

    The lists of the newest steps come first and take up to half of that. Then come up to `episodes` episodes: of each
    step the failed, best, worst and most surprising ones first. Then come their images, and older lists; what does not
    fit is omitted. An error message takes the place of data that cannot be read. Raises `DataError` if no source can be
    read, and `ConfigError` if the page with its curves alone is too large, or `path` cannot be written.
    """
    answers = Answers([source])
    if not answers.sources:
        raise DataError(f"{source} is not a run, an evaluation or a file of episodes")
    stored: dict[str, str] = {}
    unread: dict[str, str] = {}
    bytes_left = int(megabytes * 2**20) - 300_000  # reserved for the page itself and base64

    def ask(key: str) -> Any:
        try:
            return answers(key)
        except EnvgymError as error:
            unread[key] = str(error)
            return {"error": str(error)}

    def store(key: str, answer: Any, reserve: int = 0) -> bool:
        nonlocal bytes_left
        text = to_json(answer)
        size = len(gzip.compress(text.encode())) * 4 // 3
        if size > bytes_left - reserve:
            return False
        bytes_left -= size
        stored[key] = text
        return key not in unread

    lines = answers("index")
    curves: dict[str, Any] = {"index": lines}
    steps: list[tuple[str, int]] = []
    for line in lines:
        questions = f"run|{line['id']}", f"metrics|{line['id']}|0"
        if line.get("why"):
            continue
        responses = {key: ask(key) for key in questions}
        if reasons := [unread[key] for key in questions if key in unread]:
            line |= {"state": "unreadable", "why": reasons[0]}
        else:
            responses[questions[0]]["logs"] = []  # they name the machine, which is nobody else's business
            curves |= responses
            steps += [(line["id"], step) for step in reversed(responses[questions[0]]["steps"])]
    if len(curves) == 1:
        raise DataError(lines[0]["why"])
    if not all(store(key, answer) for key, answer in curves.items()):
        raise ConfigError(
            f"--megabytes {megabytes:g} is too little for the page and its curves: set a larger size, or omit it"
        )
    reserve, n_episodes, questions_by_step, older_lists = bytes_left // 2, 0, [], []
    for name, step in steps:
        key = f"list|{name}|{step}|0|{ROWS}"
        answer = ask(key)
        n_episodes += answer.get("total", 0)
        if store(key, answer, reserve):
            store(f"lanes|{name}|{step}", ask(f"lanes|{name}|{step}"), reserve)
            questions_by_step.append([f"episode|{name}|{step}|{index}" for index in selection_order(answer["columns"])])
        elif key not in unread:
            older_lists.append(key)
    n_stored = sum(store(key, ask(key)) for key in itertools.islice(interleave(questions_by_step), episodes))
    records = [(key.split("|")[1], text) for key, text in stored.items() if key.startswith("episode|")]
    for image in dict.fromkeys(f"image|{name}|{image}" for name, text in records for image in RECORDED.findall(text)):
        if not store(image, ask(image)) and image not in unread:
            break  # the file is full
    lists = len(questions_by_step) + sum(store(key, ask(key)) for key in older_lists)
    content = "{" + ",".join(f"{to_json(key)}:{text}" for key, text in stored.items()) + "}"
    with reported_as(ConfigError, f"--out {path} cannot be written"):
        write_atomically(path, _page(source.name, content))
    names = {line["id"] for line in lines if line.get("why")} | {key.split("|")[1] for key in unread}
    return Exported(path.stat().st_size, n_stored, n_episodes, lists, len(steps), sorted(names))


def selection_order(columns: dict[str, Any]) -> Iterable[int]:
    """The indices of a list's episodes: failed, best, worst and most surprising ones, interleaved."""
    numbers = range(len(columns["id"]))
    orders = [
        [n for n in numbers if columns["status"][n] == "failed"],
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: -columns["reward"][n]),
        sorted((n for n in numbers if columns["reward"][n] is not None), key=lambda n: columns["reward"][n]),
        sorted((n for n in numbers if columns["surprise"][n] is not None), key=lambda n: -columns["surprise"][n]),
    ]
    return dict.fromkeys(interleave(orders))


def interleave(lists: list[list[Any]]) -> Iterator[Any]:
    """The first of each list, then the second of each, and so on."""
    return (item for items in itertools.zip_longest(*lists) for item in items if item is not None)


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
