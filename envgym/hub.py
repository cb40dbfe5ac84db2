"""The Hugging Face hub, where there may be no network: whether it answers, and what was fetched from it before."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

from .errors import ConfigError

SECONDS = 10.0
"""Time in which the hub must answer. Its own library tries six times for each file, which takes minutes."""


def find_on_hub(name: str) -> str:
    """The model `name` as libraries are to load it: the name where the hub answers, else the folder of what was fetched
    of it before, so that nothing waits for the network. Raises `ConfigError` where there is neither."""
    problem = ask_hub(name, "config.json")
    if not problem:
        return name
    if (folder := fetched_model(name)) is None:
        raise ConfigError(
            f"there is no model folder {name} here, and the Hugging Face hub cannot be reached ({problem}): give the "
            "path of a folder, or see to the network (HTTPS_PROXY, HF_ENDPOINT)"
        )
    return str(folder)


def fetched_model(name: str) -> Path | None:
    """The folder of what was fetched of a model of the hub; None where nothing was."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not installed, no hub id, or nothing of it here
        return None


def ask_hub(name: str, file: str, kind: str = "model") -> str:
    """Ask the hub about a file of `name`, and return what kept it from answering; nothing where it answered in time,
    whatever it said."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry; our line says all
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    # A thread, as nothing bounds the time in which the system looks a name up.
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
        return ""  # who loads the model says what is missing
    except Exception as error:  # of the HTTP library below, or of the hub, which then has answered
        response = getattr(error, "response", None)
        if response is None or response.status_code >= 500:
            return " ".join(str(error).split())[:200] or type(error).__name__
    return ""
