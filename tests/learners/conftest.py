"""What tests of learners share."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def papers() -> ModuleType:
    """The formulas as the papers write them (`papers.py`)."""
    spec = importlib.util.spec_from_file_location("papers", Path(__file__).with_name("papers.py"))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    import sys

    sys.modules["papers"] = module
    spec.loader.exec_module(module)
    return module
