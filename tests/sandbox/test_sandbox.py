"""The sandbox: programs run and are reported on as they should be, limits hold, and its own trouble is said to be."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from envgym.errors import ConfigError, InvalidOutcome
from envgym.sandbox import Execution, Limits, Sandbox, jail

SMALL = Limits(cpu_seconds=1, wall_seconds=3, memory_mb=256, output_kb=64, disk_mb=4)
WAYS = ["namespaces", "landlock"]


def sandbox_by(way, limits=SMALL, **settings):
    """A sandbox that has only this kind of isolation to choose from."""
    sandbox = Sandbox(limits, **settings)
    sandbox._ways = ("confined",) if way == "landlock" else ("root", "user")
    return sandbox


def run_all(programs, way="namespaces", limits=SMALL, **settings):
    """The executions of (source, stdin, files) programs, all wanted at the same time."""

    async def main():
        async with sandbox_by(way, limits, **settings) as sandbox:
            assert sandbox.isolation.kind == way
            return await asyncio.gather(*(sandbox.run(*program) for program in programs))

    return asyncio.run(main())


def run(source, stdin="", files=None, way="namespaces", limits=SMALL, **settings) -> Execution:
    [execution] = run_all([(source, stdin, files)], way, limits, **settings)
    return execution


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what a program sees and what is reported -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_program_with_input_and_files(way):
    source = """
import sys, helper, os
print(input()[::-1], helper.x, open("data/b.bin", "rb").read(), sorted(os.listdir()))
print("oh", file=sys.stderr)
sys.exit(3)
"""
    execution = run(source, "olleh\n", {"helper.py": "x = 5", "data/b.bin": b"\xff\x00"}, way)
    assert execution.stdout == "hello 5 b'\\xff\\x00' ['data', 'helper.py', 'main.py']\n"
    assert (execution.stderr, execution.exit, execution.reason) == ("oh\n", 3, "error")
    assert 0 < execution.cpu < execution.seconds + 1


@pytest.mark.parametrize(
    ("source", "reason", "exit"),
    [
        ("pass", "ok", 0),
        ("1/0", "error", 1),
        ("def f(", "error", 1),
        ("import os; os._exit(7)", "error", 7),
        ("import os; os.kill(os.getpid(), 15)", "error", -15),
        ("import time; time.sleep(60)", "timeout", -signal.SIGKILL),
        ("x = bytearray(2**40)", "memory", 1),
        ("while True: print('x' * 1000)", "output", -signal.SIGKILL),
    ],
)
def test_reasons(source, reason, exit):
    execution = run(source)
    assert (execution.reason, execution.exit) == (reason, exit)


def test_a_busy_program_is_ended_at_its_limit():
    execution = run("while True: pass", limits=Limits(cpu_seconds=0.5, wall_seconds=1000))
    assert execution.reason == "timeout"
    assert execution.exit in (-signal.SIGXCPU, -signal.SIGKILL)  # the kernel's and the supervisor's clocks race


def test_output_is_text_whatever_was_written():
    execution = run("import os; os.write(1, b'\\xff\\x00ok'); os.write(2, 'ü'.encode())")
    assert (execution.stdout, execution.stderr) == ("\ufffd\x00ok", "ü")


def test_output_up_to_the_limit_is_kept():
    execution = run("print('x' * 10**6)")
    assert len(execution.stdout) == 64 * 1024
    assert execution.reason == "output"


def test_a_traceback_shows_the_lines_of_the_program():
    assert 'main.py", line 2' in run("x = 1\nundefined_name").stderr


@pytest.mark.parametrize("way", WAYS)
def test_the_environment_is_the_sandboxs_own(way, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    execution = run("import os; print(sorted(os.environ))", way=way)
    assert "SECRET" not in execution.stdout
    assert "'PYTHONHASHSEED'" in execution.stdout


def test_hashes_are_the_same_in_every_run():
    first, second = run_all([("print(list({'a', 'b', 'c', 'd', 'e'}), hash('x'))",)] * 2)
    assert first.stdout == second.stdout


@pytest.mark.parametrize("way", WAYS)
def test_packages_are_there_only_when_offered(way):
    source = "import numpy; print(numpy.arange(3).sum())"
    assert "No module named 'numpy'" in run(source, way=way).stderr
    execution = run(source, way=way, limits=Limits(memory_mb=1024), packages=["numpy"])
    assert (execution.stdout, execution.stderr) == ("3\n", "")


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="'no_such_package', which is not installed"):
        Sandbox(packages=["no_such_package"])


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_stay_in_the_programs_folder(name):
    with pytest.raises(ValueError, match="relative name"):
        run("pass", files={name: ""})


def test_a_program_has_namespaces_and_a_user_of_its_own():
    async def main():
        async with sandbox_by("namespaces") as sandbox:
            server = psutil.Process(sandbox._server._process.pid)
            task = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
            await asyncio.to_thread(wait_until, lambda: len(server.children(recursive=True)) == 3)
            [program] = [p.pid for p in server.children(recursive=True) if not p.children()]
            await asyncio.to_thread(wait_until, lambda: "main.py" in Path(f"/proc/{program}/cmdline").read_text())
            kinds = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
            shared = [k for k in kinds if os.readlink(f"/proc/{program}/ns/{k}") == os.readlink(f"/proc/self/ns/{k}")]
            status = dict(line.split(":\t") for line in Path(f"/proc/{program}/status").read_text().splitlines())
            task.cancel()
            return shared, status

    shared, status = asyncio.run(main())
    assert shared == []
    assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) == {"65534"}


# -- many at once -----------------------------------------------------------------------------------------


def test_hundreds_at_once_each_get_their_own_answer_and_few_run_at_a_time():
    """They overlap no more than allowed, by the clock that all programs share."""
    source = "import time; a = time.monotonic(); time.sleep(0.02); print(a, time.monotonic(), input())"
    executions = run_all([(source, str(number)) for number in range(120)], concurrency=4)
    spans = [tuple(map(float, execution.stdout.split()[:2])) for execution in executions]
    assert [execution.stdout.split()[2] for execution in executions] == [str(number) for number in range(120)]
    assert max(sum(start <= point < end for start, end in spans) for point, _ in spans) in (2, 3, 4)


def test_the_loop_is_never_blocked():
    async def main():
        async with sandbox_by("namespaces") as sandbox:
            # Each takes a while on the fastest machine too, so that the turns count what the loop can do meanwhile.
            program = "import time; time.sleep(0.1); print('x' * 50_000)"
            pending = asyncio.gather(*(sandbox.run(program) for _ in range(20)))
            turns = 0
            while not pending.done():
                await asyncio.sleep(0.001)
                turns += 1
            return turns

    assert asyncio.run(main()) > 60  # three a program; where each blocked the loop, there would be one


def test_it_belongs_to_no_event_loop():
    sandbox = sandbox_by("namespaces")
    outputs = [asyncio.run(sandbox.run(f"print({number})")).stdout for number in range(2)]
    asyncio.run(sandbox.close())
    assert outputs == ["0\n", "1\n"]


# -- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_who_stops_waiting_ends_the_program(way):
    async def main():
        async with sandbox_by(way, Limits(wall_seconds=60)) as sandbox:
            server = psutil.Process(sandbox._server._process.pid)
            task = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
            await asyncio.to_thread(wait_until, lambda: len(server.children(recursive=True)) >= 2)
            family = server.children(recursive=True)
            task.cancel()
            await asyncio.to_thread(wait_until, lambda: not any(p.is_running() for p in family))

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_when_the_owner_is_killed_nothing_is_left(way, tmp_path):
    script = f"""
