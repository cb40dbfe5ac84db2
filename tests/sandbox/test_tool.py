"""The sandbox as a tool."""

import asyncio
import inspect

import pytest

from envgym.sandbox import Limits, Sandbox, python_tool


def use(*programs):
    async def main():
        async with Sandbox(Limits(cpu_seconds=0.5, wall_seconds=20, output_kb=16)) as sandbox:
            python = python_tool(sandbox)
            return [await python(program) for program in programs]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "The program printed nothing."),
        ("import os; os._exit(3)", "The program ended with exit status 3."),
        ("while True: pass", "The program was ended: it ran out of time."),
        ("print('a'); import sys; print('b', file=sys.stderr)", "a\nb"),
    ],
)
def test_what_a_program_printed_comes_back(program, says):
    assert use(program) == [says]


def test_errors_come_back_after_what_was_printed():
    [output] = use("print('first')\n1 / 0")
    assert output.startswith("first\nTraceback")
    assert output.endswith("ZeroDivisionError: division by zero")


def test_nothing_is_kept_between_calls():
    _, second = use("x = 1; open('f', 'w').write('x')", "import os; print(os.path.exists('f'), 'x' in globals())")
    assert second == "False False"


def test_it_says_what_it_is():
    python = python_tool(Sandbox())
    assert python.__name__ == "python"
    assert "Args:\n    code:" in inspect.getdoc(python)
    assert inspect.signature(python, eval_str=True).parameters["code"].annotation is str
