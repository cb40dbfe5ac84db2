"""`envgym envs export`: an environment as a project of another framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.cli.parser import Parser, make_spec
from envgym.errors import ConfigError, reported_as
from envgym.loading import import_target, target_of_name


def export_main(arguments: Sequence[str]) -> int:
    """Write an environment as a project of another framework, such as an app that serves it, or a package.

    usage: E --as DIALECT --out DIR [key=value …]
    example: envgym envs export math_verify --as openenv --out math_env env.digits=3
    """
    parser = Parser("envs export", export_main)
    parser.add_argument("env", metavar="E", help="environment: id, file.py[:Name] or import path")
    parser.add_argument("--as", metavar="DIALECT", dest="dialect", required=True, help="the framework, as in serve")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write, new or empty")
    options, words = parser.parse_with_words(arguments)
    export = getattr(import_target(target_of_name("envgym.dialects", options.dialect, "dialect")), "export", None)
    if export is None:
        raise ConfigError(f"{options.dialect} has no projects to export to: envgym serve serves its protocol")

    from envgym.remote.server import name_of
    from envgym.services import check_servable

    spec, folder = make_spec(options.env, words), options.out
    check_servable(spec)
    with reported_as(ConfigError, f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose another folder with --out")
        commands = export(name_of(spec), spec, folder)
    print(f"wrote {folder}. Next:\n  {commands}")
    return 0
