"""What tests of learners share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _beside(name: str) -> ModuleType:
    """The module `name` of this folder, which tests may import from then on."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


_beside("scored_rows")


@pytest.fixture(scope="session")
def papers() -> ModuleType:
    """The formulas as the papers write them (`papers.py`)."""
    return _beside("papers")
