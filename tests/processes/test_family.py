import os
import signal
import subprocess
import sys

from envgym.processes import family

DAEMON = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); input()"


def test_a_guard_that_is_told_again_and_again_to_end_its_family_ends_it():
    command = family.guard_command([sys.executable, "-c", DAEMON])
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as guard:
        daemon = int(guard.stdout.readline())
        try:
            while guard.poll() is None:
                os.kill(guard.pid, signal.SIGHUP)
            assert not family.stat(daemon)
            assert guard.stderr.read() == f"{guard.pid}\n".encode()  # and no traceback
        finally:
            if family.stat(daemon):
                os.kill(daemon, signal.SIGKILL)
