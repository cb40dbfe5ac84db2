"""`envgym envs export --as openenv`: an environment as a project of OpenEnv."""

from __future__ import annotations

from pathlib import Path

from envgym.env import EnvSpec
from envgym.registry import write_description

PROJECT = Path(__file__).with_name("project")
FILES = ("openenv.yaml", "server/app.py", "Dockerfile", "README.md")
"""The files of a project, in which `NAME` stands for the environment's."""


def export(name: str, spec: EnvSpec, folder: Path) -> str:
    """Write `openenv.yaml`, an app that serves the environment, a Dockerfile and a README into an empty folder, and the
    environment's description beside them, with its file if it is in one. Return the command to run next."""
    write_description(spec, folder)
    for file in FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        text = (PROJECT / file).read_text(encoding="utf-8")
        (folder / file).write_text(text.replace("NAME", name), encoding="utf-8")
    return f"python {folder}/server/app.py --port 8000"
