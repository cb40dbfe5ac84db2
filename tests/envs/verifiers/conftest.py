"""The real verifiers, and small environments on its SDK (`environments`), which are on the path as modules."""

import os
import tempfile
from pathlib import Path

import pytest

import envgym
from envgym.envs.verifiers import VerifiersAgent

ENVIRONMENTS = Path(__file__).with_name("environments")


@pytest.fixture(autouse=True)
def temporary(verifiers_package, tmp_path, monkeypatch):
    """The folder of temporary files; the home folder is one too."""
    for name, folder in {"TMPDIR": tmp_path / "temporary", "HOME": tmp_path / "home"}.items():
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path = [str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path / "temporary"


@pytest.fixture
def specify(verifiers_package):
    """`specify(name, **settings)`: the environment of verifiers."""
    return lambda name, **settings: envgym.spec(f"verifiers:{name}", python=verifiers_package[0], **settings)


@pytest.fixture
def roll_out(specify, renderer, roll_out_tasks):
    """`roll_out(name, engine, places, …)`: an episode of each task at these places of the taskset."""

    def roll_out(name, engine, places=(0,), *, context=512, max_tokens=128, agent=None, **settings):
        spec = specify(name, test_fraction=0, **settings)
        player = VerifiersAgent(renderer, VerifiersAgent.Config(**(agent or {})))
        return roll_out_tasks(spec, player, engine, places, context=context, max_tokens=max_tokens)

    return roll_out
