"""The folder of a job, from which the job resumes: a kill at any moment loses no finished episode."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from envgym.config.schema import RunConfig
from envgym.config.words import differing_keys
from envgym.disk import folder_lock, write_atomically
from envgym.env import EnvSpec
from envgym.episodes.files import EpisodeKey, Journal, check_target, write_episodes
from envgym.errors import DataError, EnvgymError, RunError, WorkerError, extend_message, reported_as
from envgym.hashing import model_hash, task_hash
from envgym.images import FOLDER, ImageFolder
from envgym.rollout.runner import group_ids
from envgym.types import Episode, Task
from envgym.yaml_files import read_yaml

from .parts import Part


class JobFolder:
    """The files of a job; by default those of an evaluation.

    config.yaml      every part with its resolved settings
    episodes.jsonl   every episode, written when it ends
    result.json      the result, for scripts
    images/          the images of the episodes, each once
    logs/            the output of every child process
    """

    new_hint = "start a new evaluation"
    overwrite = False
    """Discard saved episodes that cannot be used, instead of raising an error."""

    def __init__(self, path: Path, images: Path | None = None) -> None:
        self.path = path
        self.images = ImageFolder(images or path / FOLDER)
        self.resume_hint = f"resume with: envgym eval --resume {path}"
        self.config_file = path / "config.yaml"
        self.result_file = path / "result.json"
        self.logs = path / "logs"
        self.journal = Journal(path / "episodes.jsonl", self.images)
        self.saved: dict[EpisodeKey, Episode] = {}
        """The episodes that need not be run again."""
        self.model_hash: str | None = None
        """Hash of the sampled weights (`check_model`)."""
        self._is_new = False

    def create(self, parts: Sequence[Part], suite: str | None = None) -> None:
        """Save the parts of a job without episodes. `open` deletes its folder if it ends without one."""
        with reported_as(RunError, f"folder {self.path} cannot be created"):
            self.path.mkdir(parents=True, exist_ok=True)
            saved = {"suite": suite, "parts": [part.model_dump(mode="json") for part in parts]}
            write_atomically(self.config_file, yaml.safe_dump(saved, sort_keys=False))
        self.suite, self.parts, self._is_new = suite, list(parts), True

    @functools.cached_property
    def suite(self) -> str | None:
        """The name of the suite; None for a single environment."""
        name: str | None = read_yaml(self.config_file).get("suite")
        return name

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The saved parts, all for one model. Raises `EnvgymError` if they cannot be read."""
        saved = read_yaml(self.config_file)
        try:
            return [Part(**part) for part in saved["parts"]]
        except (TypeError, ValueError, KeyError):
            problem = f"{self.config_file} is damaged, or not of this version of envgym ({version('envgym')})"
            raise RunError(f"{problem}: {self.new_hint}") from None

    @property
    def config(self) -> RunConfig:
        """The settings of the first part; all parts have its model and engine."""
        return self.parts[0].config

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder and load its episodes. However the block ends, keep the folder if it has episodes, else
        delete it if it is new. Ctrl-C and the errors of workers and disks name the folder and the command that resumes.

        Raises `RunError` if another command holds the lock, or the episodes cannot be read."""
        with folder_lock(self.path, "envgym"):
            try:
                self._load()
                yield
            except KeyboardInterrupt:
                raise KeyboardInterrupt(self._clean_up()) from None
            except WorkerError as error:
                raise extend_message(error, self._clean_up(keep_logs=True)) from None  # the error names a log file
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
                raise RunError(f"{problem}; {self._clean_up()}") from error
            except Exception:
                self._clean_up()
                raise

    def _load(self) -> None:
        self.logs.mkdir(exist_ok=True)
        try:
            self.saved = self.journal.originals()
        except DataError as error:
            self.discard(f"cannot be read ({error})")
        self.journal.open()

    def discard(self, problem: str) -> None:
        """Discard the saved episodes, for this `problem`. Raises `RunError` if they must not be lost."""
        if not self.overwrite:
            raise RunError(f"{self.path} holds episodes that {problem}: {self.new_hint}")
        self.journal.path.write_bytes(b"")
        self.saved = {}

    def check_tasks(self, purpose: str, tasks: Sequence[Task], spec: EnvSpec) -> None:
        """`discard` if the data or the environment changed since the saved episodes of `purpose` were run."""
        tasks_by_group = group_ids(purpose, tasks)
        fingerprint_of = functools.cache(lambda member: member.fingerprint())
        for episode in self.saved.values():
            if episode.purpose != purpose:
                continue
            task = tasks_by_group.get(episode.group_id)
            if task is None or episode.fingerprints.get("task") != task_hash(task):
                return self.discard(f"are of other tasks (one was {episode.task.key})")
            member = spec.spec_for(task)
            if not fingerprint_of(member).items() <= episode.fingerprints.items():
                return self.discard(f"were run before the code or the settings of environment {member.id} changed")
        return None

    def check_model(self, model: str) -> None:
        """`discard` if saved episodes were sampled from other weights than those of `model`."""
        self.model_hash = model_hash(model)
        if any(episode.fingerprints.get("model", "") != (self.model_hash or "") for episode in self.saved.values()):
            self.discard("were sampled before the model's weights changed")

    def write(self, episode: Episode) -> None:
        """Save an episode when it ends, and again after its group was judged."""
        if self.model_hash is not None:
            episode.fingerprints["model"] = self.model_hash
        self.journal.write(episode)

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result_file, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The last written result, if any. Raises `RunError` if the file is damaged."""
        if not self.result_file.exists():
            return None
        advice = "delete it to resume from the episodes"
        with reported_as(RunError, f"{self.result_file} is damaged", advice, cause=ValueError):
            result: dict[str, Any] = json.loads(self.result_file.read_text(encoding="utf-8"))
            if not isinstance(result, dict) or not {"status", "began", "seconds"} <= result.keys():
                raise ValueError("it holds no result")
            return result

    def _clean_up(self, *, keep_logs: bool = False) -> str:
        if self.journal.path.exists() and self.journal.path.stat().st_size:
            return self.describe_saved()
        has_logs = any(path.stat().st_size for path in self.logs.glob("*"))
        if self._is_new and not (keep_logs and has_logs):
            shutil.rmtree(self.path, ignore_errors=True)
        return "no episode was finished"

    def describe_saved(self) -> str:
        try:
            return f"{len(self.journal.originals())} episodes are saved in {self.path}; {self.resume_hint}"
        except DataError as error:
            return str(error)


