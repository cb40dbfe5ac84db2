"""Runs another framework's episodes in the framework's interpreter, each in a process of its own.

This program imports nothing of envgym but `processes/family.py`, by its path:

    PYTHON fork_server.py FAMILY.py PACKAGE==VERSION WORKER.py FOLDER

`WORKER.py` is a module with a function `load(settings)` and a coroutine function `run(call)`, both with JSON in and
out. Each message on the standard input, a socket, has a descriptor of a connection, for one request: a line of JSON.
The first has the settings for `load`; its answer is `{"loaded": {…}}` or `{"mistake": "…"}`. Then this process forks
for each call: an episode costs no import, and a crash ends that episode alone. Its answer is its result, and the
connection closes once all processes of the call have ended. It may be closed before, to end the call. `FOLDER` has the
temporary files. When the standard input ends, the server waits for the calls, and removes the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

GRACE_SECONDS = 10
"""Seconds in which an ended call may release what it holds elsewhere, such as a container."""
MISTAKES = (LookupError, ValueError, ImportError, OSError)
"""Errors of `load` that are mistakes of the user."""


def import_file(path: str) -> ModuleType:
    """Import the module at `path`, whose name is the file's."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_package(requirement: str) -> None:
    """Raise `ImportError` unless this interpreter has the package in the version, of which the last numbers may be
    missing."""
    name, _, version = requirement.partition("==")
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = "none"
    if not f"{installed}.".startswith(f"{version}."):
        needs = f"env.python needs {name} {version}, and has {installed}"
        raise ImportError(f"{needs}: install '{name}=={version}.*' in its virtual environment")


def accept(control: socket.socket) -> socket.socket:
    """The next connection. Raises `EOFError` when there will be no more."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise EOFError
    return socket.socket(fileno=descriptors[0])


def read_request(caller: socket.socket) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(caller.makefile("rb").readline())
    return request


def keep(family: ModuleType, server: int, worker: ModuleType, caller: socket.socket) -> None:
    """Keep a process that runs a call until all that descends from it has ended."""
    folder = tempfile.mkdtemp()
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    family.adopt_orphans()
    family.die_with(server, signal.SIGHUP)
    call, keeper, episode = read_request(caller), os.getpid(), os.fork()
    if episode == 0:
        family.die_with(keeper)
        run_call(worker, call, folder, caller)
    threading.Thread(target=end_with, args=[caller], daemon=True).start()
    if code := os.waitstatus_to_exitcode(family.keep(episode, GRACE_SECONDS)):
        died = f"signal {-code}" if code < 0 else f"status {code}"
        answer(caller, failure(f"its process ended with {died}"))
    remove(folder)


def remove(folder: str) -> None:
    """Remove a folder, also if folders in it are nested deeply or not readable."""
    script = 'chmod -R u+rwX -- "$0"; rm -rf -- "$0"'
    subprocess.run(["sh", "-c", script, folder], stderr=subprocess.DEVNULL, start_new_session=True)


def end_with(caller: socket.socket) -> None:
    """End the keeper's group of processes when the connection is closed at the other side."""
    with contextlib.suppress(OSError):
        caller.recv(1)
    os.killpg(0, signal.SIGTERM)


def run_call(worker: ModuleType, call: dict[str, Any], folder: str, caller: socket.socket) -> NoReturn:
    """Run a call in this process, with its temporary files in `folder`."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.chdir(folder)
        random.seed(call["seed"])
        # Not `asyncio.run`, which waits for threads that the framework may have left: they end with this process.
        answer(caller, asyncio.new_event_loop().run_until_complete(run_until_ended(worker, call)))
        os._exit(0)
    finally:
        os._exit(1)


async def run_until_ended(worker: ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """The result of a call, which SIGTERM cancels."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        result: dict[str, Any] = await worker.run(call)
    except Exception as error:
        traceback.print_exc()
        return failure(f"{type(error).__name__}: {error}")
    return result


def failure(message: str) -> dict[str, Any]:
    return {"failure": {"kind": "agent", "message": message}}


def answer(caller: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    with contextlib.suppress(OSError):  # it has hung up
        caller.sendall(data)


def main() -> NoReturn:
    family_file, package, worker_file, folder = sys.argv[1:]
    family, server = import_file(family_file), os.getpid()
    family.die_with(os.getppid(), signal.SIGHUP)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with accept(control) as caller:
        settings = read_request(caller)
        try:
            check_package(package)
            worker = import_file(worker_file)
            answer(caller, {"loaded": worker.load(settings)})
        except MISTAKES as error:
            traceback.print_exc()
            answer(caller, {"mistake": " ".join(str(error).split()) or type(error).__name__})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end without being waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, family.ENDING)  # keepers handle them; from here on it ends with its input
    with contextlib.suppress(EOFError):
        while True:
            with accept(control) as caller:
                if os.fork() == 0:
                    try:
                        control.close()
                        keep(family, server, worker, caller)
                    finally:
                        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all
    remove(folder)
    os._exit(0)


if __name__ == "__main__":
    main()
