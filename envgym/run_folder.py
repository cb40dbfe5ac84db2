"""The folder of a run, which a kill at any moment leaves readable."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from envgym.disk import flush_to_disk, replacement_file, write_atomically
from envgym.episodes.record import from_record, image_names, to_record
from envgym.errors import CheckpointDamaged, ConfigError, RunError
from envgym.images import FOLDER, RECORDED, ImageFolder
from envgym.loading import short_name
from envgym.types import Group, check_json
from envgym.yaml_files import read_yaml

CONTROLLER = "controller.json"
"""The controller's share of a checkpoint."""
FILES = "files.json"
"""The sizes in bytes of the ranks' files of a checkpoint, by name, written last."""
STOP = "stop"
"""A file in the run's folder that asks the run to stop."""
GROUP = "$group"
"""Key of a buffered group of episodes in the controller's state."""
IMAGE_SECONDS = 3600.0
"""Seconds for which an image stays after its last use, even if no file names it."""
DAMAGED = ".damaged"
"""Suffix of an unreadable checkpoint, once the run has resumed from an older one."""


class RunFolder:
    """The files of one stage of a run.

    config.yaml       the resolved configuration
    cells.py          the notebook cells that define its environment, agent or learner, if a notebook does
    metrics.jsonl     one object per training step
    rollouts/         every episode, one compressed columnar file per step
    held_out/         the episodes of the evaluations on held-out tasks, one file per evaluated step
    images/           the images of its episodes, each once, named by the SHA-256 of its file
    learned/          per step, advantages and trainer log-probabilities of their tokens
    events/           per step, times of its phases and of its episodes' waits, turns and env steps: lines of JSON
    checkpoints/      the states to resume from; `best` is a link to the best of them
    tokenizer.json    the policy's tokenizer, written at the start
    model/            the policy at the end, as a Hugging Face folder
    model_ema/        the moving average of its weights, with `learner.ema_decay`
    adapter/          the LoRA adapter, in peft's format; `model` has it merged
    logs/             the output of every child process
    changes.jsonl     the settings that changed when the run was resumed
    summary.json      the result, for scripts
    episodes.parquet  the episodes of a stage that samples or scores without training
    unfinished.jsonl  episodes of the current step, if it takes long
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.learned = path / "learned"
        self.images = ImageFolder(path / FOLDER)
        self.held_out = path / "held_out"
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
        append_lines(self.metrics_file, [record])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records written so far, without a last line that a kill truncated."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def write_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace all records."""
        write_atomically(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))

    def rewind(self, step: int) -> None:
        """Delete records and files of later steps, so that a resumed run continues as if uninterrupted."""
        self.write_metrics([record for record in self.read_metrics() if record["step"] <= step])
        for folder in (self.rollouts, self.learned, self.held_out, self.events):
            for number, path in files_by_step(folder, ".jsonl" if folder == self.events else ".parquet").items():
                if number > step:
                    path.unlink()

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.parquet"

    def learned_file(self, step: int) -> Path:
        return self.learned / f"step_{step:06d}.parquet"

    def held_out_file(self, step: int) -> Path:
        return self.held_out / f"step_{step:06d}.parquet"

    def remove_old_files(self, keep: Mapping[str, int | str | None]) -> None:
        """Remove all but the newest files of `rollouts` and `learned`: `keep` has a number of steps, a size (`20GB`),
        or None for all. The newest file always stays. Images go that no remaining file names."""
        has_removed = False
        for name, amount in keep.items():
            if amount is None:
                continue
            files, amount_so_far = files_by_step(self.path / name, ".parquet"), 0
            limit = TypeAdapter(ByteSize).validate_python(amount)
            for number, step in enumerate(sorted(files, reverse=True)):
                amount_so_far += 1 if isinstance(amount, int) else files[step].stat().st_size
                if number and amount_so_far > limit:
                    files[step].unlink()
                    has_removed |= name == "rollouts"
        if has_removed and self.images.path.is_dir():
            self._remove_old_images()

    def _remove_old_images(self) -> None:
        """Remove the images that no file of episodes and no checkpoint names. Recent ones stay: an episode that runs,
        or waits for its training step, may name them."""
        rollouts = files_by_step(self.rollouts, ".parquet").values()
        names = set[str]().union(*map(image_names, [*rollouts, *files_by_step(self.held_out, ".parquet").values()]))
        for checkpoint in self.saved_checkpoints():
            names.update(RECORDED.findall((checkpoint / CONTROLLER).read_text(encoding="utf-8")))
        times = [path.stat().st_mtime for path in rollouts]
        self.images.remove_others(names, min(*times, time.time() - IMAGE_SECONDS))

    def event_file(self, step: int) -> Path:
        """The file of a step's timed events."""
        return self.events / f"step_{step:06d}.jsonl"

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Save the tokenizer's file, if it has one: the model may be gone when the run is viewed."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and not self.tokenizer_file.exists():
            with replacement_file(self.tokenizer_file) as temporary:
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
        """An empty folder to write a checkpoint into, for `add_checkpoint`."""
        path = self.checkpoints / "unfinished"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def add_checkpoint(self, unnamed: Path, step: int, state: str, best: dict[str, Any] | None, keep: int) -> Path:
        """Add the controller's state (`state_to_json`), give the checkpoint its name in one rename, and delete all but
        the `keep` newest ones and the `best`, to which the link of that name points."""
        sizes = {str(path.relative_to(unnamed)): path.stat().st_size for path in unnamed.rglob("*") if path.is_file()}
        (unnamed / CONTROLLER).write_text(state, encoding="utf-8")
        (unnamed / FILES).write_text(json.dumps(sizes), encoding="utf-8")
        flush_to_disk(unnamed)  # before an older one is deleted: only what is flushed survives a power failure
        final = self._step_folder(step)
        replaced = final.with_suffix(".replaced")  # of the same step; valid until the new one is in place
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(unnamed, final)
        flush_to_disk(self.checkpoints, recursive=False)
        shutil.rmtree(replaced, ignore_errors=True)
        best = self.mark_best(best)
        best_folder = None if best is None else self._step_folder(best["step"])
        for old in {*self.saved_checkpoints()[:-keep]} - {best_folder}:
            shutil.rmtree(old, ignore_errors=True)  # another process may be reading its model: the next call retries
        return final

    def mark_best(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Point the link `best` to the checkpoint of `best["step"]`, in one rename, or remove it.

        Returns `best`, or None if that checkpoint no longer exists.
        """
        final = None if best is None else self._step_folder(best["step"])
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
        checkpoints = self.saved_checkpoints()
        return checkpoints[-1] if checkpoints else None

    def _step_folder(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def saved_checkpoints(self) -> list[Path]:
        """Readable checkpoints, oldest first; of the same step, the replaced one before the new one."""
        paths = (path for path in self.checkpoints.glob("step_*") if path.suffix != DAMAGED)
        return sorted(paths, key=lambda path: (path.stem, path.suffix == ""))

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        """The controller's state in a checkpoint of `add_checkpoint`. Raises `CheckpointDamaged` if it cannot be
        read."""
        file = checkpoint / CONTROLLER
        try:
            state = state_from_json(file.read_text(encoding="utf-8"))
            file = checkpoint / FILES
            for name, size in json.loads(file.read_text(encoding="utf-8")).items():
                if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != size:
                    raise CheckpointDamaged(f"{checkpoint / name} cannot be read (it is missing or truncated)")
            return state
        except OSError as error:
            raise CheckpointDamaged(f"{file} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(f"{file} cannot be read (it is truncated or corrupt: {error})") from None


def state_to_json(state: Mapping[str, Any]) -> str:
    """`Checkpoints.state` as text, safe to read from a stranger. Raises `RunError` for values that JSON lacks."""
    try:
        check_json(state.get("learner"), "the learner's state_dict()")
        return json.dumps(state, default=_group_to_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"a checkpoint cannot be saved: {error}. A learner's state_dict() may hold numbers, text, lists, and "
            "mappings with keys of text"
        ) from None


def state_from_json(text: str) -> dict[str, Any]:
    """The state in the text of `state_to_json`. Raises `ValueError`, `TypeError` or `KeyError` for any other text."""
    state = _with_groups(json.loads(text))
    if not isinstance(state, dict) or not isinstance(state["progress"]["step"], int):
        raise ValueError("it holds no controller state")
    return state


def _group_to_json(value: Any) -> Any:
    if not isinstance(value, Group):
        raise TypeError(f"it holds a {type(value).__name__}")
    # Values of a task that JSON lacks (dates) become text, as in the files of episodes.
    record = {"id": value.id, "episodes": [to_record(episode) for episode in value.episodes]}
    return {GROUP: json.loads(json.dumps(record, default=str))}


def _with_groups(value: Any) -> Any:
    """The state with its buffered groups (at least one episode each, all of the same task), and lists in place of the
    tuples of an earlier version."""
    if isinstance(value, list):
        return [_with_groups(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {GROUP}:
        episodes = [from_record(episode) for episode in value[GROUP]["episodes"]]
        return Group(value[GROUP]["id"], episodes[0].task, episodes)
    if value.keys() == {"$tuple"}:
        return _with_groups(value["$tuple"])
    return {key: _with_groups(item) for key, item in value.items()}


def files_by_step(folder: Path, suffix: str) -> dict[int, Path]:
    """The files `step_N` with this suffix in a folder, by N."""
    matches = ((re.fullmatch(r"step_([0-9]{1,12})", path.stem), path) for path in folder.glob(f"step_*{suffix}"))
    return {int(match[1]): path for match, path in matches if match}


def stage_name(name: str | None, learner: str) -> str:
    """A stage's name, by default its learner's, which may be in a file."""
    return name or short_name(learner)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each record to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def stage_folders(folder: Path, names: Sequence[str]) -> list[RunFolder]:
    """The folders of a run's stages: the run's own for a single stage, else numbered sub-folders."""
    if len(names) == 1:
        return [RunFolder(folder)]
    return [RunFolder(folder / f"{number}-{name}") for number, name in enumerate(names, 1)]


def stage_number(folder: str) -> int:
    """The number in the name of a stage's folder; 0 for any other name."""
    number = folder.partition("-")[0][:9]
    return int(number) if number.isascii() and number.isdecimal() else 0


def policy_of_run(folder: Path) -> Path:
    """The model folder of a run, from its last training stage; `folder` itself if it is no run's."""
    if not (folder / "config.yaml").is_file():
        return folder
    stages: Any = read_yaml(folder / "config.yaml").get("stages")
    try:
        names = [stage_name(stage.get("name"), stage["learner"]["name"]) for stage in stages]
        kinds = [stage.get("kind", "train") for stage in stages]
    except (AttributeError, KeyError, TypeError):  # written by hand, or another program's
        raise ConfigError(f"{folder} holds no model, and is not the folder of a run") from None
    trained = [path for path, kind in zip(stage_folders(folder, names), kinds, strict=True) if kind == "train"]
    if not trained:
        raise ConfigError(f"run {folder} trains no policy")
    stage = trained[-1]
    if not (stage.model / "config.json").exists():
        last = stage.last_checkpoint()
        alternative = f", or use the policy of its last checkpoint: --model {last}" if last else ""
        raise ConfigError(
            f"run {folder} has not ended, so it has no final policy: envgym train --resume {folder}{alternative}"
        )
    return stage.model


def run_of_checkpoint(checkpoint: Path) -> tuple[Path, int] | None:
    """The run folder that contains a checkpoint, and the index of its stage; None for a path outside a run."""
    checkpoints = Path(os.path.abspath(checkpoint)).parent  # not resolved: it may be a link to another disk
    stage = checkpoints.parent
    if checkpoints.name != "checkpoints":
        return None
    if (stage / "config.yaml").is_file():
        return stage, 0
    number = stage_number(stage.name)
    if number and (stage.parent / "config.yaml").is_file():
        return stage.parent, number - 1
    return None


def run_of_model(model: Path) -> tuple[Path, int] | None:
    """The run folder that contains a policy that training left (`model`, `model_ema`, a checkpoint's), and the index of
    its stage; None for any other folder."""
    stage = Path(os.path.abspath(model)).parent
    return run_of_checkpoint(stage) or run_of_checkpoint(stage / "checkpoints" / model.name)
