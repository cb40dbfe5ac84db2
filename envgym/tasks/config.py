"""Settings of the sources of tasks and their fields."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from envgym.disk import cache_folder, publish, work_folder
from envgym.errors import DataError, reported_as
from envgym.hashing import DIGITS
from envgym.loading import is_file_target
from envgym.settings import Settings, as_list
from envgym.types import ImagePart

from .hub import is_hub_id

_ITEM = re.compile(r"\[\w+\]")
IMAGE_FIELDS = ("images", "image")
"""Usual names of the field of a row's images."""


def _as_names(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


def _checked_template(template: str | None) -> str | None:
    if template is not None:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]  # a lone brace is an error
        if not fields:
            raise ValueError("a template has {} in place of the prompt, or names a field: {question}")
        if invalid := [name for name in fields if name and not _ITEM.sub("", name).isidentifier()]:
            raise ValueError(f"{{{invalid[0]}}} is not the name of a field; a brace that is text is written twice")
    return template


def _checked_pattern(pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            n_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if n_groups != 1:
            raise ValueError(f"the pattern has one group (…), which is the answer, not {n_groups}")
    return pattern


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
"""The name of a field, or several possible names. Of these, the first that a source's first row has is used."""
Template = Annotated[str | None, AfterValidator(_checked_template)]
Pattern = Annotated[str | None, AfterValidator(_checked_pattern)]


class Range(Settings):
    """Numbers from `min` to `max`, both included."""

    min: float | None = None
    max: float | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        return (self.min is None or self.min <= value) and (self.max is None or value <= self.max)


Selection = dict[str, Range | Annotated[list[Any], BeforeValidator(as_list)]]
"""Allowed values by field: a list, or a range."""


class SourceConfig(Settings):
    """One source of tasks."""

    path: str | None = None
    """A file (JSONL, JSON, CSV, Parquet, Arrow), a folder of files or of a saved data set, a data set of the hub
    (`ORG/NAME`, `ORG/NAME:CONFIG`, and `@REVISION` after either), or a generator (`file.py:function`). Unset, with a
    test path: no tasks to train on."""
    split: str | None = None
    """The split to train on, if a folder has several. Unset: `train`."""
    test_path: str | None = None
    """A file or folder of held-out tasks, with the same fields. Prompts in it are dropped from training."""
    test_split: str | None = None
    """The held-out split, if a folder has several. Unset: `test` or `validation`, if there is one."""
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the distinct prompts that is held out without a test path or test split."""
    select: Selection = Field({})
    """The rows to use, by the values of fields: `select.level=[4,5]`, or numbers from `select.level.min` to
    `select.level.max`."""
    test_select: Selection = Field({})
    """The same for the rows of the test path or test split. Unset: as `select`."""
    prompt: Names = ()
    """Field of the prompt: text, or a list of chat messages. Unset: the first usual name that the rows have."""
    answer: Names = ()
    """Field of the reference answer: text or a number. Unset: the first usual name that the rows have."""
    images: Names = IMAGE_FIELDS
    """Field of a row's images, one or a list: files' content, as `datasets` has it, data URIs, or paths. They stand at
    the parts of type `image` or the marks `<image>` of the prompt, or before its text. Null: no field."""
    image_folder: str | None = None
    """Folder that the paths of images begin at and may not leave. Unset: that of the file of rows."""
    answer_pattern: Pattern = None
    """A regular expression with one group, which is the answer in the text of its field (`9` in `9 (apples)`)."""
    id: str | None = None
    """Field of the task's id, which must be unique. Unset: the file's name and the line number."""
    difficulty: str | None = None
    """Field of the task's difficulty, a number, for a curriculum."""
    template: Template = None
    """Text to make of a prompt: `{}` is the prompt, `{name}` another field, `{name[0]}` the first item of a list. Other
    braces are written twice."""
    system: str | None = None
    """A system message for every prompt that has none."""
    bad_rows: Literal["error", "skip"] = "error"
    """Rows with a mistake: `error` ends the start with the first one, `skip` leaves them out and counts them by
    kind."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows to train on, from the start of the source."""
    endless: bool = False
    """The generator never ends: rows are drawn when needed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endless and not (self.path and is_generator(self.path)):
            raise ValueError("only a generator (file.py:function) can be endless")
        if self.endless and self.limit is not None:
            raise ValueError("a generator with a limit is not endless")
        return self

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit defaults: a source inherits its unset settings."""
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}

    def check_paths(self, key: str = "data") -> None:
        """Raise `DataError` for a path that does not exist; `key` is the settings' own."""
        for name, path in (("path", self.path), ("test_path", self.test_path)):
            if path is None or path.startswith("stage:") or is_hub_id(path):  # an earlier stage writes it
                continue
            if not Path(path.rpartition(":")[0] if is_generator(path) else path).exists():
                hint = "" if set(path) & {".", "/"} else " (the name of a data set of the hub is ORG/NAME)"
                raise DataError(f"{key}.{name}: there is no file or folder {path}{hint}")


class MixedSourceConfig(SourceConfig):
    """One source of several. It inherits its unset settings from `data`."""

    weight: float | None = Field(None, gt=0)
    """Its share of the tasks, relative to the other weights. Without weights an epoch has every task once."""


