"""The settings that upstream's source requires of every flag, written by hand in `golden/PROGRAM.yaml`, and what our
translation makes of it.

A row is named by our flat name of the flag. `flat` and `dotted`: where upstream's parsers define it. `default`:
`theirs`, upstream's default, and `ours`, the settings without the flag. `other`: `words`, and the settings with them,
or `note`, a part of the note on the terminal, or `refused`, a part of the error; or a list of these. `words` of a
default are what it needs to have an effect. With `alone` the words are the whole command line, otherwise they are
added to `MINIMAL`.

`ours` has dotted keys of the last stage of the resolved configuration or of the run, and `null` for what is unset:
 - a role's setting that is unset is the stage's, or the learner's;
 - `environ.VARIABLE`, and `translation.FIELD`;
 - `words.--OPTION`: the value of an option before the settings; `translation.words`: all words there; `words`: some
   that follow each other;
 - of models in a list only the keys that are named.

Rows of `golden/differs_PROGRAM.md` are known to differ: a bullet begins with the flag and `default:`, `other:`, or
`other 2:` for the second of several; then the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from envgym.cli import train
from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser, add_run_options, resolve_options
from envgym.config.resolve import resolve
from envgym.config.words import merge, parse_overrides
from envgym.errors import EnvgymError
from envgym.openrlhf.table import PROGRAMS, flags_of, parse
from envgym.openrlhf.translate import translate
from envgym.openrlhf.translation import Translation

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
DATA = ["--pretrain", "org/model", "--dataset", "org/rows"]
MINIMAL = {
    "train_sft": DATA, "train_rm": DATA, "train_dpo": DATA, "train_kto": DATA,
    "train_prm": [*DATA, "--placeholder_token", "ки"], "train_kd": [*DATA, "--teacher_model", "org/teacher"],
    "train_ppo_ray": ["--pretrain", "org/model", "--prompt_data", "org/prompts", "--reward_pretrain", "org/judge"],
    "batch_inference": [*DATA, "--output_path", "made.jsonl", "--eval_task", "generate_vllm"],
    "lora_combiner": ["--model_path", "org/model", "--lora_path", "adapter", "--output_path", "merged"],
    "serve_rm": ["--reward_pretrain", "org/judge"],
}  # fmt: skip
PLACE = re.compile(r"(v[\d.]+(post\d+)? )?openrlhf/cli/\w+\.py:\d+")


def cases(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases of a row by their names: `default`, `other 1`, …"""
    other = row["other"] if isinstance(row["other"], list) else [row["other"]]
    return {"default": row["default"], **{f"other {number}": case for number, case in enumerate(other, 1)}}


def rows_of(program: str) -> dict[str, dict[str, Any]]:
    file = GOLDEN / f"{program}.yaml"
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def parameters() -> list[Any]:
    made = []
    for program in PROGRAMS:
        for flag, row in rows_of(program).items():
            for name, case in cases(row).items():
                made.append(pytest.param(program, case, id=f"{program}-{flag}-{name}"))
    return made


def command_line(program: str, case: Mapping[str, Any]) -> list[str]:
    """The words of a case, after those of the minimal command that they neither replace nor exclude."""
    words = [str(word) for word in case.get("words", ())]
    if case.get("alone"):
        return words
    flags, minimal = flags_of(program), MINIMAL[program]
    try:
        given = set(parse(program, words)[0])
    except EnvgymError:  # raised again by the translation
        given = set()
    pairs = list(zip(minimal[::2], minimal[1::2], strict=True))
    kept = [pair for pair in pairs if not {pair[0][2:], *flags[pair[0][2:]].excludes} & given]
    return [*(word for pair in kept for word in pair), *words]


@cache
def translated(program: str, *command: str) -> tuple[Translation, dict[str, Any]]:
    """What a command line becomes, and its settings. Most defaults are of one and the same line."""
    made = translate(program, list(command))
    return made, settings_of(made)


