"""The page on settings says what the code does."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def settings():
    path = Path(__file__).parents[2] / "docs" / "settings.py"
    spec = importlib.util.spec_from_file_location("settings_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(settings):
    return settings.page()


def test_the_page_is_what_the_code_says(settings, page):
    assert settings.PAGE.read_text() == page, "write it anew: python docs/settings.py"


def test_every_setting_has_a_meaning(page):
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


def test_what_is_no_entry_point_has_its_settings_there_too(page):
    assert "## Environment of a reward function\n" in page
    assert "| `env.processes` | `int` | `0` | Call the function" in page
    assert "| `env.reconnect` | `float` | `30` | Seconds" in page


def test_keys_types_and_defaults_are_as_users_write_them(page):
    assert "| `learner.lr` | `float` | `1e-06` | Peak learning rate. (`learning_rate`, " in page
    assert "| `engine.dtype` | `auto \\| float32 \\| bfloat16 \\| float16` | `auto` |" in page
    assert "| `rollout.filter.zero_variance` | `bool` | `false` |" in page
    assert "| `learner.betas` | `tuple[float, float]` | `[0.9, 0.95]` |" in page
