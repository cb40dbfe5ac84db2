"""The names that `import envgym` offers."""

import subprocess
import sys

import pytest

import envgym

PROGRAM = """
import envgym, importlib, pkgutil
before = {name: getattr(envgym, name) for name in envgym.__all__}
for module in pkgutil.iter_modules(envgym.__path__):
    importlib.import_module(f"envgym.{module.name}")
changed = [name for name, value in before.items() if getattr(envgym, name) is not value]
assert not changed, changed
"""


def test_names_stay_what_they_are_once_every_module_is_imported():
    """A sub-package of the same name would take a function's place when it is imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = envgym.no_such_name
