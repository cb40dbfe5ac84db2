"""A grading process: the class that `Processes` hosts.

Sympy can take for ever or take all memory: the limit of memory is set here, and the CPU time that an answer may take
ends the process that computes. That one is a child, forked from the host with the library loaded: its successor is
there in milliseconds, where a start takes seconds. The library's own timeouts are switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import resource
import signal
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from envgym.errors import CallTimeout, InvalidOutcome, WorkerError
from envgym.processes.family import die_with

from .forms import expressions

MEMORY_BYTES = 2 * 2**30
WARM_UP = ((r"\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), (r"\{1, 2\}", r"\{2, 1\}"), ("[1, 2)", "[2, 3)"))


class Worker:
    """Grades one answer at a time, in a child."""

    def __init__(self, niceness: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(niceness)
        logging.disable()
        try:
            for answer, gold in WARM_UP:  # the first calls build the parser's tables, and import what they need
                is_right(answer, gold)
        except Exception as error:
            raise WorkerError(f"grading processes do not start: {type(error).__name__}: {error}") from None
        self._child: Child | None = None

    async def grade(self, answer: str, gold: str, problem: str, cpu: float, timeout: float) -> bool | None:
        """True for a right answer, or None where it takes more than `cpu` seconds of CPU time (0: no limit).

        Raises `CallTimeout` past `timeout` seconds, `InvalidOutcome` of kind `crash` where the child dies.
        """
        child = self._child = self._child or Child()
        try:
            async with asyncio.timeout(timeout):
                return await child.grade(answer, gold, problem, cpu)
        except TimeoutError:
            self.close()
            raise CallTimeout("the answer took too long to grade") from None
        except (EOFError, OSError):
            if self.close() == -signal.SIGPROF:
                return None
            raise InvalidOutcome("crash", "the process that graded died", retryable=True) from None
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> int | None:
        """End the child. Returns its exit code: minus the signal that ended it."""
        child, self._child = self._child, None
        return None if child is None else child.end()


class Child:
    """The process that computes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._connection, os.getpid()))
        self._process.start()
        theirs.close()

    async def grade(self, answer: str, gold: str, problem: str, cpu: float) -> bool:
        """Raises `EOFError` or `OSError` where the process dies."""
        self._connection.send((answer, gold, problem, cpu))
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        return bool(self._connection.recv())

    def end(self) -> int | None:
        self._process.kill()
        self._process.join()
        self._connection.close()
        return self._process.exitcode


def _serve(connection: Connection, of_host: Connection, parent: int) -> None:
    of_host.close()
    die_with(parent)
    for stream in (1, 2):  # parsers print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    while True:
        answer, gold, problem, cpu = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, cpu)  # its signal ends the process
        try:
            correct = is_right(answer, gold, problem)
        except Exception:  # whatever an answer brings the library to raise, it is not right
            correct = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(correct)


def is_right(answer: str, gold: str, problem: str = "") -> bool:
    """True if `answer` means the same as `gold`, as math-verify sees it, and leaves nothing to be carried out.

    Where the problem holds an expression or a relation that is equal to the reference, the form is what was asked for:
    there an answer has the reference's.
    """
    from math_verify import verify
    from sympy import Set

    # A reference may be text that the library finds no mathematics in; only the same text equals that.
    right, given = _parse(gold), _parse(answer)
    if not verify(right, given, timeout_seconds=None) or not _unfinished(given) <= _unfinished(right):
        return False
    value = _value(given[0])
    if isinstance(value, Set) or _form(value) == _form(_value(right[0])):
        return True
    return not any(_is_restated(gold, held) for held in expressions(problem))


@lru_cache(maxsize=1000)
def _is_restated(gold: str, held: str) -> bool:
    """True if what the problem holds is equal to the reference in another form, in letters of whatever case."""
    from math_verify import verify
    from sympy import Eq
    from sympy.logic.boolalg import Boolean

    right, given = _parse(gold.lower()), _parse(held.lower())
    if not given or _form(_value(given[0])) == _form(_value(right[0])):
        return False
    if isinstance(given[0], Boolean) and not isinstance(given[0], Eq):  # the library does not solve inequalities
        with contextlib.suppress(Exception):
            given = [given[0].as_set()]
    return bool(verify(right, given, timeout_seconds=None))


def _value(node: Any) -> Any:
    """The value of a named one: of `y = …`, `f(x) = …` and `(p, q) = …` the other side."""
    from sympy import Eq, Symbol, Tuple
    from sympy.core.function import AppliedUndef

    if isinstance(node, Eq):
        for name, value in (node.args, node.args[::-1]):
            if isinstance(name, Symbol | AppliedUndef | Tuple):
                return value
    return node


def _form(node: Any) -> Any:
    """The form of an expression, whatever its signs and the order of its parts; neutral terms and factors are left out.

    Sums, products and whole powers are themselves; a root, a power of a number and a function are names of their own,
    a relation is its sides.
    """
    from sympy import Add, Expr, Float, MatrixBase, Mul, Pow, Rational, Symbol
    from sympy.core.parameters import distribute

    if isinstance(node, MatrixBase):
        return tuple(map(_form, node))
    if isinstance(node, Rational | Float):
        return abs(Rational(str(node)))
    if not getattr(node, "args", ()):
        return node
    parts = [_form(part) for part in node.args]
    with distribute(False):  # 2(x + 1) is no 2x + 2
        if isinstance(node, Mul):
            return Mul(*parts)
        terms = [term for part in parts for term in Add.make_args(part) if term != 0]
        if isinstance(node, Add) and len(Add.make_args(Add(*terms))) == len(terms):  # x + x is no 2x
            return Add(*terms)
        if isinstance(node, Pow):
            power = _computed(node.exp)
            if power.is_Integer and (node.free_symbols or power == -1):
                return parts[0] ** power
            return Symbol(f"{parts[0]}^{Rational(str(power)) if power.is_Float else power}")
    if isinstance(node, Expr):
        return Symbol(f"{node.func.__name__}({parts})")
    signs = ["-" if isinstance(part, Expr) and part.could_extract_minus_sign() else "" for part in node.args]
    return Symbol(" ".join(sorted(f"{sign}{part}" for sign, part in zip(signs, parts, strict=True))))


def _unfinished(parsed: list[Any]) -> set[Any]:
    """Kinds of operations (sum, product, power, …) that would make an expression simpler, were they carried out."""
    from sympy import Basic, MatrixBase, preorder_traversal

    whole = [entry for part in parsed for entry in (part if isinstance(part, MatrixBase) else (part,))]
    nodes = [node for part in whole if isinstance(part, Basic) for node in preorder_traversal(part)]
    return {node.func for node in nodes if node.args and _leaves_of_parts(node) > _leaves(_computed(node))}


def _leaves_of_parts(node: Any) -> int:
    return sum(_leaves(_computed(part), node.is_Add) for part in node.args)


def _leaves(expression: Any, of_a_sum: bool = False) -> int:
    """The number of numbers and names written in an expression; 1 and -1, but in a sum, are the parser's."""
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
