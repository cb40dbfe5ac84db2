"""Runs the notebooks of `docs/tutorials`, stores their outputs in them, and writes each as a page of the site.

python docs/tutorials.py [NAME ...]    # run them, all without a name, and write their pages
python docs/tutorials.py --pages       # write the pages of what is stored
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tutorials"
SECONDS = 1200
"""Maximum time of a cell, on a busy machine."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")
Notebook = dict[str, Any]


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def run(notebook: Notebook, folder: Path) -> Notebook:
    """The notebook with the outputs of its cells, which a new kernel in `folder` runs. Raises `RuntimeError` with the
    traceback of a cell that fails."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    settings = {"IPYTHONDIR": str(folder / ".ipython"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    manager.start_kernel(cwd=str(folder), env={**os.environ, **settings})
    client = manager.blocking_client()
    client.start_channels()
    start, cells, count = time.monotonic(), list[dict[str, Any]](), 0
    try:
        client.wait_for_ready(timeout=60)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell = {**cell, "execution_count": count, "outputs": _outputs(client, "".join(cell["source"]), folder)}
            cells.append(cell)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    metadata = {**notebook["metadata"], "envgym": {"seconds": round(time.monotonic() - start)}}
    return {**notebook, "metadata": metadata, "cells": cells}


def _outputs(client: Any, source: str, folder: Path) -> list[dict[str, Any]]:
    """The outputs of a cell, in the notebook format; its streams joined, without colours and overwritten lines."""
    messages: list[dict[str, Any]] = []
    client.execute_interactive(source, allow_stdin=False, timeout=SECONDS, output_hook=messages.append)
    outputs: list[dict[str, Any]] = []
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "error":
            raise RuntimeError(f"{source}\n" + _COLOUR.sub("", "\n".join(content["traceback"])))
        if kind == "stream" and content["name"] == "stdout":
            if not (outputs and outputs[-1]["output_type"] == "stream"):
                outputs.append({"output_type": "stream", "name": "stdout", "text": ""})
            outputs[-1]["text"] += content["text"]
        elif kind in ("execute_result", "display_data"):
            count = {"execution_count": content["execution_count"]} if kind == "execute_result" else {}
            outputs.append({"output_type": kind, "data": content["data"], "metadata": {}, **count})
    for output in outputs:
        if output["output_type"] == "stream":
            lines = _COLOUR.sub("", output["text"]).replace(str(folder) + "/", "").split("\n")
            output["text"] = _lines("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page(notebook: Notebook, name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by file name. A cell `%%writefile FILE` is the file's block, and one
    of commands (`!envgym …`) a block of the shell."""
    pictures: dict[str, bytes] = {}

    def as_file(match: re.Match[str]) -> str:
        file = f"{name}_{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode(match[1])
        return file

    parts = list[str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source.startswith("!"):
            parts.append("```bash\n" + re.sub(r"^!", "", source, flags=re.MULTILINE) + "\n```")
        else:
            parts.append("```python\n" + re.sub(r"\A%%writefile ", "# ", source) + "\n```")
        parts += [_PICTURE.sub(as_file, shown) for shown in _shown(cell["outputs"]) if shown]
    return "\n\n".join(parts) + "\n", pictures


def _shown(outputs: list[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"])}">'
        elif "text/html" in data:
            html = "".join(data["text/html"])
            yield html if html.startswith("<") and "\n\n" not in html else f"<div>{html}</div>".replace("\n\n", "\n")
        else:
            text = "".join(output.get("text") or data.get("text/plain", "")).rstrip()
            if text and not text.startswith("Writing "):
                yield f"```text\n{text}\n```"


def write_page(path: Path) -> None:
    text, pictures = page(json.loads(path.read_text()), path.stem)
    for old in FOLDER.glob(f"{path.stem}_[0-9]*.png"):
        old.unlink()
    path.with_suffix(".md").write_text(text)
    for file, content in pictures.items():
        (FOLDER / file).write_bytes(content)


def main() -> None:
    names = [word for word in sys.argv[1:] if word != "--pages"]
    for path in notebooks():
        if names and path.stem not in names:
            continue
        if "--pages" not in sys.argv:
            with tempfile.TemporaryDirectory() as folder:
                notebook = run(json.loads(path.read_text()), Path(folder))
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
            print(path.name, notebook["metadata"]["envgym"])
        write_page(path)


if __name__ == "__main__":
    main()
