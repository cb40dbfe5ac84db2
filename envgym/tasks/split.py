"""Reads the tasks of the data settings and splits them by prompt, so that no prompt is in both splits."""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from envgym.errors import DataError
from envgym.hashing import source_hash, text_hash
from envgym.types import Task

from .columns import DEFAULT_FIELDS, KEYS, FieldNames, Form, TaskReader, key_of
from .config import DataConfig, SourceConfig, is_generator
from .generators import EndlessTasks, read_generator
from .interleave import InProportion, Interleaved, Joined
from .large_files import RowIndex
from .reading import PartReader, read_rows
from .rows import Rows, open_rows, test_split_of
from .task_set import GeneratedTasks, TaskList, TaskSet

_Reader = Callable[..., TaskReader]
"""Factory of a source's reader: `reader(settings, prefix=…)`."""
INDEXED = 100_000
"""Rows of a file from which on its index is saved: reading so many takes a second."""
KINDS = 5
"""Maximum number of kinds of rows left out that a message lists, the most frequent first."""


@dataclass(frozen=True, slots=True)
class TaskSplits:
    """Train and held-out tasks, which share no prompt. Without a path to train on, `train` is empty."""

    train: TaskSet
    test: TaskSet
    held_out: frozenset[int] = frozenset()
    """Keys of the held-out prompts. An endless source cannot list its own."""
    columns: str = ""
    """Columns of the sources in words, by their use."""


def load_tasks(
    config: DataConfig, *, answer_required: bool = True, form: Form | None = None,
    field_names: FieldNames = DEFAULT_FIELDS, held_out_elsewhere: Collection[int] = (),
) -> TaskSplits:  # fmt: skip
    """Read and split the tasks of `config`. Every row is checked, except those of an endless generator.

    With `answer_required` every row needs an answer, text or a number; else it may be any value, or missing (None).
    `form` reads rows in another program's form. `field_names` are possible names of prompt and answer, if the settings
    set none. Prompts with the keys `held_out_elsewhere` are not trained on. Raises `DataError` with file and line of
    a bad row. Reads whole files: call it in a thread.
    """
    reader: _Reader = partial(TaskReader, answer_required=answer_required, form=form, field_names=field_names)
    held_out = _HeldOut(set(held_out_elsewhere))
    common = SourceConfig(**config.common_settings())
    common_test = partial(_File, str(config.test_path), config.test_split, common, "", reader, is_test=True)
    if config.path is None and not config.sources:
        test_file = common_test()
        return TaskSplits(TaskList([]), test_file.into(held_out), frozenset(test_file.keys), test_file.reader.columns)
    sources: list[_Finite | _Endless] = []
    for name, settings in config.resolved_sources().items():
        kind = _Endless if settings.endless else _Finite
        sources.append(kind(settings, f"{name}/" if name else "", reader))
    if config.sources and config.test_path is not None:
        tests: list[TaskSet] = [common_test().into(held_out)]
    else:
        tests = [source.hold_out(held_out) for source in sources]
    trains = [source.train(held_out) for source in sources]
    keys = frozenset(held_out.keys)
    columns = "; ".join(dict.fromkeys(source.file.reader.columns for source in sources if isinstance(source, _Finite)))
    if len(sources) == 1:
        return TaskSplits(trains[0], tests[0], keys, columns)
    weights = [source.weight for source in config.sources.values() if source.weight is not None]
    test = InProportion(tests, weights if len(tests) == len(weights) else [1.0 + (part.size or 0) for part in tests])
    return TaskSplits(Interleaved(trains, weights) if weights else Joined(trains), test, keys, columns)


