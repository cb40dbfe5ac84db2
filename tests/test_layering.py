"""The direction of imports, what may be imported at module level, and that the core knows nobody's name.

All but the last tests read the sources, so that an import inside a function counts as well.
"""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from envgym.config.recipes import recipe_names

ROOT = Path(__file__).parents[1]
LINKED = ("envs", "agents", "learners")
HEAVY = {
    "PIL", "accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "peft", "pyarrow", "ray", "safetensors",
    "tokenizers", "torch", "transformers", "vllm",
}  # fmt: skip
ALLOWED = {
    "envs": {
        "envgym.types", "envgym.env", "envgym.errors", "envgym.tasks", "envgym.tools", "envgym.services",
        "envgym.registry", "envgym.rewards", "envgym.net", "envgym.processes", "envgym.sandbox", "envgym.loading",
        "envgym.hashing", "envgym.settings",
    },
    "agents": {
        "envgym.types", "envgym.render", "envgym.engine", "envgym.agent", "envgym.env", "envgym.errors",
        "envgym.rollout.scripted", "envgym.transcript", "envgym.net", "envgym.processes",
    },
    "learners": {"envgym.types", "envgym.learner", "envgym.settings", "envgym.loading"},
}  # fmt: skip
FOREIGN = {
    "envs/foreign": {"envgym.agent", "envgym.agents", "envgym.engine", "envgym.render"},
    "envs/nemo_gym": {"envgym.agent", "envgym.agents", "envgym.render", "envgym.rollout.scripted"},
    "envs/openenv": {"envgym.remote.access", "envgym.remote.transport"},
    "envs/openrlhf": {"envgym.agent", "envgym.agents", "envgym.transcript"},
    "envs/verifiers": {"envgym.render"},
}
"""What another framework's folder imports beside: it holds their agents, and servers that speak as theirs do."""
SEE_THE_RUN = ("api.py", "cli", "config", "jobs", "placement", "training")
"""What may import `RunConfig` and `StageConfig`."""
RUN_IN_WORKERS = ("envgym/engines/", "envgym/workers/")
"""Modules that only a process with a model in it imports. Their light neighbours are told by the last test."""


def sources(folder):
    """The Python files of a folder; those behind the three links belong to where they lead."""
    for parent, folders, files in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if not Path(parent, name).is_symlink()]
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def module_of(path):
    """`envgym.…` of a file, also where it lies in one of the linked folders."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "envgym" else ("envgym", *parts))


def imported(statement, path):
    """The absolute names of the modules (or of what is taken out of them) that an import statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    package = module_of(path).removesuffix(".__init__").split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - statement.level + 1] if statement.level else []
    start = ".".join([*base, *([statement.module] if statement.module else [])])
    return [f"{start}.{alias.name}" for alias in statement.names]


