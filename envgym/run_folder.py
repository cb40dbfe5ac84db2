"""A run is a folder. Everything in it is written so that a kill at any moment leaves it readable."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.disk import flush_to_disk, replacing, write_atomically
from envgym.episodes.record import decode, encode, from_record, to_record
from envgym.errors import CheckpointDamaged, ConfigError, RunError
from envgym.types import Group
from envgym.yaml_files import read_yaml

CONTROLLER = "controller.json"
"""The controller's share of a checkpoint, written last."""
STOP = "stop"
"""A file in the run's folder that asks the run to stop."""
GROUP = "$group"
"""Key of a group of episodes, which waits in the buffer, in the controller's state."""
DAMAGED = ".damaged"
"""Suffix of a checkpoint that could not be read, once the run has gone on from an older one."""


class RunFolder:
    """The files of one stage of a run.

    config.yaml       the resolved configuration
    metrics.jsonl     one object a step
    rollouts/         every episode, one compressed columnar file a step
    learned/          what learning made of its tokens, likewise: advantages, the trainer's log-probabilities
    events/           when its episodes waited, were sampled and stepped, and the step's phases: lines of JSON
    checkpoints/      what the run resumes from; `best` is a link to the best of them
    tokenizer.json    what turns its tokens into text, from the start
    model/            the policy at the end, as a Hugging Face folder
    model_ema/        the moving average of its weights, where `learner.ema_decay` asks for one
    adapter/          what it learned, where that is a LoRA adapter, in peft's form; `model` has it merged
    logs/             the output of every child process
    summary.json      the result, for scripts
    episodes.parquet  the episodes that a stage which does not train has played or judged
    unfinished.jsonl  episodes of the step that is played now, if that takes long
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.learned = path / "learned"
        self.events = path / "events"
        self.checkpoints = path / "checkpoints"
        self.best = self.checkpoints / "best"
        self.model = path / "model"
        self.model_ema = path / "model_ema"
        self.logs = path / "logs"
        self.tokenizer_file = path / "tokenizer.json"
        self.summary_file = path / "summary.json"
        self.episodes = path / "episodes.parquet"
        self.unfinished_step = path / "unfinished.jsonl"

    def create(self) -> None:
        for folder in (self.path, self.rollouts, self.learned, self.events, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    # -- metrics ------------------------------------------------------------------------------------------

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records written so far; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def write_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put these records in the place of those written so far."""
        write_atomically(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`, so that a resumed run continues as if nothing had happened."""
        self.write_metrics([record for record in self.read_metrics() if record["step"] <= step])
        for folder, suffix in ((self.rollouts, ".parquet"), (self.learned, ".parquet"), (self.events, ".jsonl")):
            for number, path in files_by_step(folder, suffix).items():
                if number > step:
                    path.unlink()

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.parquet"

    def learned_file(self, step: int) -> Path:
        return self.learned / f"step_{step:06d}.parquet"

    def append_events(self, step: int, events: Iterable[Mapping[str, Any]]) -> None:
        """Write down when something of a step happened."""
        with (self.events / f"step_{step:06d}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def keep_tokenizer(self, tokenizer: Any) -> None:
        """Keep the file of the tokenizer, where it is one of a file: by the time that somebody looks at the run, its
        model may be gone."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and not self.tokenizer_file.exists():
            with replacing(self.tokenizer_file) as temporary:
                backend.save(str(temporary))

    # -- summary ------------------------------------------------------------------------------------------

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        if not self.summary_file.exists():
            return None
        summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return summary

    # -- checkpoints --------------------------------------------------------------------------------------

    def new_checkpoint(self) -> Path:
        """An empty folder to write a checkpoint into; `keep_checkpoint` makes it count."""
        path = self.checkpoints / "unfinished"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def keep_checkpoint(self, written: Path, step: int, state: str, best: dict[str, Any] | None, keep: int) -> Path:
        """Add the controller's state, as `state_to_json` writes it, give the checkpoint its name in one rename, delete
        the oldest ones. The `best` outlives the `keep` newest, and the link of that name leads to it."""
        (written / CONTROLLER).write_text(state, encoding="utf-8")
        flush_to_disk(written)  # before an older one is deleted: a name may outlive a power failure, content may not
        final = self._of_step(step)
        replaced = final.with_suffix(".replaced")  # one of the same step, which counts until the new one is there
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(written, final)
        flush_to_disk(self.checkpoints, deep=False)
        shutil.rmtree(replaced, ignore_errors=True)
        best = self.mark_best(best)
        spared = None if best is None else self._of_step(best["step"])
        for old in {*self.kept_checkpoints()[:-keep]} - {spared}:
            shutil.rmtree(old, ignore_errors=True)  # someone may be reading its model: the next one tries again
        return final

    def mark_best(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Let the link `best` lead to the checkpoint of `best["step"]`, in one rename, or to none.

        Returns `best`, or None where that checkpoint is no longer there.
        """
        final = None if best is None else self._of_step(best["step"])
        if final is None or not final.is_dir():
            if self.best.is_symlink():
                self.best.unlink()
            return None
        link = self.checkpoints / "best.new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, self.best)
        return best

    def last_checkpoint(self) -> Path | None:
        kept = self.kept_checkpoints()
        return kept[-1] if kept else None

    def _of_step(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def kept_checkpoints(self) -> list[Path]:
        """Oldest first; of one step, the replaced one before the new one."""
        kept = (path for path in self.checkpoints.glob("step_*") if path.suffix != DAMAGED)
        return sorted(kept, key=lambda path: (path.stem, path.suffix == ""))

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        """The controller's state of a checkpoint that `keep_checkpoint` made. Raises `CheckpointDamaged` where it
        cannot be read, and `RunError` where it was written in a form that is read no longer."""
        check_form(checkpoint)
        file = checkpoint / CONTROLLER
        try:
            return state_from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointDamaged(f"{file} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(f"{file} cannot be read (it is cut short or garbage: {error})") from None


def state_to_json(state: Mapping[str, Any]) -> str:
    """`Trainer.state` as text: exact, so that a resumed run goes on as if nothing had happened, and reading that of
    somebody else runs no code. Raises `RunError` for values that are not of Python's plain kinds."""
    try:
        return json.dumps(encode(state), default=_group_to_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"a checkpoint cannot be kept: {error}. What a learner's state() returns must be made of numbers, text, "
            "lists, tuples and mappings"
        ) from None


def state_from_json(text: str) -> dict[str, Any]:
    """The state that `state_to_json` wrote. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    state = decode(json.loads(text), {GROUP: _group_from_json})
    if not isinstance(state, dict) or not isinstance(state["progress"]["step"], int):
        raise ValueError("it holds no state of a controller")
    return state


def _group_to_json(value: Any) -> Any:
    if not isinstance(value, Group):
        raise TypeError(f"it holds a {type(value).__name__}")
    # As text first: what a task holds that JSON does not know (a date) is text also in the files of episodes.
    record = {"id": value.id, "episodes": [to_record(episode) for episode in value.episodes]}
    return {GROUP: json.loads(json.dumps(record, default=str))}


def _group_from_json(record: Mapping[str, Any]) -> Group:
    """A group as the buffer holds it: its members are all of one task, and there is at least one."""
    episodes = [from_record(written) for written in record["episodes"]]
    return Group(record["id"], episodes[0].task, episodes)


def files_by_step(folder: Path, suffix: str) -> dict[int, Path]:
    """The files of a folder that are called `step_N` and end with `suffix`, by N. Others are no step's."""
    found = ((re.fullmatch(r"step_([0-9]{1,12})", path.stem), path) for path in folder.glob(f"step_*{suffix}"))
    return {int(name[1]): path for name, path in found if name}


def stage_name(name: str | None, learner: str) -> str:
    """The name of a stage: its own, or that of its learner, which may be in a file."""
    return name or Path(learner.partition(":")[0]).stem


def stage_folders(folder: Path, names: Sequence[str]) -> list[RunFolder]:
    """The folders of a run's stages, which have these `names`: the run's own, or a numbered sub-folder for each of
    several."""
    if len(names) == 1:
        return [RunFolder(folder)]
    return [RunFolder(folder / f"{number}-{name}") for number, name in enumerate(names, 1)]


def policy_of_run(folder: Path) -> Path:
    """The model folder that a run left, or its last stage; `folder` itself where it is no run's."""
    if not (folder / "config.yaml").is_file():
        return folder
    stages = read_yaml(folder / "config.yaml")["stages"]
    names = [stage_name(stage.get("name"), stage["learner"]["name"]) for stage in stages]
    trained = [own for own, stage in zip(stage_folders(folder, names), stages, strict=True) if stage["do"] == "train"]
    if not trained:
        raise ConfigError(f"run {folder} trains no policy")
    stage = trained[-1]
    if not (stage.model / "config.json").exists():
        last = stage.last_checkpoint()
        instead = f", or take its policy as it was: --model {last}" if last else ""
        raise ConfigError(
            f"run {folder} has not ended, so it has left no policy: envgym train --resume {folder}{instead}"
        )
    return stage.model


def check_form(checkpoint: Path) -> None:
    """Raise `RunError` for a checkpoint in the form that earlier versions wrote."""
    if (checkpoint / "controller.pickle").is_file() and not (checkpoint / CONTROLLER).is_file():
        raise RunError(
            f"checkpoint {checkpoint} was written by an earlier version of envgym, as a pickle, which may be code to "
            "run: only that version goes on with it"
        )


def run_of_checkpoint(checkpoint: Path) -> tuple[Path, int] | None:
    """The folder of the run that a checkpoint's path lies in, and which of its stages (from 0) left it; None where it
    lies in no run."""
    checkpoints = Path(os.path.abspath(checkpoint)).parent  # where it is a link to another disk, it is so by this name
    stage = checkpoints.parent
    if checkpoints.name != "checkpoints":
        return None
    if (stage / "config.yaml").is_file():
        return stage, 0
    number = stage.name.partition("-")[0]
    if number.isdecimal() and int(number) > 0 and (stage.parent / "config.yaml").is_file():
        return stage.parent, int(number) - 1
    return None
