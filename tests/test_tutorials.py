"""The tutorials are notebooks that run: their pages show what is stored in them, which comes from a run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = {"goes_wrong"}
"""Run by the fast tests; the others take minutes."""


def script():
    spec = importlib.util.spec_from_file_location("tutorials", FOLDER.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_shows_its_notebook(path):
    text, pictures = script().page(json.loads(path.read_text()), path.stem)
    advice = f"write it again: python docs/tutorials.py --pages {path.stem}"
    assert path.with_suffix(".md").read_text() == text, advice
    assert {file.name: file.read_bytes() for file in FOLDER.glob(f"{path.stem}_[0-9]*.png")} == pictures, advice


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_was_run_in_order(path):
    notebook = json.loads(path.read_text())
    cells = code_of(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    assert notebook["metadata"]["envgym"]["seconds"] > 0
    assert not re.search(r"Traceback|/tmp/|/home/|/root/", json.dumps([cell["outputs"] for cell in cells]))
    assert "a pretrained model and a GPU" in path.with_suffix(".md").read_text()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path", [path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)  # fmt: skip
def test_a_notebook_runs(path, tmp_path):
    """In an empty folder, to its end. Its numbers depend on the machine."""
    pytest.importorskip("jupyter_client")
    stored = json.loads(path.read_text())
    run = script().run(stored, tmp_path)
    kinds = [
        [sorted({output["output_type"] for output in cell["outputs"]}) for cell in code_of(n)] for n in (run, stored)
    ]
    assert kinds[0] == kinds[1]


def test_a_cell_that_fails_ends_the_run_with_its_traceback(tmp_path):
    pytest.importorskip("jupyter_client")
    cell = {"cell_type": "code", "source": ["1 / 0"], "metadata": {}, "outputs": [], "execution_count": None}
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        script().run({"cells": [cell], "metadata": {}}, tmp_path)


def test_output_is_stored_as_a_reader_sees_it(tmp_path):
    pytest.importorskip("jupyter_client")
    source = "import os\nprint('\\x1b[31mred\\x1b[0m')\nprint('10%\\r20%')\nprint(os.getcwd() + '/file')\n2 + 2"
    cell = {"cell_type": "code", "source": [source], "metadata": {}, "outputs": [], "execution_count": None}
    run = script().run({"cells": [cell], "metadata": {}}, tmp_path)
    text, _ = script().page(run, "any")
    assert text == f"```python\n{source}\n```\n\n```text\nred\n20%\nfile\n```\n\n```text\n4\n```\n"
    shutil.rmtree(tmp_path / ".ipython", ignore_errors=True)