class UnfinishedFile(JobFolder):
    """The folder `FILE.unfinished` of a job whose episodes become a file. Their images are in `FILE.images`."""

    new_hint = "name another file, or start again with --overwrite"

    def __init__(self, file: Path, part: Part, *, overwrite: bool) -> None:
        """Raises `EnvgymError` if the file could not be written in the end."""
        check_target(file, overwrite=overwrite)
        super().__init__(file.with_name(f"{file.name}.unfinished"), file.with_name(f"{file.name}.{FOLDER}"))
        self.resume_hint = "the same command resumes from there"
        self.file = file
        self.part = part
        self.overwrite = overwrite

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """As for any job. Raises `RunError`, unless they may be overwritten, if the episodes are of other settings."""
        with reported_as(RunError, f"{self.path}, the folder for unfinished episodes, cannot be created"):
            self.path.mkdir(exist_ok=True)
        with super().open():
            if self.saved and (problem := self._difference()):
                self.discard(problem)
            self.create([self.part])
            yield

    def _difference(self) -> str:
        """The problem of saved episodes that are not of this part, else ""."""
        if not self.config_file.exists() and (earlier := self.path / "settings.yaml").exists():
            return f"an earlier version of envgym saved, which can resume them (it wrote {earlier})"
        try:
            [saved] = self.parts
        except (EnvgymError, ValueError):
            return f"cannot be resumed, because {self.config_file} is missing or damaged"
        changed = differing_keys(saved.settings, self.part.settings).items()
        differences = [f"{key} was {old!r:.60} and is {new!r:.60}" for key, (old, new) in changed]
        return f"were run with other settings ({'; '.join(differences)})" if differences else ""

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Write the file and delete this folder. Raises `DataError`, which names this folder, if that fails."""
        try:
            write_episodes(self.file, episodes)
        except DataError as error:
            raise extend_message(error, self.describe_saved()) from None
        shutil.rmtree(self.path, ignore_errors=True)


def find_folder(name: str, evals_dir: str) -> JobFolder:
    """The evaluation of this name or path. Raises `RunError` if there is none."""
    for path in (Path(name), Path(evals_dir) / name):
        if (path / "config.yaml").is_file():
            if not read_yaml(path / "config.yaml").get("parts"):
                raise RunError(f"{path} is not the folder of an evaluation")
            return JobFolder(path)
    raise RunError(f"there is no evaluation {name!r} in {evals_dir}/, and no such folder")
