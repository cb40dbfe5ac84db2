"""Processes that tests look for, or wait for."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """False of one that has ended and waits to be reaped, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_listening(process: subprocess.Popen[bytes], ports: list[int], log: Path, seconds: float = 90) -> None:
    """Wait until a process that writes to `log` answers at all of the ports."""
    deadline = time.monotonic() + seconds
    for port in ports:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
