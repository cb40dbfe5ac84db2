"""One program from start to end: its limits are enforced, its output collected, its end reported."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from . import confined, linux, namespaces
from .program import Host, Program, Streams, report

CHECK_SECONDS = 0.2
"""Time between two looks at the memory and the CPU time of all the program's processes together."""
END_SECONDS = 10.0
"""Time that the kernel may take to end killed processes."""
_CHUNK = 2**16
_TICKS = os.sysconf("SC_CLK_TCK")


class Abandoned(Exception):
    """The one who wanted the program run has hung up."""


@dataclass(slots=True)
class Run:
    """A program under way. `reason` says which limit ended it."""

    program: Program
    caller: socket.socket
    process: int
    started: float
    output: dict[int, bytearray]
    status: int
    notes: bytearray = field(default_factory=bytearray)
    """JSON lines from the processes around the program (see `program.report`)."""
    reason: str = ""


def play(way: str, program: Program, host: Host, caller: socket.socket) -> tuple[dict[str, Any], bytes, bytes]:
    """Run a program to its end: what to report, its output and its errors.

    The report says `failed` where the trouble is the sandbox's and nothing is known about the program. Raises
    `Abandoned` once `caller` hangs up; nothing of the program is left then either.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(confined.folder(host)) if way == "confined" else ""
        kills = _out_of_memory_kills()
        pipes = [os.pipe() for _ in range(3)]
        started = time.monotonic()
        if way != "confined":
            linux.unshare(linux.CLONE_NEWPID, "process namespaces")  # its next child is process 1
        process = os.fork()
        if process == 0:
            _enter(way, folder, program, host, pipes)
        for _, writer in pipes:
            os.close(writer)
        stdout, stderr, status = (reader for reader, _ in pipes)
        run = Run(program, caller, process, started, {stdout: bytearray(), stderr: bytearray()}, status)
        try:
            _watch(run)
        finally:
            _, wait_status, used = _end(process)
        seconds = time.monotonic() - started
        for stream in (stdout, stderr, status):
            while _read(run, stream):
                pass
        noted: dict[str, Any] = {}
        for line in bytes(run.notes).splitlines():
            noted |= json.loads(line)
        if way == "confined":
            noted = {"status": wait_status, "cpu": used.ru_utime + used.ru_stime, **noted}
        verdict = {"seconds": seconds, **_verdict(run, noted, _out_of_memory_kills() - kills)}
        return verdict, bytes(run.output[stdout]), bytes(run.output[stderr])


def _enter(way: str, folder: str, program: Program, host: Host, pipes: list[tuple[int, int]]) -> None:
    """In the child: whatever goes wrong until the program runs is reported. Never returns."""
    streams = Streams(*(writer for _, writer in pipes))
    try:
        for reader, _ in pipes:
            os.close(reader)
        _offer_to_the_out_of_memory_killer()
        if way == "confined":
            confined.become_program(folder, program, host, streams)
        namespaces.become_init(way, program, host, streams)
    except BaseException as error:
        report(streams, failed=f"{type(error).__name__}: {error}")
    finally:
        os._exit(127)


def _watch(run: Run) -> None:
    """Return when the program has ended, or has passed a limit."""
    ended = os.pidfd_open(run.process)
    poll = select.poll()
    for descriptor in (ended, run.caller.fileno(), run.status, *run.output):
        poll.register(descriptor, select.POLLIN)
    deadline = run.started + run.program.wall
    next_check = run.started + CHECK_SECONDS
    while not run.reason:
        ready = {
            descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(deadline, next_check) - time.monotonic()))
        }
        for stream in ready & {run.status, *run.output}:
            if not _read(run, stream):
                poll.unregister(stream)
        if run.caller.fileno() in ready:
            raise Abandoned
        if ended in ready:
            break
        now = time.monotonic()
        if now >= deadline:
            run.reason = "timeout"
        elif now >= next_check:
            next_check = now + CHECK_SECONDS
            n, memory, cpu = usage(run.process, run.program.processes + 1, run.program.memory)
            if n > run.program.processes + 1:  # with process 1; older kernels do not hold programs to this limit
                run.reason = "processes"
            elif memory > run.program.memory:
                run.reason = "memory"
            elif cpu > run.program.cpu:
                run.reason = "timeout"
    os.close(ended)


def _read(run: Run, stream: int) -> bool:
    """Take what there is to read; False at the end of the stream. What is over the limit is dropped."""
    chunk = os.read(stream, _CHUNK)
    if stream == run.status:
        run.notes += chunk
        return bool(chunk)
    room = run.program.output - sum(map(len, run.output.values()))
    run.output[stream] += chunk[:room]
    if len(chunk) > room:
        run.reason = run.reason or "output"
    return bool(chunk)


def _end(process: int) -> tuple[int, int, Any]:
    """Kill what still runs, and wait until all of it has ended: process 1 ends last."""
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while True:
        ended = os.wait4(process, os.WNOHANG)
        if ended[0]:
            return ended
        if time.monotonic() > deadline:
            raise TimeoutError(f"the kernel did not end a killed program within {END_SECONDS:.0f} s")
        time.sleep(0.001)


def _verdict(run: Run, noted: dict[str, Any], kills: int) -> dict[str, Any]:
    """`reason`, `exit` and `cpu` of a program that ended, or what `failed`."""
    if "failed" in noted:
        return {"failed": noted["failed"]}
    if "status" not in noted and not run.reason:
        return {"failed": "the program's keeper was killed from outside"}
    code = os.waitstatus_to_exitcode(noted["status"]) if "status" in noted else -signal.SIGKILL
    cpu = noted.get("cpu", 0.0)
    if run.reason:
        reason = run.reason
    elif code == 0:
        reason = "ok"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= run.program.cpu):
        reason = "timeout"
    elif code == -signal.SIGKILL and kills:
        return {"failed": "the machine ran out of memory and the kernel killed programs"}
    elif _last_line(run).startswith(b"MemoryError"):
        reason = "memory"
    else:
        reason = "error"
    return {"reason": reason, "exit": code, "cpu": cpu}


def _last_line(run: Run) -> bytes:
    _, errors = run.output.values()
    return bytes(errors).rstrip().rpartition(b"\n")[2]


def _offer_to_the_out_of_memory_killer() -> None:
    """If the machine runs out of memory after all, this program is to go, not the training."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("1000")
    except OSError:
        pass  # a read-only /proc