import asyncio, sys
from envgym.sandbox import Limits, Sandbox
async def main():
    sandbox = Sandbox(Limits(wall_seconds=600))
    sandbox._ways = {("confined",) if way == "landlock" else ("root", "user")!r}
    await asyncio.gather(*(sandbox.run("import time; time.sleep(600)") for _ in range(2)))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script]) as owner:
        try:
            process = psutil.Process(owner.pid)
            wait_until(lambda: sum(get_name(p).startswith("python") for p in process.children(True)) >= 5)
            family = process.children(recursive=True)
        finally:
            owner.kill()
    wait_until(lambda: not any(lives(process) for process in family))


def get_name(process):
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_closing_ends_the_server():
    async def main():
        async with sandbox_by("namespaces") as sandbox:
            await sandbox.run("pass")
            server = psutil.Process(sandbox._server._process.pid)
        return server.is_running()

    assert not asyncio.run(main())


def test_a_landlocked_program_leaves_no_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir="/dev/shm"))  # a disk may take seconds
    nested_source = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w').write('x')"
    execution = run(nested_source, way="landlock", limits=Limits(files=3000))
    assert execution.reason == "ok", execution.stderr
    os.rmdir(tempfile.tempdir)


# -- trouble of its own -----------------------------------------------------------------------------------


def test_a_killed_server_is_replaced():
    async def main():
        async with sandbox_by("namespaces") as sandbox:
            sandbox._server._process.kill()
            await asyncio.to_thread(wait_until, lambda: not sandbox._server.alive())
            return await asyncio.gather(*(sandbox.run(f"print({number})") for number in range(3)))

    assert [execution.stdout for execution in asyncio.run(main())] == ["0\n", "1\n", "2\n"]


