"""Data sets of the Hugging Face hub: fetched by the `datasets` library, then read like a folder that it saved."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path

from envgym.disk import cache_folder, publish, work_folder
from envgym.errors import DataError, needs
from envgym.hashing import DIGITS
from envgym.hub import SECONDS, ask_hub

_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")


def is_hub_id(path: str) -> bool:
    """True if `path` is of the form ORG/NAME or ORG/NAME:CONFIG, and no path of this machine was meant: there is no
    folder ORG."""
    return bool(_ID.fullmatch(path)) and not path.endswith(_FILES) and not Path(path).parent.exists()


def fetched(name: str) -> Path:
    """The folder with a data set of the hub, in $ENVGYM_CACHE; of the version that `datasets` gives now, which without
    a network is the one it fetched last. Raises `DataError` where it cannot be had."""
    with needs("datasets", "datasets", f"{name}, a data set of the hub,"):
        import datasets
    of, _, config = name.partition(":")
    datasets.disable_progress_bars()
    logging.getLogger(__name__).warning(
        f"looking for {of} on the Hugging Face hub, for up to {SECONDS:g} s (there is no file of that name here)"
    )
    if problem := ask_hub(of, "README.md", "dataset"):
        datasets.config.HF_HUB_OFFLINE = True  # what was fetched before, and no waiting for the network
    try:
        found = datasets.load_dataset(of, config or None)
    except Exception as error:  # `datasets` raises errors of many libraries below it
        reason = f"the hub cannot be reached ({problem})" if problem else " ".join(str(error).split())[:300]
        raise DataError(f"there is no file {name}, and as a data set of the hub it cannot be had: {reason}") from None
    version = hashlib.sha256(json.dumps(found.cache_files, sort_keys=True).encode()).hexdigest()[:DIGITS]
    folder = cache_folder("datasets") / f"{re.sub(r'[^A-Za-z0-9.-]', '-', name)}-{version}"
    if not folder.is_dir():
        with work_folder(folder) as made:
            found.save_to_disk(made)
            publish(made, folder)
    return folder
