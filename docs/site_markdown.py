"""Markdown of the pages as the site needs it, where that differs from what hosts of repositories show.

- A link to a source file becomes its text: the site has the pages and their pictures only.
- `\\|` in code of a table becomes `|`: hosts of repositories need the backslash, and do not show it.
- A table whose header is empty has none: hosts of repositories need one.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

SITE_SUFFIXES = {".md", ".png"}
"""Of the files that the site has."""


class Site(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(SiteTree(md), "site", 5)  # after the inline patterns, which make links and code


class SiteTree(Treeprocessor):
    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            if leaves_site(link.get("href", "")):
                link.tag = "span"
                del link.attrib["href"]
        for cell in [*root.iter("td"), *root.iter("th")]:
            for code in cell.iter("code"):
                code.text = AtomicString((code.text or "").replace("\\|", "|"))
        for table in root.iter("table"):
            header = table.find("thead")
            if header is not None and not "".join(header.itertext()).strip():
                table.remove(header)


def leaves_site(address: str) -> bool:
    """Whether an address is that of a file or folder of the repository which is not on the site."""
    parts = urlsplit(address)
    return bool(not parts.scheme and parts.path and PurePosixPath(parts.path).suffix not in SITE_SUFFIXES)


def makeExtension(**settings: object) -> Site:
    return Site(**settings)
