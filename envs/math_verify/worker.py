"""The process that grades: the class that `Processes` hosts.

Sympy can run forever or use all memory. The memory limit is set here, and the limit of CPU time kills the process that
computes. That process is a child, forked from the host with the library loaded: forking its successor takes
milliseconds, while a fresh start takes seconds. The library's own timeouts are switched off.
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

from .answers import expressions

MEMORY_BYTES = 2 * 2**30
LOW_PRIORITY = 10
WARM_UP = ((r"\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), (r"\{1, 2\}", r"\{2, 1\}"), ("[1, 2)", "[2, 3)"))


class Worker:
    """Grades each answer in a child, which grades another one later."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        logging.disable()
        try:
            for answer, gold in WARM_UP:  # the first calls build the parser's tables, and import what they need
                is_right(answer, gold)
        except Exception as error:
            raise WorkerError(f"grading processes do not start: {type(error).__name__}: {error}") from None
        self._idle: dict[int, list[Child]] = {0: [], LOW_PRIORITY: []}
        """Children that wait for an answer, by niceness."""

    async def grade(
        self, answer: str, gold: str, problem: str, cpu: float, timeout: float, *, is_costly: bool
    ) -> bool | None:
        """True for a right answer, or None if grading takes more than `cpu` seconds of CPU time. Costly answers are
        graded at low priority.

        Raises `CallTimeout` past `timeout` seconds, `InvalidOutcome` of kind `crash` if the child dies.
        """
        niceness = LOW_PRIORITY if is_costly else 0
        idle = self._idle[niceness]
        child = idle.pop() if idle else Child(niceness)
        try:
            async with asyncio.timeout(timeout):
                correct = await child.grade(answer, gold, problem, cpu)
        except TimeoutError:
            child.end()
            raise CallTimeout("the answer took too long to grade") from None
        except (EOFError, OSError):
            if child.end() == -signal.SIGPROF:
                return None
            raise InvalidOutcome("crash", "the process that graded died", retryable=True) from None
        except asyncio.CancelledError:
            child.end()
            raise
        idle.append(child)
        return correct


class Child:
    """A process that computes. It dies with its parent."""

    def __init__(self, niceness: int) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, self._connection, os.getpid(), niceness))
        self._process.start()
        child_end.close()

    async def grade(self, answer: str, gold: str, problem: str, cpu: float) -> bool:
        """Grade one answer. Raises `EOFError` or `OSError` if the process dies."""
        self._connection.send((answer, gold, problem, cpu))
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        return bool(self._connection.recv())

    def end(self) -> int | None:
        """Kill the process and return its exit code: minus the signal that ended it."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        return self._process.exitcode


def _serve(connection: Connection, host_end: Connection, parent: int, niceness: int) -> None:
    """Grade answers until killed: by the host (`Child.end`), by the death of its parent, or by SIGPROF after `cpu`
    seconds of CPU time for one answer."""
    host_end.close()
    die_with(parent)
    os.nice(niceness)
    for stream in (1, 2):  # parsers print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    while True:
        answer, gold, problem, cpu = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, cpu)  # SIGPROF kills the process
        try:
            correct = is_right(answer, gold, problem)
        except Exception:  # an answer on which the library fails is wrong
            correct = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(correct)


def is_right(answer: str, gold: str, problem: str = "") -> bool:
    """True if math-verify finds `answer` equal to `gold`, and the answer has no operation left to carry out.

    Where the problem itself holds an expression or a relation equal to the reference, the task asks for a form: then
    the answer must have the form of the reference.
    """
    from math_verify import verify
    from sympy import FiniteSet, Set

    # A reference without mathematics equals only the same text.
    gold_parsed, parsed = _parse(gold), _parse(answer)
    if not verify(gold_parsed, parsed, timeout_seconds=None) or not _unfinished(parsed) <= _unfinished(gold_parsed):
        return False
    value, gold_value = (_value(side[0]) for side in (parsed, gold_parsed))
    is_range = isinstance(value, Set) and not isinstance(value, FiniteSet)  # `(3, ∞)` for `x > 3`
    if _form(value) == _form(gold_value) or (is_range and not isinstance(gold_value, Set)):
        return True
    return not any(_is_restated(gold, expression) for expression in expressions(problem))


@lru_cache(maxsize=1000)
def _is_restated(gold: str, expression: str) -> bool:
    """True if an expression of the problem equals the reference, or a part of a list or matrix, in another form; the
    case of letters is ignored."""
    from math_verify import verify
    from sympy import Eq, MatrixBase, Set, Tuple
    from sympy.logic.boolalg import Boolean

    (value, *_), parsed = _parse(gold.lower()), _parse(expression.lower())
    if not parsed:
        return False
    form = _form(_value(parsed[0]))
    parts = [value, *(value if isinstance(value, MatrixBase) else value.args if isinstance(value, Set | Tuple) else ())]
    if isinstance(parsed[0], Boolean) and not isinstance(parsed[0], Eq):  # the library does not solve inequalities
        with contextlib.suppress(Exception):
            parsed = [parsed[0].as_set()]
    return any(verify(part, parsed, timeout_seconds=None) for part in parts if _form(_value(part)) != form)


def _value(node: Any) -> Any:
    """The value without its name: the other side of `y = …`, `f(x) = …` and `(p, q) = …`."""
    from sympy import Eq, Symbol, Tuple
    from sympy.core.function import AppliedUndef

    if isinstance(node, Eq):
        sides = zip(node.args, node.args[::-1], strict=True)
        node = next((value for name, value in sides if isinstance(name, Symbol | AppliedUndef | Tuple)), node)
    return node


def _form(node: Any) -> Any:
    """The form of an expression, without signs, the order of its parts, neutral terms and factors, and the braces of a
    set of one.

    Sums, products and integer powers keep their structure; a root, a power of a number and a function become symbols; a
    relation becomes a symbol of its sides.
    """
    from sympy import Add, Expr, FiniteSet, Float, MatrixBase, Mul, Pow, Rational, Symbol
    from sympy.core.parameters import distribute

    if isinstance(node, FiniteSet) and len(node.args) == 1:
        return _form(_value(node.args[0]))
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
    """Kinds of operations (sum, product, power, …) that would simplify the expression if carried out."""
    from sympy import Basic, Derivative, Integral, Limit, MatrixBase, Product, Sum, preorder_traversal

    lazy = (Derivative, Integral, Limit, Product, Sum)
    entries = [entry for part in parsed for entry in (part if isinstance(part, MatrixBase) else (part,))]
    nodes = [node for part in entries if isinstance(part, Basic) for node in preorder_traversal(part)]
    return {node.func for node in nodes if isinstance(node, lazy) or _leaves_of_parts(node) > _leaves(_computed(node))}


def _leaves_of_parts(node: Any) -> int:
    return sum(_leaves(_computed(part), node.is_Add) for part in node.args)


def _leaves(expression: Any, in_sum: bool = False) -> int:
    """The count of numbers and names in an expression. 1 and -1 outside sums do not count: the parser adds them."""
    if not expression.args:
        return int(in_sum or expression not in (1, -1))
    return sum(_leaves(part, expression.is_Add) for part in expression.args)


def _computed(expression: Any) -> Any:
    """The expression with its operations carried out, also within relations, sets and the like."""
    from sympy import Expr, Tuple

    if not expression.args:
        return expression
    parts = [_computed(part) for part in expression.args]
    return expression.func(*parts) if isinstance(expression, Expr) else Tuple(*parts)


@lru_cache(maxsize=1000)
def _parse(text: str) -> Any:
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)
