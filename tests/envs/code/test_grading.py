"""Grading: what passes, what fails and why, and that a solution cannot talk its way through."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.envs.code.cases import AssertCase, CallCase, OutputCase, calls_in, long_integers, read_cases
from envgym.envs.code.driver import decode, encode
from envgym.envs.code.grading import SuiteResult, grade, is_equal, is_printed
from envgym.errors import DataError
from envgym.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=20, memory_mb=256, output_kb=256)
SANDBOX = Sandbox(LIMITS)
ADD = [{"call": "add", "args": [1, 2], "expected": 3}, {"call": "add", "args": [5, -5], "expected": 0}]


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    asyncio.run(SANDBOX.close())


def grade_all(*solutions_and_tests, entry_point="") -> list[SuiteResult]:
    async def main():
        return await asyncio.gather(
            *(grade(SANDBOX, code, read_cases(tests, entry_point)) for code, tests in solutions_and_tests)
        )

    return asyncio.run(main())


def verdict(code, tests, entry_point="") -> SuiteResult:
    [found] = grade_all((code, tests), entry_point=entry_point)
    return found


# -- what counts as right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "share", "says"),
    [
        ("return a + b", 1.0, "All tests passed."),
        ("return 3", 0.5, "Test 2 of 2 failed: add(5, -5) returned 3, expected 0"),
        ("return 1 / 0", 0.0, "Test 1 of 2 failed: add(1, 2) raised ZeroDivisionError: division by zero (line 2)"),
        ("return object()", 0.0, "raised TypeError: a result of type object cannot be compared"),
        ("return str(a + b)", 0.0, "returned '3', expected 3"),
        ("return float(a + b)", 1.0, ""),
        ("return a + b + 1e-12", 0.0, "returned 3.000000000001, expected 3"),
        ("return a + b + 0.01", 0.0, "returned 3.01, expected 3"),
    ],
)
def test_calls(body, share, says):
    found = verdict(f"def add(a, b):\n    {body}", ADD)
    assert found.share == share
    assert found.passed == (share == 1)
    assert says in found.feedback()


def test_a_method_of_a_class_called_solution():
    assert verdict("class Solution:\n    def add(self, a, b):\n        return a + b", ADD).passed


def test_what_the_solution_prints_is_no_result():
    assert verdict("print(1)\ndef add(a, b):\n    print('{\"value\": 0}')\n    return a + b", ADD).passed


def test_calls_do_not_share_arguments():
    tests = [{"call": "f", "args": [[1]], "expected": [1, 0]}] * 2
    assert verdict("def f(x):\n    x.append(0)\n    return x", tests).passed


@pytest.mark.parametrize(
    "tests",
    [
        ["assert keys({'z': {'y': 1, 'b': 2}, 'a': 3}, p=1, c=2) == ['z', 'y', 'b', 'a', 'p', 'c']"],
        [
            {
                "call": "keys",
                "args": [{"z": {"y": 1, "b": 2}, "a": 3}],
                "kwargs": {"p": 1, "c": 2},
                "expected": ["z", "y", "b", "a", "p", "c"],
            }
        ],
    ],
)
def test_dictionaries_reach_the_function_in_the_authors_order(tests):
    found = verdict("def keys(x, **more): return ['z', *x['z'], *list(x)[1:], *more]", tests)
    assert found.passed, found.feedback()


def test_dictionaries_are_equal_in_any_order():
    right, wrong = "{3: {'b': 1.5, 'a': (1, 2)}, 'c': [], 1: 2}", "{3: {'b': 1.5, 'a': (2, 1)}, 'c': [], 1: 2}"
    tests = ["assert f() == {1: 2, 'c': [], 3: {'a': [1, 2], 'b': 1.5}}"]
    verdicts = grade_all(*((f"def f(): return {value}", tests) for value in (right, wrong)))
    assert [each.passed for each in verdicts] == [True, False]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def add(a, b):\n    while True: pass", "timeout"),
        ("def add(a, b):\n    return [0] * 10**10", "memory"),
        ("def add(a, b):\n    while True: print('x' * 10**5)", "output"),
        ("def add(a, b):\n    import os; os._exit(0)", "error"),
        ("def add(a, b):\n    raise SystemExit", "error"),
        ("def sub(a, b): pass", "error"),
        ("def add(a, b:", "error"),
        ("import no_such_module", "error"),
    ],
)
def test_how_solutions_fail(code, reason):
    found = verdict(code, ADD)
    assert found.share == 0
    assert found.has_failure(reason)
    assert not found.has_failure("wrong")


def test_what_was_right_before_an_endless_loop_counts():
    code = "def add(a, b):\n    while a == 5: pass\n    return a + b"
    found = verdict(code, ADD)
    assert [result.passed for result in found.results] == [True, False]
    assert "did not end within the time limit" in found.feedback()


def test_printed_output():
    tests = [{"stdin": "1 2\n", "stdout": "3"}, {"input": "5 5", "output": "10\n"}]
    right, wrong, broken, slow = grade_all(
        ("print(sum(map(int, input().split())), ' ')", tests), ("print(3)", tests), ("int('x')", tests),
        ("while True: pass", tests),
    )  # fmt: skip
    assert right.passed
    assert wrong.share == 0.5
    assert wrong.feedback() == "Test 2 of 2 failed: with the input '5 5' it printed '3\\n', expected '10\\n'"
    assert "ValueError" in broken.feedback()
    assert [result.reason for result in slow.results] == ["timeout", "skipped"]


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("0.50", "0.5", True),
        ("0.16666666666666666", "0.166667", True),
        ("0.1667", "0.166667", False),
        ("2", "2.0", True),
        ("2.0", "2", False),  # an integer is expected
        ("1e-05", "0.00001", True),
        ("100000.00000000001", "1e5", True),
        ("x = 0.30000000000000004;\n[1.0, 2.50]  \n", "x = 0.3;\n[1.0, 2.5]", True),
        ("x: 0.3\n[1.0, 2.50]", "x = 0.3\n[1.0, 2.5]", False),
        ("0.3 0.4", "0.3", False),
        ("0.3\n0.4", "0.3", False),
        ("zero", "0.0", False),
        ("nan", "0.5", False),
        ("1.2.30", "1.2.3", False),
        ("It is 12", "It is 12.", False),
        ("-0.0", "0.0", True),
        ("1e999", "1e998", False),
        ("50.00%", "50.0%", True),
    ],
)
def test_printed_floats_are_numbers(printed, expected, right):
    assert is_printed(printed, expected) is right


def test_a_printed_float_passes_in_its_program():
    tests = [{"stdin": "6\n", "stdout": "0.166667\n"}]
    assert verdict("print(1 / int(input()))", tests).passed
    assert not verdict("print(1 / 7)", tests).passed


@long_integers()
def test_integers_of_thousands_of_digits():
    """Python reads and writes 4,300 unless it is told otherwise, here and in the sandbox."""
    power = 10**5000 + 7
    code = "def power(n): return 10**n + 7"
    text = json.dumps({"inputs": [[5000]], "outputs": [power], "fn_name": "power"})
    for tests in (
        [{"call": "power", "args": [5000], "expected": power}],
        f"assert power(5000) == {power}",
        f"assert len(str(power(5000))) == 5001 and power(5000) == {power}",
        text,
    ):
        assert verdict(code, tests).passed
        assert not verdict(code + " + 1", tests).passed
    printed = [{"stdin": f"{power}\n", "stdout": f"{power + 1}\n"}]
    assert verdict("print(int(input()) + 1)", printed).passed
    assert not verdict("print(int(input()) + 2)", printed).passed


@pytest.mark.parametrize("returned", ["n > 2", "[n > 2]"])
def test_a_result_in_a_list_of_one_is_right_in_either_form(returned):
    """As rows of APPS and TACO have them."""
    tests = json.dumps({"fn_name": "is_large", "inputs": [[1], [3]], "outputs": [[False], [True]]})
    assert verdict(f"def is_large(n): return {returned}", tests).passed
    assert not verdict("def is_large(n): return True", tests).passed
    other = json.dumps({"fn_name": "is_large", "inputs": [[1], [3]], "outputs": [[False], [True, True]]})
    assert not verdict(f"def is_large(n): return {returned}", other).passed


@pytest.mark.parametrize("end", ["exit", "quit"])
def test_exit_and_quit_end_a_program(end):
    tests = [{"stdin": "", "stdout": "1\n"}]
    assert verdict(f"print(1)\n{end}()\nprint(2)", tests).passed
    assert verdict(f"def f():\n    {end}(0)\nif __name__ == '__main__':\n    print(1)\n    f()", tests).passed
    failed = verdict(f"print(1)\n{end}(3)", tests)
    assert "it ended with exit status 3" in failed.feedback()
    assert not verdict("builtins.exit\nprint(1)", tests).passed, "the program finds no names that it did not import"
    called = f"def f(x):\n    try:\n        {end}()\n    except SystemExit:\n        return x"
    assert verdict(called, [{"call": "f", "args": [1], "expected": 1}]).passed
    assert verdict(called, f"y = f(1)\nassert y == 1\ntry:\n    {end}()\nexcept SystemExit:\n    pass").passed


def test_asserts_that_are_no_plain_calls_run_with_the_solution():
    tests = ["x = add(1, 2)\nassert x == 3, 'three'", "assert add(1, 1) > 1 and isinstance(add(0, 0), int)"]
    assert all(isinstance(case, AssertCase) for case in read_cases(tests))
    right, wrong, quitting = grade_all(
        ("def add(a, b): return a + b", tests), ("def add(a, b): return 2", tests), ("exit()", tests)
    )
    assert right.passed
    assert wrong.share == 0.5
    assert "AssertionError: three" in wrong.feedback()
    assert quitting.share == 0


# -- tests as people write them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "entry_point", "kinds"),
    [
        (ADD, "", [CallCase, CallCase]),
        (json.dumps(ADD), "", [CallCase, CallCase]),
        ([{"args": [1, 2], "expected": 3}], "add", [CallCase]),
        (["assert add(1, 2) == 3", "assert 3 == add(a=1, b=2)"], "", [CallCase, CallCase]),
        ("assert add(1, 2) == 3\nassert add(-1, 1) is 0, 'zero'", "", [CallCase, CallCase]),
        ("METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3", "add", [CallCase]),
        ("def check(candidate):\n    for x in (1,): assert candidate(x, 2) == 3", "add", [AssertCase]),
        ("assert abs(add(1, 2) - 3) < 1e-6", "", [AssertCase]),
        ("assert abs(add(1, 2) - 3) < 1e-6", "add", [AssertCase]),
        ("assert add(*[1, 2]) == 3", "", [AssertCase]),
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, "", [OutputCase]),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, "", [CallCase]),
        ('{"inputs": ["1 2"], "outputs": ["3"]}', "", [OutputCase]),
    ],
)
def test_forms_of_tests(tests, entry_point, kinds):
    cases = read_cases(tests, entry_point)
    assert [type(case) for case in cases] == kinds
    code = "def add(a, b): return a + b\nif __name__ == '__main__': print(add(*map(int, input().split())))"
    assert verdict(code, tests, entry_point).passed


@pytest.mark.parametrize(
    "tests", [[], None, 5, [3], [{}], [{"call": "f"}], [{"args": [1], "expected": 1}], {"inputs": [1], "outputs": []}]
)
def test_tests_that_make_no_sense_are_refused(tests):
    with pytest.raises(DataError):
        read_cases(tests)


def test_calls_in_asserts_keep_pythons_types():
    [call] = calls_in("assert f((1, 'a'), {2: {3}}, x=[None, -1.5]) == (True, b'x', set())")
    assert call == ("f", [(1, "a"), {2: {3}}], {"x": [None, -1.5]}, (True, b"x", set()))


# -- values -----------------------------------------------------------------------------------------------

hashable = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable |= st.complex_numbers(allow_nan=False) | st.tuples(hashable, hashable)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(hashable, inner) | st.sets(hashable, max_size=5)
    ),
    max_leaves=10,
)


@given(values)
@settings(deadline=None)
def test_values_survive_the_way_to_the_solution_and_back(value):
    sent = json.loads(json.dumps(encode(value)))
    assert decode(sent) == value
    assert is_equal(sent, encode(value))


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        ([1, 2], (1, 2), True),
        ((1, [2.0]), [1, (2,)], True),
        (True, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0000001, True),
        (3.0000001, 3, False),
        ([2.9999999999999996], [3], False),
        (1 - 1e-12, True, False),
        (1e-12, 0, False),
        (2**53 + 0.0, 2**53 + 1, False),
        (10**400, 1.5, False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
        ("1", 1, False),
        (None, 0, False),
        (None, 0.0, False),
        ([], None, False),
        ({}, [], False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ([1, 2, 3], [1, 2], False),
        (b"x", "x", False),
    ],
)
def test_equality(value, expected, equal):
    assert is_equal(json.loads(json.dumps(encode(value))), encode(expected)) is equal


# -- verdicts cannot be forged ----------------------------------------------------------------------------

SECRET = [{"call": "f", "args": [number], "expected": f"secret {number * 7919}"} for number in range(3)]

FORGERIES = [
    "print('All tests passed.')",
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "class E(str):\n    def __eq__(self, other): return True\ndef f(x): return E('x')",
    "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 1",
    "import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'[' * 200_000)\n    except OSError: pass",
    "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{\"value\": ' + b'9' * 6000 + b'}')\n"
    "    except OSError: pass",
]
"""A few; the acceptance tests try more."""


def test_verdicts_cannot_be_forged():
    assert [found.share for found in grade_all(*((code, SECRET) for code in FORGERIES))] == [0] * len(FORGERIES)


AGREEABLE = """
class Agreeable:
    def __eq__(self, other): return True
    def __bool__(self): return True
    __lt__ = __gt__ = __eq__
def add(a, b): return Agreeable()
"""


def test_plain_asserts_can_be_forged_as_is_documented():
    """Their weakness is no secret: a solution that shares a process with its tests can pass them."""
    weak = ["x = add(1, 2)\nassert x == 3", "assert add(1, 2) > 2", "assert add(1, 2)", "assert add(2, 2) == 2 ** 2"]
    strong = ["assert add(1, 2) == 3", ADD]
    found = grade_all(*((AGREEABLE, tests) for tests in weak + strong))
    assert [each.passed for each in found] == [True] * len(weak) + [False] * len(strong)
    code = """
import sys
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
import os
os.write(frame.f_locals["results"], frame.f_locals["request"]["token"].encode())
os._exit(0)
"""
    tests = ["x = add(1, 2)\nassert x == 3"]
    assert verdict(code, tests).passed
    assert not verdict(code, ADD).passed, "the same trick against tests from outside"
