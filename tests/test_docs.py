"""The pages of the documentation do what they say: commands run, code works, links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import envgym
from envgym.cli import main
from tests.page_files import blocks_of, write_named_blocks

ROOT = Path(__file__).parents[1]
ENVGYM = Path(sys.executable).with_name("envgym")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*sorted({*ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"}), *sorted(ROOT.glob("docs/**/*.md")))
}
LONG = {"train", "eval", "ask", "compare", "rollout", "score", "replay", "model", "show", "export"}
"""Commands that sample or train: minutes."""
SERVERS = {"serve", "serve-reward-model"}
SHORTER = {
    "train": ["steps=1", "rollout.tasks_per_step=4", "rollout.group_size=2", "eval.tasks=4"],
    "eval": ["eval.tasks=4"],
    "rollout": ["--tasks", "0:4"],
}


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a language on a page. Tutorials are notebooks, which `tests/test_tutorials.py` runs."""
    return [] if page.startswith("docs/tutorials/") else blocks_of(PAGES[page], language)


def commands(page: str) -> list[list[str]]:
    """The words of every command on a page, without comments."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def ours(page: str) -> list[list[str]]:
    """The commands of envgym on a page, without `envgym` itself."""
    return [words[1:] for words in commands(page) if words[0] == "envgym"]


def write_files(page: str, folder: Path) -> list[str]:
    """Make the files that the page shows or takes from `examples/`, and return its other Python blocks. A first line
    names the file."""
    for name in set(re.findall(r"examples/[\w./]+", " ".join(word for words in ours(page) for word in words))):
        (folder / "examples").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    code = write_named_blocks(PAGES[page], "python", folder)
    write_named_blocks(PAGES[page], "yaml", folder)
    for name, block in re.findall(r'^```jsonl title="(\S+)"\n(.*?)^```$', PAGES[page], re.MULTILINE | re.DOTALL):
        rows = [line.replace("?", f"? ({number})", 1) for number in range(40) for line in block.splitlines()]
        (folder / name).write_text("".join(f"{row}\n" for row in rows))
    [row] = [json.loads(block) for block in blocks("docs/environments/math_verify.md", "json")]
    rows = [{**row, "question": f"{row['question']} ({number})"} for number in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return code


def run(folder: Path, words: list[str], timeout: float) -> str:
    environ = {**os.environ, "PATH": f"{Path(ENVGYM).parent}:{os.environ['PATH']}"}  # a page's `python`
    done = subprocess.run(
        [ENVGYM, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@contextmanager
def served(page: str, folder: Path) -> Iterator[str]:
    """Run what the page serves; gives the port that stands for its port 8000."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    servers = [
        subprocess.Popen(
            [ENVGYM, *(port if word == "8000" else word for word in words)],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in ours(page)
        if words[0] == "serve"
    ]
    try:
        for server in servers:
            assert port in server.stdout.readline()
        yield port
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=20)


def test_every_command_is_of_a_program_that_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for words in commands(page):
            if words[0] == "make":  # CI runs them
                assert words[1] in targets
            else:
                assert words[0] in ("envgym", ".venv/bin/pre-commit")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "words"),
    [
        pytest.param(page, words, id=" ".join(words))
        for page in PAGES
        for words in ours(page)
        if words[0] not in LONG | SERVERS
    ],
)
def test_a_quick_command(page, words, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if any(words[0] in LONG for words in ours(page))])
def test_the_long_commands_of_a_page_run_in_a_short_form(page, tmp_path, tiny_model):
    write_files(page, tmp_path)
    long = [words for words in ours(page) if words[0] in LONG]
    for name in sorted(set(re.findall(r"\bruns/(\w+)", str(long))) - set(re.findall(r"--name', '(\w+)", str(long)))):
        long.insert(0, ["train", "--env", "math_verify", "--name", name])  # a run that the page takes for granted
    with served(page, tmp_path) as port:
        for words in long:
            words = [word.replace(":8000", f":{port}").replace("path/or/hub-id", str(tiny_model)) for word in words]
            words = [str(tiny_model) if word == "smollm2" else word for word in words]
            run(tmp_path, words + ([] if "--resume" in words else SHORTER.get(words[0], [])), 600)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
@pytest.mark.usefixtures("shorter")
def test_python_runs(page, tmp_path, monkeypatch, tiny_model):
    code = write_files(page, tmp_path)
    for name in set(re.findall(r'"runs/(\w+)/model"', str(code))):  # a run that the page takes for granted
        shutil.copytree(tiny_model, tmp_path / "runs" / name / "model")
    monkeypatch.chdir(tmp_path)
    for path in tmp_path.glob("*.py"):
        envgym.make(path.name)
    with served(page, tmp_path) as port:
        asyncio.run(execute(code, port))


@pytest.fixture
def shorter(monkeypatch):
    """Runs that a page begins in Python have one step, of few tasks, and are of one process."""
    train = envgym.train
    settings = dict(setting.split("=") for setting in SHORTER["train"])
    few = {name: int(value) for name, value in settings.items()} | {"engine.kind": "transformers", "debug": True}
    monkeypatch.setattr(envgym, "train", lambda given, **named: train({**given, **few}, **named))


async def execute(code: list[str], port: str) -> None:
    """Run blocks of a page one after the other; they may await, and know each other's names."""
    names = {"envgym": envgym}
    for block in code:
        program = compile(block.replace(":8000", f":{port}"), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(program, names)
        if inspect.isawaitable(result):
            await result


def test_toml_is_toml():
    for page in PAGES:
        for block in blocks(page, "toml"):
            assert tomllib.loads(block)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", PAGES[page]):
        if target.startswith(("http://", "https://")) or not (target or anchor):
            continue
        path = folder / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in named, f"{target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if "[LoRA](" in PAGES[page]])
def test_what_is_called_lora_leads_to_its_page(page):
    targets = re.findall(r"\[LoRA\]\(([^)#]*)", PAGES[page])
    assert {(ROOT / page).parent.joinpath(target).resolve() for target in targets} == {ROOT / "docs/training/lora.md"}


def test_the_files_that_the_page_on_architecture_names_are_there():
    names = set(re.findall(r"`([\w./]+(?:\.py|\.yaml|/))`", PAGES["docs/reference/architecture.md"]))
    assert len(names) > 25
    assert [name for name in names if not any((root / name).exists() for root in (ROOT, ROOT / "envgym"))] == []


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path):
    """By what `make` would run. The other Python stands in for one that this machine may lack."""
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9.18\n")
    old.chmod(0o755)
    plan = {
        python: subprocess.run(
            ["make", "--no-print-directory", "-n", "-B", ".venv/installed", f"PYTHON={python}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        for python in (str(old), sys.executable, str(tmp_path / "none"))
    }
    refused, taken, missing = plan.values()
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
    assert f"envgym needs Python 3.11 or newer, {old} is 3.9.18: name another one" in refused.stderr
    assert "none is not there: name another one" in missing.stderr
    assert taken.stdout.startswith(f"{sys.executable} -m venv .venv\n")
