"""The pictures in the documentation are made by a script, of runs that it trains."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def script():
    spec = importlib.util.spec_from_file_location("view_pictures", DOCS / "view_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_the_pictures_are_drawn_and_each_is_in_the_docs(tmp_path, browser):
    """The script itself, with two steps in place of sixty."""
    from PIL import Image

    pictures = script()
    pictures.train(tmp_path, 2, tasks=4)
    (tmp_path / "out").mkdir()
    pictures.draw(browser, tmp_path, 2, tmp_path / "out")
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(pictures.VIEWS)
    text = (DOCS / "training" / "viewer.md").read_text()
    for name in pictures.VIEWS:
        assert f"({name}.png)" in text
        with Image.open(tmp_path / "out" / f"{name}.png") as new, Image.open(DOCS / "training" / f"{name}.png") as old:
            assert new.size == old.size == (1200, 760)
            assert len(new.convert("RGB").getcolors(2**20)) > 50  # something is drawn
