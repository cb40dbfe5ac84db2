"""Processes that tests look for."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """False of one that has ended and waits to be reaped, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
