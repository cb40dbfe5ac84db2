"""Rows at a path: one file, a folder of shards, or a folder with splits, which `datasets` may have saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from envgym.errors import DataError, did_you_mean

from .rows import ChainedRows, JsonLines, Rows, TableRows

SHARDS = (".jsonl", ".parquet")
TABLES = (".parquet", ".arrow")
TRAIN = "train"
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of held-out splits, the likeliest first."""
_NUMBERED = re.compile(r"[-_.]?\d+(-of-\d+)?$")


def open_rows(path: Path, split: str | None = None, limit: int | None = None) -> Rows:
    """The first `limit` rows of the file or folder at `path`, of one of its splits where it has some.

    Without `split` that is `train`, and everything where there are no splits. Raises `DataError`.
    """
    if not path.is_dir():
        if split is not None:
            raise DataError(f"{path} is not a folder with splits, so there is no split {split!r} in it")
        return _open_file(path, path.stem, limit)
    splits = splits_of(path)
    if split is None and TRAIN in splits:
        split = TRAIN
    if split is None and (is_saved_dict(path) or any(name in splits for name in HELD_OUT)):
        raise DataError(f"{path} has the splits {', '.join(splits)}: choose one with data.split")
    if split is not None and split not in splits:
        has = f"only {', '.join(splits)}" if splits else "as it has no splits"
        raise DataError(f"{path} has no split {split!r}, {has}.{did_you_mean(split, splits)}")
    parts: list[Rows] = []
    for file in _files(path, split):
        left = None if limit is None else limit - sum(map(len, parts))
        if left != 0:
            # Files of one name in different folders need different ids.
            parts.append(_open_file(file, _stem(path, file), left))
    return ChainedRows(parts)


def splits_of(path: Path) -> list[str]:
    """The names of the splits in a folder; empty where it is no folder or holds one data set."""
    if not path.is_dir() or _is_saved(path):
        return []
    if is_saved_dict(path):
        return [str(name) for name in _read_json(path / "dataset_dict.json", "splits")]
    names = dict.fromkeys(_split_name(path, file) for file in _shards(path))
    return list(names) if len(names) > 1 or names.keys() & {TRAIN, *HELD_OUT} else []


def test_split_of(path: Path, split: str | None) -> str | None:
    """The split that is held out where training is on `split`, by the usual names; None where there is none."""
    splits = splits_of(path)
    return next((name for name in HELD_OUT if name in splits and name != split), None)


def is_saved_dict(path: Path) -> bool:
    """True if `datasets` saved a DatasetDict here."""
    return (path / "dataset_dict.json").is_file()


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file()


def _files(path: Path, split: str | None) -> list[Path]:
    """The data files of a folder, in order."""
    if _is_saved(path):
        files = [path / str(entry["filename"]) for entry in _read_json(path / "state.json", "_data_files")]
    elif is_saved_dict(path):
        files = _files(path / str(split), None)
    else:
        files = [file for file in _shards(path) if split is None or _split_name(path, file) == split]
    if not files:
        raise DataError(f"{path} holds no data: neither .jsonl or .parquet files nor a data set saved by `datasets`")
    return files


def _shards(path: Path) -> list[Path]:
    found = [file for suffix in SHARDS for file in path.rglob(f"*{suffix}")]
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _split_name(path: Path, file: Path) -> str:
    """The sub-folder a shard lies in, or its own name without its number; hub folders keep shards in `data`."""
    folders = [part for part in file.relative_to(path).parts[:-1] if part != "data"]
    return folders[0] if folders else _NUMBERED.sub("", file.stem)


def _stem(path: Path, file: Path) -> str:
    if _is_saved(path) or is_saved_dict(path):
        return f"{file.parent.name}-{file.stem}"
    return file.relative_to(path).with_suffix("").as_posix()


def _open_file(path: Path, stem: str, limit: int | None) -> Rows:
    if not path.is_file():
        raise DataError(f"there is no data file {path}")
    return TableRows(path, stem, limit) if path.suffix in TABLES else JsonLines(path, stem, limit)


def _read_json(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what `datasets` writes there ({error!r:.100})") from None
    if not isinstance(value, list):
        raise DataError(f"{path}: not what `datasets` writes there ({key} is no list)")
    return value
