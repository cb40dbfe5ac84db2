"""The reference pages hold everything that the code has."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import envgym
from envgym.envs.foreign import FAILURES as FAILURES_OF_PROGRAMS
from envgym.remote.transport import ERROR_KINDS
from envgym.rollout.episode import FAILURES
from envgym.types.episodes import Limit

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
COMPUTED = {
    ("envgym/engines/vllm_images.py", "FAILURE"): {"images"},
    ("envgym/jobs/score.py", "RECORDING"): {"recording"},
    ("envgym/processes/runtime.py", "message"): set(),  # rebuilds an error of another process
    ("envgym/remote/transport.py", "ERROR_KINDS.get(problem.kind, 'refused')"): {*ERROR_KINDS.values(), "refused"},
    ("envgym/remote/transport.py", "kind"): {"connection", "server"},
    ("envgym/remote/transport.py", "problem.failure"): set(),  # the served environment's own
    ("envgym/rollout/episode.py", "error.kind"): set(),  # of an `InvalidOutcome`
    ("envgym/rollout/episode.py", "kind"): set(FAILURES.values()),
    ("envgym/sandbox/sandbox.py", "KIND"): {"sandbox"},
    ("envs/foreign/__init__.py", "kind"): set(FAILURES_OF_PROGRAMS),
    ("envs/openenv/protocol.py", "kind"): {"connection", "refused", "capacity", "server"},
    ("envs/openenv/protocol.py", "kinds[error['code']]"): {"capacity", "session_lost", "server"},
    ("envs/nemo_gym/client.py", "kind"): {
        "server_unreachable", "server_lost", "server_timeout", "server_protocol", "agent", "model_server",
    },
    ("envs/nemo_gym/protocol.py", "kind"): {"masked"},
}  # fmt: skip
"""The kinds that a call may give which does not name its kind as a text: its file and argument, and the kinds."""
CALLS = re.compile(r"InvalidOutcome|RemoteError|outcome|(\w+\.)?Outcome\.fail")
"""Calls that make the kind of a failure; in `net/client.py` a variable holds the class."""


@pytest.fixture(scope="module")
def references():
    spec = importlib.util.spec_from_file_location("references_page", ROOT / "docs" / "references.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli", "python_api", "recipe_table"])
def test_a_page_is_what_the_code_says(references, name):
    text = (REFERENCE / f"{name}.md").read_text()
    assert text == getattr(references, name)(), "write it again: python docs/references.py"


def test_the_page_on_python_has_every_public_name(references):
    names = [name for names in references.SECTIONS.values() for name in names]
    assert sorted([*names, "__version__"]) == sorted(envgym.__all__)
    assert "- `async step(action: Action) -> StepResult`: Answer one action" in references.python_api()


def test_the_page_on_commands_has_options_of_every_kind(references):
    page = references.cli()
    assert "## `envgym train`\n" in page
    assert "| `--resume RUN` | resume this run" in page
    assert "### `envgym model merge`\n" in page
    assert "| `--model-server URL` | NeMo-Gym's" in page  # of the protocol alone
    assert page.count("| `--lease-seconds S` |") == 1


def kinds_in_code() -> set[str]:
    """The kinds of failures that the code makes."""
    kinds: set[str] = set()
    for folder in ("envgym", "envs", "agents", "learners"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.resolve() != path:  # `envgym/envs` is a link to `envs`
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not CALLS.fullmatch(ast.unparse(node.func)):
                    continue
                [argument, *_] = [*node.args, *(keyword.value for keyword in node.keywords)]
                if isinstance(argument, ast.Constant):
                    kinds.add(argument.value)
                else:
                    kinds |= COMPUTED[str(path.relative_to(ROOT)), ast.unparse(argument)]
    return kinds


def test_the_page_on_failures_has_every_kind_and_every_limit():
    page = (REFERENCE / "failure_kinds.md").read_text()
    truncated, failed = page.split("## Failed: the kinds")
    listed = set(re.findall(r"^\| `(\w+)`", failed, re.MULTILINE)) | {"model_server", "unjudged", "unplayed"}
    assert listed == kinds_in_code()
    assert set(re.findall(r"^\| `(\w+)`", truncated, re.MULTILINE)) == {*Limit, "recording"}


def test_the_page_on_troubleshooting_has_every_alert():
    alerts = yaml.safe_load((ROOT / "envgym/monitoring/alarms.yaml").read_text())
    page = (ROOT / "docs/training/troubleshooting.md").read_text()
    assert [name for name in alerts if f"`{name}`" not in page] == []


def step_of(page: str) -> tuple[int, set[str]]:
    """The number of files that a page on a step states, and the files that it lists."""
    files = re.findall(r"^\| \d+ \| \[`([^`]+)`\]", page, re.MULTILINE)
    return int(re.search(r"passes (\d+) files", page)[1]), set(files)


@pytest.mark.timeout(600)
def test_a_step_passes_no_more_files_than_its_page_says():
    stated, listed = step_of((REFERENCE / "step.md").read_text())
    assert stated == len(listed)
    assert [file for file in listed if not (ROOT / file).is_file()] == []
    words = [sys.executable, ROOT / "docs" / "step.py", "--print"]
    traced = subprocess.run(words, capture_output=True, text=True, check=False)
    assert traced.returncode == 0, traced.stderr[-2000:]
    passed, files = step_of(traced.stdout[traced.stdout.index("# The files") :])
    by_answer = {file for file in files - listed if file.startswith("envs/")}  # an answer decides how it is graded
    advice = "join files, or write the page again: python docs/step.py"
    assert passed - len(by_answer) <= stated, f"{sorted(files - listed)}: {advice}"