@dataclass(slots=True)
class _HeldOut:
    """Keys of the prompts that no source may train on."""

    keys: set[int] = field(default_factory=set)
    bound: int = 0
    """All keys below it are held out too: an endless source cannot list its keys."""

    def __contains__(self, key: int) -> bool:
        return key < self.bound or key in self.keys

    def indices_without(self, file: _File) -> array[int]:
        """Indices of a file's rows whose prompts are not held out."""
        bound, held_out, last = self.bound, self.keys, max(self.keys, default=-1)  # comparisons are faster than the set
        rows = zip(file.indices, file.keys, strict=True)
        return array("Q", (i for i, key in rows if key >= bound and (key > last or key not in held_out)))


class _File:
    """The rows at a path, the `indices` of those that are used, and their prompts' keys. Every row has been read once;
    the used ones are valid."""

    def __init__(
        self, path: str, split: str | None, settings: SourceConfig, prefix: str, reader: _Reader,
        limit: int | None = None, is_test: bool = False,
    ) -> None:  # fmt: skip
        self.path = path
        selection, skips = (settings.test_select if is_test else {}) or settings.select, settings.bad_rows == "skip"
        bound = None if selection or skips else limit  # a limit counts the rows that are used
        rows = read_generator(path, bound) if is_generator(path) else open_rows(Path(path), split, bound)
        self.reader = reader(settings, prefix=prefix)
        name, index = None, None
        if len(rows) >= INDEXED and (versions := (rows.fingerprint(), self.reader.fingerprint())) and all(versions):
            name = text_hash(f"{versions} {limit} {is_test} {source_hash([_File, Rows, PartReader])}")
            index = RowIndex.load(name)
        if index is None:
            index = read_rows(rows, self.reader, selection, limit)
            if name is not None and not index.facts["reader"]["images"]:  # they change without this file
                index = index.saved(name)
        self.reader.restore(index.facts["reader"])
        left_out = Counter[str](index.facts["left out"])
        self.keys = index.keys
        self.rows = rows
        self.indices: Sequence[int] = range(len(rows)) if len(index.indices) == len(rows) else index.indices
        counts = "; ".join(f"{count:,}, as {reason}" for reason, count in left_out.most_common(KINDS))
        if not self.keys:
            values = " with the values of data.select" if selection else ""
            raise DataError(f"{path} holds no rows{values} to use" + (f"; left out: {counts}" if counts else ""))
        log = logging.getLogger(__name__)
        for note, count in self.reader.notes.items():
            log.warning("%s: %s (%d rows)", path, note, count)
        if counts:
            log.warning("%s: %d of %d rows are left out: %s", path, left_out.total(), len(rows), counts)

    @property
    def is_a_game(self) -> bool:
        """True if rows in another program's form all have the same prompt: a game draws its problem at each reset."""
        return self.reader.form is not None and min(self.keys) == max(self.keys)

    def key_by_row(self) -> None:
        """Use keys of whole rows instead of prompts; if these are equal too, keys of row numbers."""
        # All rows are read from the beginning to the end, which is faster than row by row.
        rows = self.rows if isinstance(self.indices, range) else map(self.rows.__getitem__, self.indices)
        keys = [key_of(json.dumps(row, sort_keys=True, default=str)) for row in rows]
        if len(set(keys)) == 1:
            keys = [key_of(f"{self.path} {index}") for index in range(len(keys))]
        self.keys = array("Q", keys)

    def tasks(self, indices: Sequence[int], reader: TaskReader | None = None) -> TaskSet:
        """Tasks read from the rows at `indices`, on demand."""
        rows, reader = self.rows, reader or self.reader

        def read(index: int) -> Task:
            number = indices[index]
            return reader.read(rows[number], rows.location(number), rows.name(number))[0]

        return GeneratedTasks(read, len(indices))

    def into(self, held_out: _HeldOut) -> TaskSet:
        """Hold all of it out."""
        held_out.keys.update(self.keys)
        return self.tasks(self.indices)


