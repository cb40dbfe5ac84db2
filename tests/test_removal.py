"""A component can be taken out: a folder of `envs/`, a file of `agents/` or `learners/` that is no base of another,
each in a copy, with its entry points and its own tests."""

import ast
import compileall
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.test_layering import LINKED, ROOT, imports, module_of, sources, within

PRODUCT = ("envgym", *LINKED)
QUICK = [
    "tests/env/test_protocol.py", "tests/tasks/test_mixed.py", "tests/tasks/test_sources.py", "tests/episodes",
    "tests/tools/test_schema.py", "tests/render/test_tool_calls.py", "tests/monitoring/test_report.py",
]  # fmt: skip
"""Tests that need no learner, agent or environment of ours, so that they hold whatever is taken out."""
LISTS = ["--help", "envs list", "config recipes"]
REFUSED = {
    "envs/math_verify": [("eval --suite smoke --model x", "there is no environment 'math_verify'")],
    "envs/multiple_choice": [
        ("train --env mmlu_pro", "task set mmlu_pro needs environment multiple_choice, which is not installed"),
    ],
    "envs/task_sets": [("eval --suite math --model x", "there is no environment 'gsm8k'")],
    "envs/recorded": [("train --recipe rm --model x", "there is no environment 'recorded'")],
    "agents/replay.py": [("train --recipe sft --model x", "there is no agent 'replay'")],
    "learners/ppo.py": [("train --recipe rlhf --model x", "there is no learner 'ppo'")],
}
"""Commands that ask for a recipe or a suite which lacks a part, and the beginning of the line that refuses them."""
PROGRAM = """
import contextlib, json, os, sys, traceback
import aiohttp, pydantic, yaml  # once for all copies

def run(folder, commands):
    import envgym
    from envgym import registry
    from envgym.cli import main
    from envgym.loading import entry_points

    assert envgym.__file__.startswith(folder), envgym.__file__
    for kind in ("learner", "agent"):
        for name in entry_points(f"envgym.{kind}s"):
            print(kind, name, registry.load_component(kind, name).__name__)
    for words in commands:
        print("status", main(words.split()))

for folder, commands in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        with open("said.txt", "w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                run(folder, commands)
            except BaseException:
                traceback.print_exc()
        os._exit(0)
    os.wait()
"""
"""Runs commands in copies, each in a process of its own: a mapping from folders to command lines."""


def module(part):
    """The module that a path of the checkout is."""
    return module_of(ROOT / part).removesuffix(".__init__")


@cache
def named_by(path):
    """The modules that a file imports, for types alone too, and those that it names as targets (`module:Name`)."""
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    targets = (re.fullmatch(r"(envgym(?:\.\w+)+)(?::\w+)?", value) for value in constants if isinstance(value, str))
    return {name for _, name in imports(path)} | {target[1] for target in targets if target}


def importers(part, folders=PRODUCT):
    """The files outside of a part that name it."""
    files = (path for folder in folders for path in sources(folder) if not path.is_relative_to(ROOT / part))
    return [str(path.relative_to(ROOT)) for path in files if any(within(name, module(part)) for name in named_by(path))]


BASE = "envs/foreign"
"""The base of environments of other frameworks, the only one that others of `envs/` import."""


def parts():
    """All that can be taken out, as paths."""
    inner = [path for folder in LINKED for path in sorted((ROOT / folder).iterdir()) if path.name[0] != "_"]
    names = [str(path.relative_to(ROOT)) for path in inner]
    return [name for name in names if (name.startswith("envs/") and name != BASE) or not importers(name, LINKED)]


PARTS = parts()


def entry_points(part):
    """The entry points of a part, as pairs of group and name."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    pairs = ((group, name, target.partition(":")[0]) for group in groups for name, target in groups[group].items())
    return {(group.removeprefix("envgym."), name) for group, name, target in pairs if within(target, module(part))}


def own_tests(part):
    """The tests of a part, as a pattern of their paths."""
    folder, name = Path(part).with_suffix("").parts
    return re.compile(rf"tests/({folder}/|cli/|acceptance/)?(test_)?{name}(/.*|\w*\.py)")


def copy(folder, *beside):
    """A copy of the product, and of what is wanted beside it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "pyproject.toml", *PRODUCT, *beside]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def take_out(part, folder):
    """Delete a part, its entry points and its tests in a copy, which counts as installed where it is on the path."""
    for path in [folder / part, *(folder / "tests").rglob("*")]:
        name = str(path.relative_to(folder))
        if path.is_file() and (name == part or own_tests(part).fullmatch(name)):
            path.unlink()
    if (folder / part).is_dir():
        shutil.rmtree(folder / part)
    project, target = folder / "pyproject.toml", re.compile(rf'.* = "{re.escape(module(part))}\b.*\n')
    project.write_text("".join(line for line in project.open() if not target.fullmatch(line)))
    info = folder / "envgym-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(distribution("envgym").read_text("METADATA"))
    points = configparser.ConfigParser(delimiters=["="])
    points.optionxform = str
    points.read_dict(tomllib.loads(project.read_text())["project"]["entry-points"])
    with (info / "entry_points.txt").open("w") as file:
        points.write(file)
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each copy lists and refuses, by the part that it lacks."""
    whole = copy(tmp_path_factory.mktemp("whole"))
    compileall.compile_dir(whole, quiet=2)  # once: all copies have these files, as old as their sources
    copies = {}
    for part in PARTS:
        folder = tmp_path_factory.mktemp("copy")
        copies[part] = take_out(part, shutil.copytree(whole, folder, symlinks=True, dirs_exist_ok=True))
    commands = {str(copies[part]): [*LISTS, *(command for command, _ in REFUSED.get(part, ()))] for part in PARTS}
    halves = [json.dumps(dict(list(commands.items())[half::2])) for half in (0, 1)]
    programs = [subprocess.Popen([sys.executable, "-c", PROGRAM, half]) for half in halves]
    assert [program.wait(timeout=280) for program in programs] == [0, 0]
    return {part: (copies[part] / "said.txt").read_text() for part in PARTS}


def test_what_can_be_taken_out():
    assert {"envs/math_verify", "agents/replay.py", "learners/ppo.py"} <= set(PARTS)
    assert {"learners/advantages.py", "learners/policy_gradient.py", "agents/token_level.py"}.isdisjoint(PARTS)
    assert entry_points("envs/nemo_gym") == {("envs", "nemo_gym-v0"), ("agents", "nemo_gym"), ("dialects", "nemo_gym")}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_imports_a_part_or_names_it_as_a_target(part):
    assert importers(part) == []


@pytest.mark.parametrize("part", PARTS)
def test_what_is_left_imports_and_lists_its_components(part, said):
    statuses = [int(line.split()[1]) for line in said[part].splitlines() if line.startswith("status ")]
    assert statuses == [0 for _ in LISTS] + [2 for _ in REFUSED.get(part, ())], said[part]
    assert "cannot be used" not in said[part]
    lines = [[*line.split(), ""] for line in said[part].splitlines() if line]
    listed = {(f"{kind}s", name) for kind, name, *_ in lines} | {("envs", name) for name, *_ in lines}
    assert listed & entry_points(part) == set()


@pytest.mark.parametrize("part", REFUSED)
def test_a_recipe_or_suite_that_lacks_a_part_is_refused(part, said):
    for _, line in REFUSED[part]:
        assert f"\nenvgym: error: {line}" in said[part]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_what_is_left_passes_quick_tests(part, tmp_path):
    folder = take_out(part, copy(tmp_path, "tests", "examples"))
    command, environ = [sys.executable, "-m", "pytest", "-q", *QUICK], os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:]
