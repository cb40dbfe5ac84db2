"""Becomes the program it is given, which then dies with its parent.

A server that is waiting for something else than its input would outlive a parent that was killed. The first line on
stderr is this process's id, which is the program's.

Usage: guard.py PARENT_PID PROGRAM [ARGUMENT …]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before the line above
        sys.exit(1)
    os.write(2, f"{os.getpid()}\n".encode())
    os.execvp(sys.argv[2], sys.argv[2:])