def imports(path, *, at_module_level=False):
    """(line, absolute name) of everything a file imports; at module level, what importing it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = _run_on_import(tree.body) if at_module_level else ast.walk(tree)
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((statement.lineno, name) for name in imported(statement, path))


def _run_on_import(body):
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _run_on_import(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _run_on_import(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _run_on_import(handler.body)


def within(name, module):
    return name == module or name.startswith(f"{module}.")


def allowed_in(path, folder):
    """What a file of one of the linked folders may import of ours."""
    beside = FOREIGN.get("/".join(path.relative_to(ROOT).parts[:2]), set())
    return ALLOWED[folder] | beside | {f"envgym.{folder}"}


def test_the_reader_of_imports_sees_them_all():
    """A layering test that overlooks an import is worse than none."""
    here = ROOT / "envgym" / "engines" / "base.py"
    text = "from ..types import Task\nfrom . import client\nimport torch.nn as nn\nfrom envgym.learners import grpo"
    found = [name for statement in ast.parse(text).body for name in imported(statement, here)]
    assert found == ["envgym.types.Task", "envgym.engines.client", "torch.nn", "envgym.learners.grpo"]
    package = ROOT / "learners" / "__init__.py"
    assert imported(ast.parse("from .kl import x").body[0], package) == ["envgym.learners.kl.x"]
    assert len(list(sources("envgym"))) > 40
    assert not any(path.relative_to(ROOT / "envgym").parts[0] in LINKED for path in sources("envgym"))


def test_the_core_imports_nothing_from_envs_agents_and_learners():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("envgym")
        for line, name in imports(path)
        if any(within(name, f"envgym.{folder}") or within(name, folder) for folder in LINKED)
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", LINKED)
def test_each_folder_imports_only_what_is_below_it(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imports(path)
        if within(name, "envgym") and not any(within(name, module) for module in allowed_in(path, folder))
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["envgym", *LINKED])
def test_nothing_heavy_is_imported_at_module_level_outside_workers(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        if not str(path.relative_to(ROOT)).startswith(RUN_IN_WORKERS)
        for line, name in imports(path, at_module_level=True)
        if name.partition(".")[0] in HEAVY
    ]
    assert wrong == []


def import_graph():
    """Which modules of the product import which, inside functions too, but for what only the type checker imports."""
    found = [path for folder in ("envgym", *LINKED) for path in sources(folder)]
    paths = {module_of(path).removesuffix(".__init__"): path for path in found}
    return {module: set(_modules_imported(path, paths)) - {module} for module, path in paths.items()}


def _modules_imported(path, known):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for statement in _run_sometime(tree):
        for name in imported(statement, path) if isinstance(statement, ast.Import | ast.ImportFrom) else ():
            yield from [module for module in (name, name.rpartition(".")[0]) if module in known][:1]


def _run_sometime(node):
    """The statements below `node`, but for those behind `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_sometime(child)


TARGET = re.compile(r"(envgym(?:\.\w+)+):\w+")


def room_of(module):
    """The room of `docs/reference/architecture.md` that a module is in."""
    return (module.split(".")[1:2] or ["__init__"])[0]


def rooms_and_what_they_import():
    """Room -> the modules of others that it imports, targets written as text (`"envgym.room.module:Name"`) included."""
    graph = import_graph()
    for folder in ("envgym", *LINKED):
        for path in sources(folder):
            texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            targets = (TARGET.fullmatch(text) for text in texts if isinstance(text, str))
            graph[module_of(path).removesuffix(".__init__")] |= {target[1] for target in targets if target}
    rooms = {}
    for module, others in graph.items():
        rooms.setdefault(room_of(module), set()).update(other for other in others if room_of(other) != room_of(module))
    del rooms["__init__"]  # it imports when it is asked for a name
    return {room: {other for other in others if other != "envgym"} for room, others in rooms.items()}


def test_no_rooms_import_each_other_and_each_imports_from_its_floor_and_below():
    """By the picture in `docs/reference/architecture.md`, without an exception."""
    picture = (ROOT / "docs" / "reference" / "architecture.md").read_text().split("```")[3]
    floors = [re.split(r"  +", line[26:].strip()) for line in picture.strip("\n").splitlines()]
    height = {room: len(floors) - number for number, floor in enumerate(floors) for room in floor}
    rooms = rooms_and_what_they_import()
    assert set(rooms) == set(height)
    upward = [
        f"{room} imports {module}"
        for room, modules in rooms.items()
        for module in sorted(modules)
        if height[room_of(module)] > height[room]
    ]
    assert upward == []
    check_for_circles({room: {room_of(module) for module in modules} for room, modules in rooms.items()})


def test_environments_import_no_other_environment():
    wrong = [
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others
        if module.startswith("envgym.envs.") and other.startswith("envgym.envs.")
        if other.split(".")[2] not in (module.split(".")[2], "foreign")  # the base of those that programs run
    ]
    assert wrong == []


def check_for_circles(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_module_is_imported_by_what_it_imports():
    with pytest.raises(pytest.fail.Exception, match=r"a <- b <- a|b <- a <- b"):
        check_for_circles({"a": {"b"}, "b": {"a"}})
    check_for_circles(import_graph())


def test_only_those_that_run_a_whole_run_see_its_configuration():
    """Other parts are given their own section of the settings."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder in ("envgym", *LINKED)
        for path in sources(folder)
        for line, name in imports(path)
        if name in ("envgym.config.schema.RunConfig", "envgym.config.schema.StageConfig")
        and path.relative_to(ROOT).parts[:2] not in {("envgym", part) for part in SEE_THE_RUN}
    ]
    assert wrong == []


# -- names ------------------------------------------------------------------------------------------------


ORDINARY_WORDS = {"chat", "code", "gymnasium", "pretrain", "recorded"}
"""Names that the core uses in another sense: chat templates, fingerprints of code, the view for Gymnasium, answers
that are recorded, text that is mixed in."""


def known_names():
    """What learners, environments and recipes that ship with envgym are called, without versions."""
    groups = [entry_points(group=f"envgym.{kind}") for kind in ("envs", "learners")]
    ours = [entry for group in groups for entry in group if entry.value.startswith("envgym.")]
    return ({re.sub(r"-v\d+$", "", entry.name) for entry in ours} | set(recipe_names())) - ORDINARY_WORDS


def words_with_a_name(source, names, *, examples):
    """(line, word) of each identifier and string literal of a source that holds one of `names` as a word.

    Docstrings and comments may name whom they like. With `examples`, so may text for people: a string of several
    words, which nothing can be compared with.
    """
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, names))})(?![a-z0-9])", re.IGNORECASE)
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname", "module", "value"):
            word = getattr(node, field, None)
            if not isinstance(word, str) or id(node) in prose or not pattern.search(word):
                continue
            if not (examples and field == "value" and len(word.split()) > 1):
                yield getattr(node, "lineno", 0), word


def test_names_of_ours_are_known():
    assert {"math_verify", "grpo", "sft", "starter"} <= known_names()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = learner == 'grpo'", ["grpo"]),
        ("x = {'math_verify-v0': 1}", ["math_verify-v0"]),
        ("grpo_eps = 1", ["grpo_eps"]),
        ("class GRPO: pass", ["GRPO"]),
        ("f(sft=1)", ["sft"]),
        ("x = f'{y}/grpo.yaml'", ["/grpo.yaml"]),
        ("import math_verify", ["math_verify"]),
        ("from x.grpo import y", ["x.grpo"]),
        ("'''A docstring on grpo.'''\n# sft\nx = 'shift softer starters'", []),
        ("x = 'for example: envgym train --env math_verify'", []),
    ],
)
def test_what_counts_as_a_name(source, found):
    assert [word for _, word in words_with_a_name(source, known_names(), examples=True)] == found


def test_the_core_knows_nobodys_name():
    """Help may show names in examples; nothing else in envgym/ may hold one, but for the recipes, for what
    translates another program's names into ours, and for the jail, which knows `/bin/rm`."""
    names = known_names()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} says {word!r}"
        for path in sources("envgym")
        if not {path.parent.name, path.stem} & {"recipes", "openrlhf", "jail"}
        for line, word in words_with_a_name(path.read_text(encoding="utf-8"), names, examples="cli" in path.parts)
    ]
    assert wrong == []


