"""A box: commands that share files and processes, and nothing of this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from envgym.sandbox import jail

PROGRAM = "import sys; sys.path.append(sys.argv[1]); from jail.box import main; main()"
USER = 54321


class Box:
    """A box with one writable folder, made by this process's user or by an ordinary one."""

    def __init__(self, folder, way):
        self.folder = folder / "app"
        self.folder.mkdir()
        python, user = sys.executable, {}
        if way == "user" and os.geteuid() == 0:
            python, user = "/usr/bin/python3", {"user": USER, "group": USER, "extra_groups": []}
            os.chown(self.folder, USER, USER)
        elif way == "root":
            os.chown(self.folder, 65534, 65534)
        shutil.copytree(Path(jail.__file__).parent, folder / "jail", ignore=shutil.ignore_patterns("__pycache__"))
        self.control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [python, "-B", "-s", "-S", "-P", "-c", PROGRAM, str(folder)]
        with end:
            self.process = subprocess.Popen(words, stdin=end.fileno(), env={}, cwd="/", start_new_session=True, **user)
        self.control.send(
            json.dumps({"way": way, "folders": {"/app": str(self.folder), "/tmp": str(self.folder)}}).encode()
        )
        assert json.loads(self.control.recv(2**16)) == {}

    def start(self, command, output):
        """Start a command; gives the socket that tells its end."""
        caller, end = socket.socketpair()
        with end, open(os.devnull, "rb") as stdin:
            request = {"words": ["bash", "-c", command], "cwd": "/app", "environ": {"PATH": "/usr/bin:/bin", "A": "b"}}
            descriptors = [stdin.fileno(), output.fileno(), output.fileno(), end.fileno()]
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
        return caller

    def run(self, command):
        """(exit status, output) of a command."""
        with tempfile.TemporaryFile() as output, self.start(command, output) as caller:
            status = int(caller.recv(64))
            output.seek(0)
            return status, output.read().decode()

    def close(self):
        self.control.close()
        self.process.wait(60)


@pytest.fixture(params=["root", "user"])
def box(request):
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("this is not root")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    box = Box(folder, request.param)
    yield box
    box.close()
    shutil.rmtree(folder)


def test_files_and_processes_stay_until_the_box_ends(box):
    assert box.run("pwd; echo $A; id -u; touch file; (sleep 4321 &) ; exit 7") == (7, "/app\nb\n0\n")
    assert box.run("ls; pgrep -c sleep") == (0, "file\n1\n")
    assert box.run("kill -9 $$")[0] == -9
    status, names = box.run("tmux new-session -d 'sleep 4321'; tmux ls; ls -l /dev/fd/ | wc -l; cat <(echo pipe)")
    assert (status, "pipe" in names) == (0, True)
    box.close()
    assert os.listdir(box.folder) >= ["file"]
    assert "sleep 4321" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout


def test_a_command_whose_caller_hangs_up_is_ended(box):
    with tempfile.TemporaryFile() as output:
        box.start("sleep 4322", output).close()
        deadline = time.monotonic() + 30
        while box.run("pgrep -f 'sleep 432[2]'")[0] == 0:
            assert time.monotonic() < deadline


def test_the_box_ends_with_its_starter_though_killed(box):
    box.run("setsid sleep 4323 &")
    box.process.kill()
    box.process.wait()
    deadline = time.monotonic() + 30
    while "sleep 4323" in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline


HIDDEN = """
ls -d /root /home /etc/shadow /work 2>/dev/null
test -w /usr -o -w /etc -o -w / && echo writable
for family in 17 29 38 40; do
    python3 -c "import socket; socket.socket($family, 1); print('socket', $family)" 2>/dev/null
done
unshare -Ur true 2>/dev/null && echo a namespace
mount -t tmpfs none /app 2>/dev/null && echo a mount
echo 1 2>/dev/null > /proc/sys/kernel/hostname && echo a setting
cat /proc/1/environ 2>/dev/null && echo init
kill -9 1 2>/dev/null; kill -STOP 1 2>/dev/null
cat /proc/net/dev | grep -v -e lo: -e '|'
grep Cap /proc/self/status | grep -v 0000000000000000
ls /proc | grep -E '^[0-9]+$' | wc -l | xargs test 12 -lt && echo processes
python3 -c "
import ctypes
libc = ctypes.CDLL(None)
for number in (250, 272, 308, 321, 425, 165):  # keyctl, unshare, setns, bpf, io_uring_setup, mount
    assert libc.syscall(number, -1, -1, -1, -1, -1) == -1, number
"
echo end
"""


def test_it_sees_and_changes_nothing_of_this_machine(box):
    assert box.run(HIDDEN) == (0, "end\n")
    assert box.run("cat /etc/passwd; hostname")[1].splitlines()[-1] == "sandbox"


def test_programs_that_need_sockets_and_ipc_work(box):
    script = """
import multiprocessing, socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
"""
    assert box.run(f"python3 -c '{script}'") == (0, "[1, 2]\n")