class _Source:
    """One source. All sources hold out their tasks before the first one selects its training tasks: `hold_out` returns
    the held-out tasks and adds their keys to the common ones; `train` returns those that no source holds out, and
    raises `DataError` if none remain."""

    def __init__(self, settings: SourceConfig, prefix: str, reader: _Reader) -> None:
        self.settings, self.prefix, self.reader = settings, prefix, reader
        self.path = str(settings.path)

    def open_test(self) -> _File | None:
        """The held-out file or split of the settings, or a split with a usual name, if there is one."""
        path, split = self.settings.test_path or self.path, self.settings.test_split
        if self.settings.test_path is None and split is None:
            split = None if is_generator(path) else test_split_of(Path(path), self.settings.split)
            if split is None:
                return None
        return _File(path, split, self.settings, self.prefix, self.reader, is_test=True)


class _Finite(_Source):
    def __init__(self, settings: SourceConfig, prefix: str, reader: _Reader) -> None:
        super().__init__(settings, prefix, reader)
        self.file = _File(self.path, settings.split, settings, prefix, reader, settings.limit)
        self._n_held_out = 0
        self._is_a_game = self.file.is_a_game
        if self._is_a_game:
            self.file.key_by_row()

    def hold_out(self, held_out: _HeldOut) -> TaskSet:
        if (test := self.open_test()) is not None:
            if self._is_a_game:
                test.key_by_row()
            return test.into(held_out)
        if self._is_a_game and len(self.file.keys) == 1 and self.settings.test_fraction:
            # The only row, with another id, by which other seeds are drawn.
            reader = self.reader(self.settings, prefix=f"{self.prefix}held-out/")
            return self.file.tasks(self.file.indices, reader)
        drawn = self._draw_held_out()
        held_out.keys |= drawn
        last = max(drawn, default=-1)
        rows = zip(self.file.indices, self.file.keys, strict=True)
        indices = array("Q", (index for index, key in rows if key <= last and key in drawn))
        self._n_held_out = len(indices)
        return self.file.tasks(indices)

    def train(self, held_out: _HeldOut) -> TaskSet:
        keys, path = self.file.keys, self.path
        remaining = held_out.indices_without(self.file)
        if not remaining:
            test = self.settings.test_path or "the held-out tasks"
            raise DataError(f"{path}: every prompt is also in {test}, so there is nothing to train on")
        if dropped := len(keys) - len(remaining) - self._n_held_out:
            logging.getLogger(__name__).warning(
                "%d of the %d tasks of %s are held out elsewhere: they are not trained on", dropped, len(keys), path
            )
        return self.file.tasks(remaining)

    def _draw_held_out(self) -> set[int]:
        """The prompts with small keys: duplicates stay in one split, and new rows move no old one."""
        if self.settings.test_fraction == 0:
            return set()
        if not (drawn := draw_held_out(self.file.keys, self.settings.test_fraction)):
            raise DataError(
                f"{self.path}: all rows have one prompt, so none can be held out: "
                "set data.test_path, or data.test_fraction=0 (and eval.every=0) to train without"
            )
        return drawn


def draw_held_out(keys: Sequence[int], fraction: float) -> set[int]:
    """The small keys, about a fraction of all. With a handful that may be none or all: one is kept on either side, a
    single one for training."""
    bound = fraction * KEYS
    return ({key for key in keys if key < bound} | {min(keys)}) - {max(keys)}


class _Endless(_Source):
    """An endless generator, which holds out prompts by their key alone."""

    def hold_out(self, held_out: _HeldOut) -> TaskSet:
        if (test := self.open_test()) is not None:
            return test.into(held_out)
        bound = round(self.settings.test_fraction * KEYS)
        held_out.bound = max(held_out.bound, bound)
        return self._tasks(lambda key: key < bound) if bound else TaskList([])

    def train(self, held_out: _HeldOut) -> TaskSet:
        return self._tasks(lambda key: key not in held_out)

    def _tasks(self, is_in_split: Callable[[int], bool]) -> EndlessTasks:
        return EndlessTasks(self.path, self.reader(self.settings, prefix=self.prefix), is_in_split)