class DataConfig(SourceConfig):
    """Sources of tasks: one, or several by name, which inherit the other settings."""

    sources: dict[str, MixedSourceConfig] = Field({})
    """Several sources: `sources.NAME.path`, `sources.NAME.weight`, …"""
    folder: str | None = None
    """Only for a named task set: the folder that holds its files, `NAME_train.jsonl` and `NAME_test.jsonl`, or
    `NAME.jsonl`."""
    few_shot: int = Field(0, ge=0)
    """Training tasks that every prompt shows first, each with its right answer; of a training task's prompt others."""
    few_shot_seed: int = 0
    """Seed that draws them from all training tasks."""
    few_shot_select: Selection = Field({})
    """The rows to take them from, in their order, by the values of fields. Unset: the training tasks, at random."""
    few_shot_split: str | None = None
    """The split that has these rows, if a folder has several. Unset: as `split`."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        return data_settings(value)

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.folder is not None:
            raise ValueError("data.folder holds the files of named task sets; this is none: set data.path")
        if (self.path and self.sources) or not (self.path or self.sources or self.test_path):
            raise ValueError("give data.path, or data.sources.NAME.path for each of several")
        if missing := [name for name, source in self.sources.items() if not source.path]:
            raise ValueError(f"data.sources.{missing[0]}.path is missing")
        weights = {name: source.weight for name, source in self.sources.items()}
        if None in weights.values() and set(weights.values()) != {None}:
            missing = [name for name, weight in weights.items() if weight is None]
            raise ValueError(f"give all sources a weight or none: data.sources.{missing[0]}.weight is missing")
        if None in weights.values() and any(source.endless for source in self.sources.values()):
            raise ValueError("with an endless source all sources need a weight")
        return self

    def common_settings(self, **settings: Any) -> dict[str, Any]:
        """The settings that sources inherit, with `settings` in their place."""
        return self.model_dump(include={*SourceConfig.model_fields}) | settings

    def of_examples(self) -> DataConfig:
        """The rows of `few_shot_select`, none of which is held out by chance."""
        settings = self.common_settings(select=self.few_shot_select, test_fraction=0.0)
        settings |= {"split": self.few_shot_split} if self.few_shot_split else {}
        return DataConfig(**{name: value for name, value in settings.items() if name not in ("test_path", "limit")})

    def resolved_sources(self) -> dict[str, SourceConfig]:
        """The sources by name, with the inherited settings; the name of a single one is "".

        A common test path is in none of them: it is read once.
        """
        common = self.common_settings()
        if not self.sources:
            return {"": SourceConfig(**common)}
        common.pop("test_path", None)
        return {name: MixedSourceConfig(**{**common, **source.model_dump()}) for name, source in self.sources.items()}

    def check_paths(self, key: str = "data") -> None:
        super().check_paths(key)
        for name, source in self.sources.items():
            source.check_paths(f"{key}.sources.{name}")


def data_settings(value: Any) -> Any:
    """The settings `data` in their full form. They may be a path, or rows: a list of mappings or a data set of the
    `datasets` package. So may `path` and `test_path`. Rows are written to a file in the cache, their images (files'
    content, `pathlib.Path`, PIL, arrays) as data URIs.

    Raises `DataError` for a list of anything but mappings, and for rows that are not JSON.
    """
    if not isinstance(value, Mapping):
        return {"path": _as_path(value)} if isinstance(value, str | Path) or _holds_rows(value) else value
    paths = {name: _as_path(value[name]) for name in ("path", "test_path") if name in value}
    return {**value, **paths}


def _holds_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "column_names")


def _as_path(value: Any) -> Any:
    """A path as text; rows as the path of a file that holds them, named by the hash of its content."""
    if not _holds_rows(value):
        return str(value) if isinstance(value, Path) else value
    if "Image(" in str(getattr(value, "features", "")):  # as they are stored, instead of decoded
        value = (row for table in value.with_format("arrow") for row in table.to_pylist())
    digest = hashlib.sha256()
    with work_folder(cache_folder("rows") / uuid.uuid4().hex) as new_folder:
        with (new_folder / "rows.jsonl").open("wb") as file:
            for row in value:
                if not isinstance(row, Mapping):
                    raise DataError(
                        f'a row of data is a mapping, {{"question": "…", "answer": "…"}} say, not {row!r:.60}'
                    )
                with reported_as(DataError, "a row of data cannot be written as JSON", cause=TypeError):
                    line = f"{json.dumps(dict(row), default=_as_data_uri)}\n".encode()
                digest.update(line)
                file.write(line)
            if not file.tell():
                raise DataError("data has no rows")
        publish(new_folder, folder := cache_folder("rows") / digest.hexdigest()[:DIGITS])
    return str(folder / "rows.jsonl")


def _as_data_uri(value: Any) -> str:
    """An image in a row, as text. Raises `TypeError` for anything else that JSON does not have, `DataError` for a file
    that is no image."""
    try:
        return ImagePart.from_value(value).data_uri()
    except TypeError:
        raise TypeError(f"Object of type {type(value).__name__} is no image either") from None
    except ValueError as error:
        raise DataError(f"a row of data: {error}") from None


def is_generator(path: str) -> bool:
    """True if `path` names a function in a Python file: one that yields rows."""
    return is_file_target(path)
