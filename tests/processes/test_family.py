import os
import signal
import subprocess
import sys
import time

import pytest

from envgym.processes import family

DAEMON = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
input()
"""


@pytest.mark.parametrize(("number", "pause"), [(signal.SIGHUP, 0), (signal.SIGTERM, 0.2)])
def test_a_guard_that_is_told_again_and_again_to_end_its_family_ends_it(number, pause):
    command = family.guard_command([sys.executable, "-c", DAEMON])
    pipe, start = subprocess.PIPE, time.monotonic()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as guard:
        daemon = int(guard.stdout.readline())
        try:
            while guard.poll() is None and time.monotonic() < start + 60:
                os.kill(guard.pid, number)
                time.sleep(pause)
            assert not family.stat(daemon)
            assert guard.stderr.read() == f"{guard.pid}\n".encode()  # and no traceback
        finally:
            if family.stat(daemon):
                os.kill(daemon, signal.SIGKILL)
            guard.kill()
