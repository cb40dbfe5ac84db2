"""One program from start to end: the supervisor enforces its limits, collects its output and reports its end."""

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
from .program import HostPaths, Program, Streams, report

CHECK_SECONDS = 0.2
"""Interval of checks of the total memory and CPU time of the program's processes."""
END_SECONDS = 10.0
"""Maximum time for the kernel to end killed processes."""
_CHUNK = 2**16
_TICKS = os.sysconf("SC_CLK_TCK")


class Abandoned(Exception):
    """The caller has closed the connection."""


@dataclass(slots=True)
class RunningProgram:
    """A running program. `reason` is the limit that ended it, if any."""

    program: Program
    caller: socket.socket
    process: int
    started: float
    output: dict[int, bytearray]
    status: int
    notes: bytearray = field(default_factory=bytearray)
    """JSON lines from the program's parent processes (see `program.report`)."""
    reason: str = ""


def run_program(
    way: str, program: Program, host: HostPaths, caller: socket.socket
) -> tuple[dict[str, Any], bytes, bytes]:
    """Run a program to its end. Returns the report, its output and its errors.

    The report has `failed` if the sandbox failed, so that nothing is known about the program. Raises `Abandoned` once
    `caller` hangs up; the program's processes and files are removed in any case.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(confined.program_folder(host)) if way == "confined" else ""
        kills = _out_of_memory_kills()
        pipes = [os.pipe() for _ in range(3)]
        started = time.monotonic()
        if way != "confined":
            linux.unshare(linux.CLONE_NEWPID, "process namespaces")  # its next child is process 1
        process = os.fork()
        if process == 0:
            _become_program(way, folder, program, host, pipes)
        for _, writer in pipes:
            os.close(writer)
        stdout, stderr, status = (reader for reader, _ in pipes)
        run = RunningProgram(program, caller, process, started, {stdout: bytearray(), stderr: bytearray()}, status)
        try:
            _watch(run)
        finally:
            _, wait_status, rusage = _end(process)
        seconds = time.monotonic() - started
        for stream in (stdout, stderr, status):
            while _read(run, stream):
                pass
        notes: dict[str, Any] = {}
        for line in bytes(run.notes).splitlines():
            notes |= json.loads(line)
        if way == "confined":
            notes = {"status": wait_status, "cpu": rusage.ru_utime + rusage.ru_stime, **notes}
        verdict = {"seconds": seconds, **_verdict(run, notes, _out_of_memory_kills() - kills)}
        return verdict, bytes(run.output[stdout]), bytes(run.output[stderr])


def _become_program(way: str, folder: str, program: Program, host: HostPaths, pipes: list[tuple[int, int]]) -> None:
    """Become the program in the child; report errors until it runs. Never returns."""
    streams = Streams(*(writer for _, writer in pipes))
    try:
        for reader, _ in pipes:
            os.close(reader)
        offer_to_the_out_of_memory_killer()
        if way == "confined":
            confined.become_program(folder, program, host, streams)
        namespaces.become_init(way, program, host, streams)
    except BaseException as error:
        report(streams, failed=f"{type(error).__name__}: {error}")
    finally:
        os._exit(127)


def _watch(run: RunningProgram) -> None:
    """Wait until the program ends or exceeds a limit, which becomes its `reason`. Raises `Abandoned` once the caller
    hangs up."""
    pidfd = os.pidfd_open(run.process)
    poll = select.poll()
    for descriptor in (pidfd, run.caller.fileno(), run.status, *run.output):
        poll.register(descriptor, select.POLLIN)
    deadline = run.started + run.program.wall_seconds
    next_check = run.started + CHECK_SECONDS
    while not run.reason:
        seconds = max(0.0, min(deadline, next_check) - time.monotonic())
        readable = {descriptor for descriptor, _ in poll.poll(1000 * seconds)}
        for stream in readable & {run.status, *run.output}:
            if not _read(run, stream):
                poll.unregister(stream)
        if run.caller.fileno() in readable:
            raise Abandoned
        if pidfd in readable:
            break
        current = time.monotonic()
        if current >= deadline:
            run.reason = "timeout"
        elif current >= next_check:
            next_check = current + CHECK_SECONDS
            max_memory = run.program.memory_mb * 2**20
            n, memory, cpu = usage(run.process, run.program.processes + 1, max_memory)
            if n > run.program.processes + 1:  # with process 1; older kernels do not enforce this limit
                run.reason = "processes"
            elif memory > max_memory:
                run.reason = "memory"
            elif cpu > run.program.cpu_seconds:
                run.reason = "timeout"
    os.close(pidfd)


def _read(run: RunningProgram, stream: int) -> bool:
    """Read available output; False at the end of the stream. Output over the limit is dropped, and a reason to end the
    program."""
    chunk = os.read(stream, _CHUNK)
    if stream == run.status:
        run.notes += chunk
        return bool(chunk)
    capacity = run.program.output_kb * 2**10 - sum(map(len, run.output.values()))
    run.output[stream] += chunk[:capacity]
    if len(chunk) > capacity:
        run.reason = run.reason or "output"
    return bool(chunk)


def _end(process: int) -> tuple[int, int, Any]:
    """Kill the program's processes and wait for their end: process 1 ends last. Returns the result of `wait4`; raises
    `TimeoutError`."""
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while True:
        result = os.wait4(process, os.WNOHANG)
        if result[0]:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"the kernel did not end a killed program within {END_SECONDS:.0f} s")
        time.sleep(0.001)


def _verdict(run: RunningProgram, notes: dict[str, Any], kills: int) -> dict[str, Any]:
    """`reason`, `exit` and `cpu` of a program that ended, or `failed`."""
    if "failed" in notes:
        return {"failed": notes["failed"]}
    if "status" not in notes and not run.reason:
        return {"failed": "the program's keeper was killed from outside"}
    code = os.waitstatus_to_exitcode(notes["status"]) if "status" in notes else -signal.SIGKILL
    cpu = notes.get("cpu", 0.0)
    _, errors = run.output.values()
    if run.reason:
        reason = run.reason
    elif code == 0:
        reason = "ok"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= run.program.cpu_seconds):
        reason = "timeout"
    elif code == -signal.SIGKILL and kills:
        return {"failed": "the machine ran out of memory and the kernel killed programs"}
    elif bytes(errors).rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        reason = "memory"
    else:
        reason = "error"
    return {"reason": reason, "exit": code, "cpu": cpu}


def offer_to_the_out_of_memory_killer() -> None:
    """If the machine runs out of memory, let the kernel kill this program, not the training."""
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

    Stops counting at the first process over `n_enough`. Shared memory counts for each process, unless the sum exceeds
    `memory_enough`: then it is divided among them, which takes longer to compute.
    """
    memory = 0
    cpu = 0.0
    processes = _tree(root, n_enough)
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                # After the name, which may hold any character: utime, stime, and both of waited-for children.
                fields = file.read().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS
            memory += _resident(process)
        except OSError:
            continue  # it has ended
    if memory > memory_enough:
        memory = sum(_proportional(process) for process in processes)
    return len(processes), memory, cpu


def _tree(root: int, n_enough: int) -> list[int]:
    """The processes from `root` down; the search stops at the first over `n_enough`."""
    processes = [root]
    for process in processes:  # grows as children are found
        if len(processes) > n_enough:
            break
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                    processes.extend(map(int, file.read().split()))
        except OSError:
            continue
    return processes


def _resident(process: int) -> int:
    return _sum_lines(f"/proc/{process}/status", (b"RssAnon:", b"RssShmem:"))


def _proportional(process: int) -> int:
    try:
        return _sum_lines(f"/proc/{process}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    except PermissionError:
        return _resident(process)
    except OSError:
        return 0  # it has ended


def _sum_lines(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of the lines with these names, in bytes; each is in kilobytes."""
    with open(path, "rb") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(names))
