"""`envgym envs export --as verifiers`: an environment as a project of verifiers, whose wheel `vf-eval` runs.

The wheel plays the environment in verifiers' own process: envgym's core needs no package in a version that verifiers
does not take.
"""

from __future__ import annotations

import re
from pathlib import Path

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.registry import write_description

PROJECT = Path(__file__).with_name("project")


def export(name: str, spec: EnvSpec, folder: Path) -> str:
    """Write a project with a package into an empty folder: a taskset, an environment, a harness, and the environment's
    description, with its file if it is in one. Return the commands that install and run it. Raises `ConfigError` for an
    environment that verifiers cannot step."""
    if spec.scores_groups:
        raise ConfigError(f"environment {spec.id} judges groups of episodes, and verifiers' have a reward each")
    if spec.agent not in ("single_turn", "multi_turn", "tool_calling"):
        raise ConfigError(f"environment {spec.id} is not played step by step, but by the agent {spec.agent}")
    module = "envgym_" + re.sub(r"\W", "_", name).lower()
    write_description(spec, folder / module, "@FOLDER@/")
    for file in ("environment.py", "pyproject.toml", "README.md"):
        text = (PROJECT / file).read_text(encoding="utf-8").replace("MODULE", module).replace("NAME", name)
        path = folder / module / "__init__.py" if file.endswith(".py") else folder / file
        path.write_text(text, encoding="utf-8")
    command = f"vf-eval {module} -n 4 -m MODEL --no-push --client.type eval --client.base-url URL"
    return f"pip install ENVGYM {folder}\n  {command}"
