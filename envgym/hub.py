"""The Hugging Face hub without waiting for a network: whether it answers, and the local cache of it."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

from .errors import ConfigError

SECONDS = 10.0
"""Deadline for the hub's answer. Its own library retries five times per file, which takes minutes."""


def find_on_hub(name: str) -> str:
    """The name under which libraries load a model of the hub: `name` if the hub answers, else the model's folder in the
    local cache, so that nothing waits for the network. Raises `ConfigError` if there is neither."""
    problem = ask_hub(name, "config.json")
    if not problem:
        return name
    if (folder := fetched_model(name)) is None:
        hint = f" (runs/{name} is a run)" if Path("runs", name).is_dir() else ""
        raise ConfigError(
            f"there is no model folder {name} here{hint}, and the Hugging Face hub cannot be reached ({problem}): give "
            "the path of a folder, or check the network (HTTPS_PROXY, HF_ENDPOINT)"
        )
    return str(folder)


def fetched_model(name: str) -> Path | None:
    """The folder of a hub model in the local cache, if it is there."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not installed, no hub id, or not in the cache
        return None


def optional_file(model: str, name: str) -> Path | None:
    """A file of a model (a folder or hub id) that only some models have; None without it, and without the hub."""
    from transformers.utils import cached_file

    may_be_missing = {f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors")}
    file = cached_file(model, name, **may_be_missing)
    return None if file is None else Path(file)


def ask_hub(name: str, file: str, kind: str = "model") -> str:
    """Ask the hub about a file of `name`, and return the problem that prevented an answer; empty after any answer in
    time, also a negative one."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each retry
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    # In a thread, because the system's name lookup has no deadline.
    threading.Thread(target=lambda: problems.put(_ask(name, file, kind)), daemon=True).start()
    try:
        return problems.get(timeout=SECONDS)
    except queue.Empty:
        return f"it has not answered for {SECONDS:g} s"


def _ask(name: str, file: str, kind: str) -> str:
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=SECONDS)
    except ImportError:
        return ""  # loading the model reports the missing package
    except Exception as error:  # of the HTTP library, or of the hub, which then has answered
        response = getattr(error, "response", None)
        if response is None or response.status_code >= 500:
            return " ".join(str(error).split())[:200] or type(error).__name__
    return ""
