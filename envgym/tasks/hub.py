"""Data sets of the Hugging Face hub: fetched by the `datasets` library, then read like a folder that it saved."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from envgym.disk import cache_folder, publish, work_folder
from envgym.errors import DataError, needs
from envgym.hashing import text_hash
from envgym.hub import SECONDS, ask_hub

_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")


def is_hub_id(path: str) -> bool:
    """True if `path` has the form ORG/NAME[:CONFIG][@REVISION], and there is no local folder ORG."""
    return bool(_ID.fullmatch(path)) and not path.endswith(_FILES) and not Path(path).parent.exists()


def fetch_data_set(name: str) -> Path:
    """Save a data set of the hub in $ENVGYM_CACHE and return the folder. Without a network it is the version that
    `datasets` loaded last. Raises `DataError` if there is none."""
    with needs("datasets", "datasets", f"{name}, a data set of the hub,"):
        import datasets
    address, _, revision = name.partition("@")
    repo, _, config = address.partition(":")
    datasets.disable_progress_bars()
    logging.getLogger(__name__).warning(
        f"looking for {repo} on the Hugging Face hub, for up to {SECONDS:g} s (there is no file of that name here)"
    )
    if problem := ask_hub(repo, "README.md", "dataset"):
        datasets.config.HF_HUB_OFFLINE = True  # use the cache, do not wait for the network
    try:
        data_set = datasets.load_dataset(repo, config or None, revision=revision or None)
    except Exception as error:  # `datasets` raises errors of many other libraries
        reason = (
            f"the hub cannot be reached ({problem}); files work: data.path=FILE, data.test_path=HELD_OUT_FILE"
            if problem
            else " ".join(str(error).split())[:300]
        )
        if "gated" in reason:
            reason = f"{repo} is given only to users who accept its terms on its page and log in (hf auth login)"
        raise DataError(f"there is no file {name}, and no data set of the hub could be loaded: {reason}") from None
    version = text_hash(json.dumps(data_set.cache_files, sort_keys=True))
    folder = cache_folder("datasets") / f"{re.sub(r'[^A-Za-z0-9.-]', '-', name)}-{version}"
    if not folder.is_dir():
        with work_folder(folder) as temporary:
            data_set.save_to_disk(temporary)
            publish(temporary, folder)
    return folder
