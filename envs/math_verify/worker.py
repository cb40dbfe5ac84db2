"""The grading process: reads `{"id", "answer", "gold", "cpu"}` as JSON lines, writes `{"id", "correct"}`.

It is run as a file of its own and imports nothing of envgym, so that it starts fast wherever envgym lies. It dies with
its parent.
Sympy can take for ever or take all memory: the limit of memory is set here, and the CPU time that an answer may take
(`cpu`, in seconds) ends the process. The library's own timeouts are switched off.

What grades is a child of a process that has the library loaded: one that ends is replaced in milliseconds, where a
start takes seconds. Each child first writes `{"ready": its process id, "ended": the signal that ended the one before}`.

Usage: worker.py PARENT_PID NICENESS
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 2 * 2**30
WARM_UP = ((r"\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), (r"\{1, 2\}", r"\{2, 1\}"), ("[1, 2)", "[2, 3)"))
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent, niceness = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    # Parsers print: keep the reply pipe to ourselves and send what they say nowhere.
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable()
    try:
        for answer, gold in WARM_UP:  # the first calls build the parser's tables, and import what they need
            grade(answer, gold)
    except Exception as error:
        _reply(replies, error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    gc.freeze()
    ended = 0
    while True:
        child = os.fork()
        if child == 0:
            _serve(replies, ended)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return  # nobody asks any more
        ended = os.WTERMSIG(status)


def _serve(replies: int, ended: int) -> None:
    """Grade in a child, until nobody asks any more. Never returns."""
    try:
        _die_with(os.getppid())
        _reply(replies, ready=os.getpid(), ended=ended)
        while line := _line():
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["cpu"])  # its signal ends the process
            try:
                correct = grade(request["answer"], request["gold"])
            except (Exception, RecursionError):  # whatever an answer brings the library to raise, it is not right
                correct = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            _reply(replies, id=request["id"], correct=correct)
        os._exit(0)
    finally:
        os._exit(1)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _line() -> bytes:
    """The next request; of several the last, for the others were given up when a child before this one died."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return b""
        line += chunk
    return line.splitlines()[-1]


def _reply(replies: int, **message: Any) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def grade(answer: str, gold: str) -> bool:
    """Whether `answer` means the same as `gold`, as math-verify sees it, and leaves nothing to be carried out."""
    from math_verify import verify

    # A reference may be text that the library finds no mathematics in; only the same text equals that.
    right, given = _parse(gold), _parse(answer)
    if not verify(right, given, timeout_seconds=None):
        return False
    return _unfinished(given) <= _unfinished(right)


def _unfinished(parsed: list[Any]) -> set[Any]:
    """Kinds of operations (sum, product, power, …) that would make an expression simpler, were they carried out."""
    from sympy import Basic, MatrixBase, preorder_traversal

    whole = [entry for part in parsed for entry in (part if isinstance(part, MatrixBase) else (part,))]
    nodes = [node for part in whole if isinstance(part, Basic) for node in preorder_traversal(part)]
    return {node.func for node in nodes if node.args and _leaves_of_parts(node) > _leaves(_computed(node))}


def _leaves_of_parts(node: Any) -> int:
    return sum(_leaves(_computed(part), node.is_Add) for part in node.args)


def _leaves(expression: Any, of_a_sum: bool = False) -> int:
    """How many numbers and names are written in an expression; 1 and -1, but in a sum, are the parser's."""
    if not expression.args:
        return int(of_a_sum or expression not in (1, -1))
    return sum(_leaves(part, expression.is_Add) for part in expression.args)


def _computed(expression: Any) -> Any:
    """The expression with its operations carried out; relations, sets and the like are kept around them."""
    from sympy import Expr, Tuple

    if not expression.args:
        return expression
    parts = [_computed(part) for part in expression.args]
    return expression.func(*parts) if isinstance(expression, Expr) else Tuple(*parts)


@lru_cache(maxsize=1000)
def _parse(text: str) -> Any:
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)


if __name__ == "__main__":
    main()
