"""`envgym model`: make a model from a recipe, merge an adapter into its base, or export a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.errors import NameNotFound, did_you_mean

from .errors import Invocation
from .parser import Parser

MERGE, EXPORT = "merge", "export"


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Print the folder of the model that a recipe makes. The starter ships with envgym; another one is made once and
    cached. Or merge an adapter into its base, or export a model: see envgym model merge --help and envgym model export
    --help.

    usage: NAME | merge ADAPTER OUT [--base B] | export MODEL OUT [options]
    example: envgym model starter
    """
    if arguments[:1] == [MERGE]:
        return _merge(arguments[1:])
    if arguments[:1] == [EXPORT]:
        return _export(arguments[1:])
    parser = Parser("model", main)
    parser.add_argument("name", metavar="NAME", help="recipe of a model: starter, or a YAML file with new_model")
    options = parser.parse_without_words(arguments, "a model is made as its recipe says")

    from envgym.config.recipes import makes_model, recipe_names

    if not makes_model(options.name):
        makers = [name for name in recipe_names() if makes_model(name)]
        hint = did_you_mean(options.name, [*makers, MERGE, EXPORT]) or f" There is {', '.join(makers)}."
        raise NameNotFound(f"no recipe {options.name!r} that makes a model.{hint}")

    from envgym.monitoring.terminal import open_display
    from envgym.processes.event_loop import run
    from envgym.training.new_model import make_model

    with open_display() as display:
        path = run(make_model(options.name, display))
    print(path)
    return 0


def _merge(arguments: Sequence[str]) -> int:
    """Write the model folder OUT: the base of a LoRA adapter with the adapter added to its weights. ADAPTER is a folder
    in peft's form, such as a run's adapter/; it also tells policies, reward models and critics apart.

    usage: ADAPTER OUT [--base B]
    example: envgym model merge runs/first/adapter merged
    """
    parser = Parser("model merge", _merge)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder with adapter_config.json")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument("--base", metavar="B", help="folder or hub id of the base, if not the one in the adapter")
    options = parser.parse_without_words(arguments, "an adapter is merged as it is")

    from envgym.workers.merge import merge_adapter

    print(merge_adapter(options.adapter, options.out, base=options.base, note=print))
    return 0


def _export(arguments: Sequence[str]) -> int:
    """Write MODEL (a model folder or a run) as the folder OUT, with its weights in their own number format or in
    another. A format of fewer digits can undo a training: how much of it is left is said.

    usage: MODEL OUT [--dtype T]
    example: envgym model export runs/first first_16_bit --dtype bfloat16
    """
    parser = Parser("model export", _export)
    parser.add_argument("model", metavar="MODEL", help="model folder, or the folder of a run")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="number format (default: that of the weights)"
    )
    options = parser.parse_without_words(arguments, "a model is exported as it is")

    from envgym.jobs.models import base_of_model
    from envgym.models.export import export_model
    from envgym.run_folder import policy_of_run

    model = policy_of_run(Path(options.model).expanduser())
    print(export_model(model, Path(options.out).expanduser(), options.dtype, print, base_of_model(model)))
    return 0