def _out_of_memory_kills() -> int:
    """Processes that the kernel has killed for memory since this machine started."""
    with open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def usage(root: int, n_enough: int, memory_enough: int) -> tuple[int, int, float]:
    """The number of processes from `root` down, the bytes they hold, and seconds of CPU time, also of ended ones.

    Counts no further than the first process over `n_enough`. Memory that processes share is counted for each of them,
    unless that comes to more than `memory_enough`: then it is shared out, which takes longer to find out.
    """
    memory = 0
    cpu = 0.0
    processes = _tree(root, n_enough)
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                # After the name, which may hold anything: utime, stime, and both of the children waited for.
                fields = file.read().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS
            memory += _resident(process)
        except OSError:
            continue  # it has ended
    if memory > memory_enough:
        memory = sum(_exact(process) for process in processes)
    return len(processes), memory, cpu


def _tree(root: int, n_enough: int) -> list[int]:
    found = [root]
    for process in found:  # grows as children are found
        if len(found) > n_enough:
            break
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                    found.extend(map(int, file.read().split()))
        except OSError:
            continue
    return found


def _resident(process: int) -> int:
    return _of_lines(f"/proc/{process}/status", (b"RssAnon:", b"RssShmem:"))


def _exact(process: int) -> int:
    try:
        return _of_lines(f"/proc/{process}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    except PermissionError:
        return _resident(process)
    except OSError:
        return 0  # it has ended


def _of_lines(path: str, names: tuple[bytes, ...]) -> int:
    """Bytes that the lines with these names come to; each gives kilobytes."""
    with open(path, "rb") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(names))