def test_a_killed_supervisor_is_nobodys_wrong_answer():
    async def main():
        async with sandbox_by("namespaces", Limits(wall_seconds=60)) as sandbox:
            server = psutil.Process(sandbox._server._process.pid)
            task = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
            killed: set[int] = set()
            while not task.done():
                await asyncio.sleep(0.02)
                for supervisor in server.children():
                    if supervisor.pid not in killed and supervisor.children(recursive=True):
                        family = supervisor.children(recursive=True)
                        killed.add(supervisor.pid)
                        supervisor.kill()
                        # What it kept goes with it.
                        await asyncio.to_thread(wait_until, lambda: not any(p.is_running() for p in family))  # noqa: B023
            assert len(killed) == 1
            await task

    with pytest.raises(InvalidOutcome, match="supervisor of a program died") as error:
        asyncio.run(main())
    assert (error.value.kind, error.value.retryable) == ("sandbox", True)


def test_a_program_that_cannot_be_set_up_is_nobodys_wrong_answer():
    with pytest.raises(InvalidOutcome, match="No space left on device") as error:
        run("pass", files={"large": b"x" * 2**23})
    assert error.value.kind == "sandbox"


def test_a_machine_without_isolation_is_refused():
    sandbox = Sandbox()
    sandbox._ways = ()
    with pytest.raises(ConfigError, match="cannot isolate programs here"):
        asyncio.run(sandbox.start())


def test_what_is_not_isolated_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    run("pass")
    [line] = [record for record in caplog.records if record.name == "envgym.sandbox.sandbox"]
    assert line.getMessage() == "sandbox (namespaces): programs share this machine's kernel, its clock and its CPUs"
    assert line.levelno == logging.INFO
    caplog.clear()
    sandbox = Sandbox()
    sandbox._ways = ("confined",)
    isolation = asyncio.run(sandbox.start())
    asyncio.run(sandbox.close())
    assert isolation.kind == "landlock"
    assert len(isolation.not_isolated) == 2
    [line] = [record for record in caplog.records if record.name == "envgym.sandbox.sandbox"]
    assert line.levelno == logging.WARNING


# -- another user -----------------------------------------------------------------------------------------

UNPRIVILEGED = """
import json, socket, subprocess, sys
sys.path.append({folder!r})
from jail import wire
control, theirs = socket.socketpair()
code = "import sys; sys.path.append(sys.argv[1]); from jail.server import main; main()"
server = subprocess.Popen([sys.executable, "-s", "-S", "-P", "-c", code, {folder!r}], stdin=theirs, env={{}})
theirs.close()
control.sendall(wire.pack({{"packages": {{}}, "ways": ["root", "user", "confined"], "temporary": "/tmp"}}))
hello, _ = wire.receive(control)
ours, theirs = socket.socketpair()
socket.send_fds(control, [b"+"], [theirs.fileno()])
theirs.close()
limits = dict(
    cpu_seconds=1.0, wall_seconds=3.0, memory_mb=256, output_kb=64, disk_mb=4, files=99, open_files=32, processes=4
)
program = b'''
import os
print(os.getuid(), sorted(os.listdir("/box")), os.path.exists("/etc/passwd"))
try:
    for _ in range(20):
        os.fork() or os.execv("/bin/sleep", ["sleep", "1"])
except OSError as error:
    print(type(error).__name__)
'''
ours.sendall(wire.pack({{"names": [], **limits}}, (program, b"")))
report, (stdout, stderr) = wire.receive(ours)
print(json.dumps([hello["way"], report["reason"], stdout.decode(), stderr.decode()]))
control.close()
server.wait(10)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; the other tests run as who you are")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="no Python that every user can run")
def test_it_needs_no_privileges(tmp_path):
    """The same as an ordinary user, who has the system's Python and nothing of ours but the jail."""
    jail_folder = Path(jail.__file__).parent
    tmp_path.chmod(0o755)
    (tmp_path / "jail").mkdir()
    for file in jail_folder.glob("*.*"):
        (tmp_path / "jail" / file.name).write_bytes(file.read_bytes())
    for parent in tmp_path.parents:
        if parent.owner() == "root" and parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    script = UNPRIVILEGED.format(folder=str(tmp_path))
    execution = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", script], user=4321, group=4321, extra_groups=[], cwd="/", timeout=30,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert execution.returncode == 0, execution.stderr
    assert "BlockingIOError" in execution.stdout
    assert execution.stdout.startswith('["user", "')
    assert "65534 ['shm', 'tmp', 'work'] False" in execution.stdout


def test_where_memory_runs_out_the_program_goes_and_not_the_training():
    def offered():
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip()

    async def main():
        async with sandbox_by("namespaces") as sandbox:
            pending = asyncio.create_task(sandbox.run("import time\ntime.sleep(1)"))
            observed = set()
            while not pending.done():
                observed |= set(offered())
                await asyncio.sleep(0.02)
            await pending
            return observed

    assert "1000" in asyncio.run(main())
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"