def settings_of(made: Translation) -> dict[str, Any]:
    """The settings of a translated command by their dotted keys."""
    fields = {"save_path": made.save_path and str(made.save_path), "result": made.result, "resumes": made.resumes}
    options = dict(zip(made.words, [*made.words[1:], ""], strict=True))
    flat = flattened({"translation": {**fields, "words": made.words, "command": made.command}, "environ": made.environ})
    flat |= {"words": made.words, **{f"words.{option}": value for option, value in options.items()}}
    if made.command == "train":
        parser = Parser("train", train.main)
        add_run_options(parser)
        config = resolve_options(*parser.parse_with_words(made.arguments[1:]), Invocation())
    elif made.command in ("rollout", "score"):
        words = [word for word in made.arguments if "=" in word and not word.startswith("--")]
        if made.command == "score":
            words.append(f"data.path={made.words[0]}")
        named = {key: options[f"--{key}"] for key in ("env", "model") if f"--{key}" in options}
        config = resolve(merge(named, parse_overrides(words)))
    else:
        return flat | flattened(made.settings)
    run = config.model_dump(mode="json")
    stages = run.pop("stages")
    return flat | flattened(stages[-1]) | flattened(run)


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
    return flat


def value_of(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a key, where a role without an own one has the stage's or the learner's."""
    value = settings.get(key)
    if key == "learner.old_logprobs" and value == "auto":
        several = settings["learner.minibatches"] * settings["learner.update_epochs"] > 1
        needed = settings["learner.correction.kind"] != "none" or settings["learner.policy_loss"] == "gspo"
        return "recompute" if several or needed else "rollout"
    if value is None and (found := re.fullmatch(r"roles\.\w+\.(.+)", key)):
        return settings.get(found[1])
    return value


def agree(found: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
        return isinstance(found, Mapping) and all(agree(found.get(key), value) for key, value in expected.items())
    if isinstance(expected, list):
        is_list = isinstance(found, Sequence) and not isinstance(found, str) and len(found) == len(expected)
        return is_list and all(agree(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, bool) or isinstance(found, bool) or expected is None or found is None:
        return found is expected
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return abs(found - expected) <= 1e-12
    return bool(found == expected)


def follow(words: Sequence[str], expected: Sequence[str]) -> bool:
    """True if the expected words follow each other."""
    starts = range(len(words) - len(expected) + 1)
    return any(list(words[start : start + len(expected)]) == list(expected) for start in starts)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with the files that cases name."""
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): 0\n")
    Path("agent.py").write_text("class AgentExecutor: ...\n")
    Path("text.txt").write_text("A document.\n")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("program", "case"), parameters())
def test_a_flag_becomes_what_upstream_requires(program, case):
    command = command_line(program, case)
    if "refused" in case:
        with pytest.raises(EnvgymError) as error:
            translated(program, *command)
        assert case["refused"] in str(error.value)
        return
    made, settings = translated(program, *command)
    if "note" in case:
        assert case["note"] in "\n".join(made.notes)
    wrong = {
        key: (found, expected)
        for key, expected in case.get("ours", {}).items()
        if not (follow if key == "words" else agree)(found := value_of(settings, key), expected)
    }
    assert not wrong, "key: (found, required)"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_of_the_parser_has_a_row(program):
    flags = flags_of(program)
    flat_names = {name: flag.name for flag in flags.values() for name in (flag.name, *flag.aliases)}
    lines = [line.split() for line in (HERE / "flags.txt").read_text().splitlines() if not line.startswith("#")]
    listed = {flat_names[name] for name, *programs in lines if program in programs}
    rows = rows_of(program)
    assert listed - set(rows) == set()
    assert set(rows) - set(flags) == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_are_complete(program):
    rows = rows_of(program)
    for flag, row in rows.items():
        assert set(row) <= {"flat", "dotted", "default", "other"}, flag
        places = [row[version] for version in ("flat", "dotted") if version in row]
        assert places, flag
        assert all(PLACE.fullmatch(place) for place in places), flag
        default, *others = cases(row).values()
        assert {"theirs", "ours"} <= set(default) <= {"theirs", "ours", "why", "words", "alone"}, flag
        assert default["ours"] or default["why"], flag
        for case in others:
            assert set(case) <= {"words", "ours", "note", "refused", "alone"}, flag
            assert any(case.get(key) for key in ("ours", "note", "refused")), flag
