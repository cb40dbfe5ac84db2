"""The grading process: reads `{"answer", "gold"}` as JSON lines, writes `{"correct"}`, dies with its parent.

It is run as a file of its own and imports nothing of envgym, so that it starts fast wherever envgym lies.
Sympy can take for ever or take all memory: the deadline is the parent's, who kills this process; the limit of
memory is set here. The library's own timeouts are switched off.

Usage: worker.py PARENT_PID NICENESS
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 2 * 2**30
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent, niceness = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    # Parsers print: keep the reply pipe to ourselves and send what they say nowhere.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable()

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        grade(r"\frac{1}{2}", "0.5")  # the first call builds the parser's tables
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    reply(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            correct = grade(request["answer"], request["gold"])
        except (Exception, RecursionError):  # whatever an answer brings the library to raise, it is not right
            correct = False
        reply(correct=correct)


def grade(answer: str, gold: str) -> bool:
    """Whether `answer` means the same as `gold`, as math-verify sees it."""
    from math_verify import verify

    # A reference may be text that the library finds no mathematics in; only the same text equals that.
    return bool(verify(_parse(gold), _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=1000)
def _parse(text: str) -> Any:
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)


if __name__ == "__main__":
    main()
