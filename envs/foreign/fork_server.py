"""Runs another framework's episodes in the framework's interpreter, each in a process of its own.

This program imports nothing of envgym but `processes/family.py`, by its path:

    PYTHON fork_server.py PARENT FAMILY.py PACKAGE==VERSION WORKER.py FOLDER

`WORKER.py` is a module with a function `load(settings)` and a coroutine function `run(call)`, both with JSON in and
out. `load` is called once; then this process forks for each call: an episode costs no import, and a crash ends that
episode alone. The protocol is lines of JSON. On standard input: the settings, then `{"id": 1, "call": {…}}`, and
`{"id": 1}` to end a call. On standard output: `{"loaded": {…}}` or `{"mistake": "…"}`, then `{"id": 1, "result": {…}}`
once all processes of that call have ended. `FOLDER` has the temporary files. The server ends with `PARENT`, or when
standard input ends, and removes the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

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


class RunningCall(NamedTuple):
    """A call, and the process that keeps all of its processes and ends with the last of them."""

    id: int
    keeper: int


class ForkServer:
    """Forks for each call and answers in the order in which calls end."""

    def __init__(self, family: ModuleType, worker: ModuleType, folder: str, requests: int, answers: int) -> None:
        self._family = family
        self._worker = worker
        self._folder = folder
        self._requests = requests
        self._answers = answers
        self._calls: dict[int, RunningCall] = {}
        """The running calls by the descriptors of their keepers."""
        self._is_open = True

    def answer(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # its reader is gone, and this server is about to end
            while data:
                data = data[os.write(self._answers, data) :]

    def serve(self) -> None:
        """Answer requests until their stream ends, then end all calls."""
        text = b""
        while self._is_open or self._calls:
            poll = select.poll()
            for descriptor in [*self._calls, *([self._requests] if self._is_open else [])]:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor in self._calls:
                    self._finish(descriptor)
                elif chunk := os.read(self._requests, 2**20):
                    *lines, text = (text + chunk).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                else:
                    self.close()

    def close(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Take no more requests and end all calls; also as a signal's handler."""
        self._is_open = False
        self._end_calls()

    def _end_calls(self, id: int | None = None) -> None:
        """End the call of an id, or all. Its processes may take `GRACE_SECONDS`."""
        for call in self._calls.values():
            if id in (None, call.id):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(call.keeper, signal.SIGTERM)

    def _take(self, request: dict[str, Any]) -> None:
        if "call" not in request:
            self._end_calls(request["id"])
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, self._family.ENDING)  # until the keeper handles them
        server, keeper = os.getpid(), os.fork()
        if keeper == 0:
            self._keep(server, f"{self._folder}/{request['id']}", request["call"])
        with contextlib.suppress(OSError):  # the keeper does this too: whichever comes first
            os.setpgid(keeper, keeper)
        self._calls[os.pidfd_open(keeper)] = RunningCall(request["id"], keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._family.ENDING)

    def _keep(self, server: int, folder: str, call: dict[str, Any]) -> NoReturn:
        """Keep a process that runs the call until all that descends from it has ended."""
        try:
            os.setpgid(0, 0)
            self._family.adopt_orphans()
            self._family.die_with(server, signal.SIGHUP)
            os.mkdir(folder)
            keeper, episode = os.getpid(), os.fork()
            if episode == 0:
                self._family.die_with(keeper)
                run_call(self._worker, call, folder)
            code = os.waitstatus_to_exitcode(self._family.keep(episode, GRACE_SECONDS))
            if not os.path.exists(f"{folder}.json"):
                died = f"signal {-code}" if code < 0 else f"status {code}"
                write_result({"failure": {"kind": "agent", "message": f"its process ended with {died}"}}, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    def _finish(self, descriptor: int) -> None:
        """Answer a call whose keeper has ended."""
        call = self._calls.pop(descriptor)
        os.close(descriptor)
        os.waitpid(call.keeper, 0)
        result, file = None, Path(f"{self._folder}/{call.id}.json")
        with contextlib.suppress(OSError, ValueError):  # it was ended, or died
            result = json.loads(file.read_bytes())
        file.unlink(missing_ok=True)
        self.answer({"id": call.id, "result": result})


def run_call(worker: ModuleType, call: dict[str, Any], folder: str) -> NoReturn:
    """Run a call in this process, with its temporary files in `folder`, and write the result beside that."""
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGTERM})
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.chdir(folder)
        random.seed(call["seed"])
        # Not `asyncio.run`, which waits for threads that the framework may have left: they end with this process.
        write_result(asyncio.new_event_loop().run_until_complete(run_until_ended(worker, call)), folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def write_result(result: dict[str, Any], folder: str) -> None:
    text = json.dumps(result)
    Path(f"{folder}.json").write_text(text, encoding="utf-8")


async def run_until_ended(worker: ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """The result of a call, which SIGTERM cancels."""
    task = asyncio.ensure_future(worker.run(call))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        result: dict[str, Any] = await task
    except Exception as error:
        traceback.print_exc()
        return {"failure": {"kind": "agent", "message": f"{type(error).__name__}: {error}"}}
    return result


def main() -> None:
    parent, family_file, package, worker_file, folder = sys.argv[1:]
    family = import_file(family_file)
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of the framework must not mix with the answers

    def end(*signal_and_frame: object) -> NoReturn:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    for number in family.ENDING:
        signal.signal(number, end)
    family.die_with(int(parent), signal.SIGHUP)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    settings = json.loads(os.fdopen(os.dup(requests), "rb", buffering=0).readline())
    try:
        check_package(package)
        worker = import_file(worker_file)
        loaded = worker.load(settings)
    except MISTAKES as error:
        traceback.print_exc()
        text = " ".join(str(error).split()) or type(error).__name__
        os.write(answers, json.dumps({"mistake": text}).encode() + b"\n")
        end()
    server = ForkServer(family, worker, folder, requests, answers)
    for number in family.ENDING:
        signal.signal(number, server.close)
    server.answer({"loaded": loaded})
    server.serve()
    end()


if __name__ == "__main__":
    main()
