"""The settings that say where tasks come from, and which field is which."""

from __future__ import annotations

from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from envgym.errors import DataError
from envgym.loading import names_file
from envgym.settings import Settings

from .hub import is_hub_id


def _as_names(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


def _checked_template(template: str | None) -> str | None:
    if template is not None:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]  # raises for a lone brace
        if not fields:
            raise ValueError("a template says where the prompt goes with {}, or names a field: {question}")
        if wrong := [name for name in fields if name and not name.isidentifier()]:
            raise ValueError(f"{{{wrong[0]}}} is not the name of a field; a brace that is text is written twice")
    return template


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
"""A field's name, or several that it may have: the first one that the first row has."""
Template = Annotated[str | None, AfterValidator(_checked_template)]


class SourceConfig(Settings):
    """One source of tasks."""

    path: str | None = None
    """A file (JSONL, JSON, CSV, Parquet, Arrow), a folder of them, one that `datasets` saved, a data set of the hub
    (`ORG/NAME`, `ORG/NAME:CONFIG`), or a generator (`file.py:function`)."""
    split: str | None = None
    """The split to train on, where a folder has several. Unset: `train`."""
    test_path: str | None = None
    """A file or folder of held-out tasks, with the same fields. Prompts in it are dropped from training."""
    test_split: str | None = None
    """The held-out split, where a folder has several. Unset: `test` or `validation` where there is one."""
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the distinct prompts that is held out where there is neither a test path nor a test split."""
    prompt: Names = ()
    """Field of the prompt: text, or a list of chat messages. Unset: the first of the usual names the rows have."""
    answer: Names = ()
    """Field of the answer: text or a number. Unset: the first of the usual names the rows have."""
    id: str | None = None
    """Field of the task's id, which must be unique. Unset: the file's name and the line number."""
    difficulty: str | None = None
    """Field of the task's difficulty, a number, which a curriculum goes by."""
    template: Template = None
    """Text made of a prompt: `{}` stands for it, `{name}` for another field. Braces are written twice."""
    system: str | None = None
    """A system message put before every prompt that has none."""
    limit: int | None = Field(None, ge=1)
    """Rows to train on at most, from the start of the source."""
    endless: bool = False
    """The generator never ends: its rows are drawn as they are needed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endless and not (self.path and is_generator(self.path)):
            raise ValueError("only a generator (file.py:function) can be endless")
        if self.endless and self.limit is not None:
            raise ValueError("a generator with a limit is not endless")
        return self

    @model_serializer(mode="wrap")
    def _only_what_was_set(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write no defaults out: what a source leaves unset is as the others have it."""
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}

    def check_paths(self, key: str = "data") -> None:
        """Raise `DataError` for a path at which there is nothing; `key`: where these settings stand."""
        for name, path in (("path", self.path), ("test_path", self.test_path)):
            if path is None or path.startswith("stage:") or is_hub_id(path):  # what an earlier stage is yet to leave
                continue
            if not Path(path.rpartition(":")[0] if is_generator(path) else path).exists():
                hint = "" if set(path) & {".", "/"} else " (the name of a data set of the hub is ORG/NAME)"
                raise DataError(f"{key}.{name}: there is no file or folder {path}{hint}")


class MixedSourceConfig(SourceConfig):
    """One source of several. What it leaves unset is as the others have it."""

    weight: float | None = Field(None, gt=0)
    """Its share of the tasks, against the others' weights. Without weights an epoch has every task once."""


class DataConfig(SourceConfig):
    """Sources of tasks: one, or several by name, for all of which the other settings hold."""

    sources: dict[str, MixedSourceConfig] = Field({})
    """Several sources: `sources.NAME.path`, `sources.NAME.weight`, …"""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if bool(self.path) == bool(self.sources):
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

    def each(self) -> dict[str, SourceConfig]:
        """The sources by name, with what holds for all filled in; the only one has the name "".

        A test path that holds for all is in none of them: it is read once.
        """
        common = self.model_dump(exclude={"sources"})
        if not self.sources:
            return {"": SourceConfig(**common)}
        common.pop("test_path", None)
        return {name: MixedSourceConfig(**{**common, **source.model_dump()}) for name, source in self.sources.items()}

    def check_paths(self, key: str = "data") -> None:
        super().check_paths(key)
        for name, source in self.sources.items():
            source.check_paths(f"{key}.sources.{name}")


def is_generator(path: str) -> bool:
    """True if `path` names a function in a Python file, which yields rows."""
    return names_file(path)
