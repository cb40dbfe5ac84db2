"""The CPU set-up's torchvision, whose only build on PyPI is for CUDA, and the mend with which it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MEND = Path(__file__).parents[1] / "requirements" / "mend_torchvision.py"
TRANSFORM = """
import torch, torchvision.transforms.v2.functional as functional
assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
import transformers.image_processing_utils
"""


@pytest.fixture
def copy(tmp_path):
    """(a copy of torchvision as pip installs it, the environment variables under which it is imported)."""
    installed = Path(find_spec("torchvision").origin).parent
    folder = tmp_path / "torchvision"
    folder.mkdir()
    for path in installed.iterdir():
        if path.name not in ("extension.py", "__pycache__"):
            (folder / path.name).symlink_to(path)
    text = (installed / "extension.py").read_text()
    (folder / "extension.py").write_text(text.partition("\n\n# Added by envgym")[0])
    for name in ("__init__.py", "_internally_replaced_utils.py"):  # which look beside themselves
        (folder / name).unlink()
        (folder / name).write_text((installed / name).read_text())
    return folder, {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(environ, *words):
    return subprocess.run([sys.executable, *map(str, words)], env=environ, capture_output=True, text=True, check=False)


def test_it_is_mended_once(copy):
    folder, environ = copy
    if run(environ, "-c", "import torchvision").returncode == 0:
        pytest.skip("this torchvision has its operators")
    done = run(environ, MEND)
    assert done.returncode == 0, done.stderr
    file = folder / "extension.py"
    assert done.stdout == (
        f"torchvision has no operators for a CPU: two are declared in {file}, so that it can be imported\n"
    )
    done = run(environ, "-c", TRANSFORM)
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    assert run(environ, MEND).stdout == ""
    assert file.read_text() == text


def test_another_error_is_left_to_the_reader(copy):
    folder, environ = copy
    (folder / "extension.py").write_text("raise ImportError('a broken disk')\n")
    done = run(environ, MEND)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "torchvision cannot be imported: ImportError: a broken disk\n"


def test_the_one_installed_is_imported():
    done = run(os.environ, "-c", TRANSFORM)
    assert done.returncode == 0, done.stderr
