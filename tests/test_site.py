"""The documentation's site: the navigation lists every page, and what `make docs` builds is complete in itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
GROUPS = {
    "Get started": "get_started",
    "Tutorials": "tutorials",
    "Environments": "environments",
    "Training": "training",
    "Evaluation": "evaluation",
    "Scale": "scale",
    "Trust": "",
    "Reference": "reference",
}


def navigation() -> list[dict]:
    return tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]


def pages_of(entry: str | list | dict) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(inner)


def test_the_navigation_lists_every_page_once():
    assert sorted(pages_of(navigation())) == sorted(PAGES)


def test_a_page_is_in_the_group_of_its_folder():
    home, *groups = navigation()
    assert home == {"Home": "index.md"}
    folders = {
        title: {Path(page).parent.name for page in pages_of(pages)}
        for group in groups
        for title, pages in group.items()
    }
    assert folders == {title: {folder} for title, folder in GROUPS.items()}


def test_the_home_page_leads_to_every_page():
    links = set(re.findall(r"\]\(([\w/]+\.md)", (DOCS / "index.md").read_text()))
    assert links == PAGES - {"index.md"}


class Page(HTMLParser):
    """The addresses and anchors of a page of the site."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.parts: set[str] = set()
        """Addresses of what the page itself loads: styles, scripts, fonts, pictures, frames."""
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.anchors.add(values["id"])
        addresses = {values[name] for name in ("href", "src", "srcset", "data") if name in values}
        (self.links if tag == "a" else self.parts).update(addresses)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly from a copy of the pages and the settings."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    build = re.search(r"^docs:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run([sys.executable, *build[1].split()], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "No issues found\n"
    return folder / "site"


@pytest.fixture(scope="module")
def built(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_the_site_has_the_pages_and_nothing_else_of_the_folder(site, built):
    assert {str(path.relative_to(site).with_suffix(".md")) for path in built} == PAGES | {"404.md"}
    assert {path.suffix for path in site.rglob("*.*")} & {".py", ".md", ".toml"} == set()
    assert "sampling" in (site / "search.json").read_text()


def test_no_link_of_the_site_is_dead(site, built):
    dead = []
    for path, page in built.items():
        for address in page.links | page.parts:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            folder = site if parts.path.startswith("/") else path.parent  # the page for missing ones is absolute
            target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and target.is_relative_to(site)
            if not there or (parts.fragment and unquote(parts.fragment) not in built[target].anchors):
                dead.append((path.name, address))
    assert dead == []


def test_no_page_loads_anything_from_elsewhere(site, built):
    elsewhere = {address for page in built.values() for address in page.parts if urlsplit(address).netloc}
    assert elsewhere == set()
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()[\"']?\s*(?:https?:)?//[^)\"']*", style.read_text()) == []
    for path in built:
        assert re.findall(r"(?:@import|url\()[\"']?\s*(?:https?:)?//[^)\"']*", path.read_text()) == []


def test_markdown_is_shown_as_hosts_of_repositories_show_it(site):
    """No list, table or fence is left as text, and no backslash before the bar of a table's code."""
    for path in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        paragraphs = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
        assert [p for p in paragraphs if re.search(r"^(- |\d+\. |\||```)", p, re.MULTILINE)] == [], path.name
        assert "\\|" not in text
        assert not re.search(r"<thead>(\s|</?t[rh][^>]*>)*</thead>", text)
    assert "<code>auto | float32 | bfloat16 | float16</code>" in (site / "reference" / "settings.html").read_text()
    guess = (site / "environments" / "environments.html").read_text()
    assert "<span><code>examples/guess.py</code></span>" in guess