# -- one copy of every class ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", LINKED)
def test_the_linked_folders_have_one_import_name(folder):
    assert os.readlink(ROOT / "envgym" / folder) == f"../{folder}"
    result = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert f"ImportError: write import envgym.{folder}: import {folder} makes" in result.stderr


def test_every_component_is_configured_without_a_heavy_import():
    """Settings are validated, and their keys suggested, where torch is not installed or would take seconds."""
    program = f"""
import sys
from envgym import registry
from envgym.config.resolve import resolve
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
for name in registry.list_ids():
    registry.spec(name)
for kind in ("learner", "agent"):
    for entry in entry_points(group=f"envgym.{{kind}}s"):
        registry.load_component(kind, entry.name).Config.model_json_schema()
for group, setting in (("engines", "engine"), ("policy_losses", "learner.policy_loss")):
    for entry in entry_points(group=f"envgym.{{group}}"):
        resolve({{"env": "math_verify", setting: entry.name}})
import envgym.config.schema, envgym.env, envgym.render, envgym.rollout.runner
import envgym.remote.client, envgym.processes.local
print(*sorted({HEAVY!r} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "\n"


# -- encodings --------------------------------------------------------------------------------------------


def in_the_locale(source):
    """The lines of a source that read or write text in the encoding of the user's locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        function, given = ast.unparse(node.func), [*map(ast.unparse, node.args), words.get("mode", "")]
        modes = [text for text in given if re.fullmatch(r"'[rwaxbt+]+'", text)]
        opens = function == "open" or (modes and function.endswith((".open", ".fdopen")))
        if "encoding" not in words and (
            function.endswith((".read_text", ".write_text"))
            or (function.startswith("subprocess.") and words.keys() & {"text", "universal_newlines"})
            or (opens and not any("b" in mode for mode in modes))
        ):
            yield node.lineno


def test_text_is_read_and_written_as_utf_8_whatever_the_locale():
    wrong = 'p.read_text()\np.write_text(x)\nopen(p)\np.open("a")\nos.fdopen(f, mode="w")\nsubprocess.run(c, text=True)'
    right = 'p.read_text(encoding="utf-8")\nopen(p, "rb")\np.open(mode="ab")\nos.open(p, os.O_RDONLY)\njournal.open()'
    assert list(in_the_locale(wrong)) == [1, 2, 3, 4, 5, 6]
    assert list(in_the_locale(right)) == []
    found = {
        str(path): list(in_the_locale(path.read_text())) for folder in ("envgym", *LINKED) for path in sources(folder)
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


# -- the tiers of the tests -------------------------------------------------------------------------------


def test_every_slow_test_is_in_one_part_of_the_slow_tier():
    makefile = (ROOT / "Makefile").read_text()
    parts = re.findall(r"^test-slow-\w+: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    named = [
        name for part in parts for name in re.findall(r"tests/[\w/.]+|(?<=[,\s])\w+\.py", part.replace("\\\n", ""))
    ]
    paths = [ROOT / (name if "/" in name else f"tests/acceptance/test_{name}") for name in named]
    slow = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.slow" in path.read_text()]
    assert len(parts) == 5
    assert [path for path in paths if not path.exists()] == []
    others = {path: [p for p in paths if path.is_relative_to(p)] for path in slow if path.name != "test_layering.py"}
    assert {str(path) for path, of in others.items() if len(of) != 1} == set()
