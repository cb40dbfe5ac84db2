"""Programming tasks: the policy writes Python, and unit tests in a sandbox decide its reward."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from envgym.env import Env, Info, StepResult, TaskList, TaskSet
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import DataError
from envgym.sandbox import Limits, Sandbox
from envgym.tasks import GeneratedTasks
from envgym.tasks.columns import ANSWER_FIELDS, PROMPT_FIELDS
from envgym.types import Action, Message, Observation, Task, add_instruction, as_messages, refuse_images

from .cases import Case, long_integers, read_cases
from .grading import SuiteResult, grade
from .problems import held_out_tasks, train_task

TESTS_FIELDS = ("tests", "test_list", "test_cases", "unit_tests", "input_output", "test")
SETUP_FIELDS = ("test_imports", "test_setup_code")
"""Fields of code, a text or a list of lines, that runs after the program and before the tests."""


class CodeConfig(DataEnvConfig):
    """Settings of the programming tasks. Without `data` the tasks are generated."""

    tests: str | None = None
    """Field of the tests. Unset: the first of the usual names that a row has."""
    instruction: str = "Answer with Python code in one ```python block."
    """Added to every problem; empty for none."""
    completion: bool = False
    """For base models: the prompt is text to be continued, without a chat template, and the program is both."""
    stops: tuple[str, ...] = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    """Texts of which the first one ends a completion."""
    attempts: int = Field(1, ge=1)
    """Maximum programs of an episode; after each the policy gets the message of the first failed test."""
    reward: Literal["all", "share"] = "all"
    """The reward: 1 if all tests pass, else 0; or the share of tests that pass."""
    n_tests: int = Field(10, ge=4)
    """Tests of each generated task."""
    limits: Limits = Limits()
    """Limits of a program under test."""
    programs: int | None = Field(None, ge=1)
    """Maximum concurrent programs. Unset: two per CPU."""
    packages: tuple[str, ...] = ()
    """Packages besides the standard library that programs may import, by import name."""


class CodeEnv(Env):
    """Programming tasks: runs the code of the last Python block; the reward is by the tests that pass."""

    spec: Code
    config: CodeConfig
    cases: list[Case]
    attempts_left: int

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.cases = self.spec.cases(self.task)
        self.attempts_left = self.config.attempts
        if self.config.completion:
            refuse_images(as_messages(self.task.prompt), "a prompt of raw text")
            return Observation(text=prompt_text(self.task)), {}
        return add_instruction(self.task.prompt, self.config.instruction), {}

    async def step(self, action: Action) -> StepResult:
        self.attempts_left -= 1
        if self.config.completion:
            code = until_stop(action.text, self.config.stops)
            program = with_setup(self.task, prompt_text(self.task) + code)
        else:
            code = last_block(action.text)
            program = program_of(self.task, code)
        result = await grade(self.spec.sandbox, program, self.cases) if code.strip() else None
        passed = result is not None and result.passed
        if not passed and self.attempts_left:
            feedback = result.feedback() if result else "There was no code in the answer."
            return [Message("user", f"{feedback}\n\n{self.spec.try_again}")], None, False, False, {}
        share = result.share if result else 0.0
        reward = share if self.config.reward == "share" else float(passed)
        info = {"score": float(passed), "metrics": self._metrics(result, share)}
        return (), reward, True, False, info

    def _metrics(self, result: SuiteResult | None, share: float) -> dict[str, float]:
        metrics = {"answered": float(result is not None), "tests_passed": share}
        for reason in ("error", "timeout", "memory", "output"):
            metrics[reason] = float(result is not None and result.has_failure(reason))
        if self.config.attempts > 1:
            metrics["attempts"] = float(self.config.attempts - self.attempts_left)
        return metrics


class Code(DataEnvSpec):
    """The tasks, and the sandbox that runs their solutions."""

    env_class = CodeEnv
    Config = CodeConfig
    starts_programs = True
    config: CodeConfig
    answer_required = False
    field_names = ((*PROMPT_FIELDS, "text"), (*ANSWER_FIELDS, "canonical_solution", "code"))
    try_again = "Fix it, and answer with the whole program again."

    sandbox: Sandbox

    async def setup(self) -> None:
        self.closing.enter_context(long_integers())
        await super().setup()
        config = self.config
        sandbox = Sandbox(config.limits, concurrency=config.programs, packages=config.packages)
        self.sandbox = await self.closing.enter_async_context(sandbox)

    def default_tasks(self, split: str) -> TaskSet:
        n_tests = self.config.n_tests
        if split == "train":
            return GeneratedTasks(lambda index: train_task(index, n_tests))
        return TaskList(held_out_tasks(n_tests))

    def check_task(self, task: Task) -> None:
        self.cases(task)

    def cases(self, task: Task) -> list[Case]:
        """The tests of a task. Raises `DataError` if it has none, or unreadable ones."""
        names = (self.config.tests,) if self.config.tests else TESTS_FIELDS
        tests = next((task.fields[name] for name in names if task.fields.get(name)), None)
        if tests is None:
            fields = ", ".join(names)
            raise DataError(f"task {task.key} has no tests in {fields}: say where they are with env.tests=FIELD")
        try:
            return read_cases(tests, str(task.fields.get("entry_point") or ""))
        except DataError as error:
            raise DataError(f"task {task.key}: {error}") from None

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The solution in the task's answer, with its code in a block."""
        greeting = random.Random(f"{task.key} {seed}").choice(_GREETINGS)
        return [f"{greeting}{self._block(task)}"]

    def worked_answer(self, task: Task) -> list[str | Message]:
        """The code in a block; for base models the continuation of the prompt."""
        is_continued = self.config.completion and isinstance(task.answer, str)
        return [task.answer if is_continued else self._block(task)]

    def _block(self, task: Task) -> str:
        if not isinstance(task.answer, str):
            raise DataError(f"task {task.key} has no solution to show: say where it is with data.answer=FIELD")
        code = task.answer
        if "```" not in code:
            program = code if _defines(code, task) else _beginning(task) + code
            code = f"```python\n{program.strip()}\n```"
        return code


def program_of(task: Task, code: str) -> str:
    """The program to test: the prompt if it is code, an answer's code, and the row's setup.

    The code may be the body of the function that the prompt begins, or the whole function. Code with a `__future__`
    import is a whole program, since such an import comes first.
    """
    return with_setup(task, code if "from __future__" in code else _beginning(task) + code)


def with_setup(task: Task, program: str) -> str:
    """The program, followed by the row's setup."""
    fields = [task.fields.get(name) or () for name in SETUP_FIELDS]
    return "\n".join([program, *(line for lines in fields for line in ([lines] if isinstance(lines, str) else lines))])


def prompt_text(task: Task) -> str:
    """The text of the prompt's last message."""
    return "".join(message.text for message in as_messages(task.prompt)[-1:])


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _beginning(task: Task) -> str:
    """The prompt if it is Python code (imports, helpers, the signature and its docstring), else ""."""
    text = prompt_text(task)
    return f"{text.rstrip()}\n" if _defines(text, task) else ""


def _defines(code: str, task: Task) -> bool:
    """True for code that defines the task's `entry_point`, the function that the tests call."""
    try:
        names = [statement.name for statement in ast.parse(code).body if isinstance(statement, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return task.fields.get("entry_point") in names


_GREETINGS: Sequence[str] = ("", "Here is the code:\n\n", "This does it:\n\n")
_OPENING = re.compile(r"(?:^(?P<indent>[ \t]*))?```(?:python3?|py)[ \t]*\r?\n", re.IGNORECASE | re.MULTILINE)
_CLOSING = re.compile(r"^[ \t]*```", re.MULTILINE)


def last_block(text: str) -> str:
    """The code in the last Python block, closed or not; else in the last block of another kind; else all of the
    text."""
    openings = list(_OPENING.finditer(text))
    if openings:
        code = text[openings[-1].end() :]
        closing = _CLOSING.search(code)
        code = code[: closing.start()] if closing else code.partition("```")[0]
        # As in CommonMark: that of an item of a list, say, is no part of the code.
        return re.sub(rf"(?m)^[ \t]{{0,{len(openings[-1]['indent'] or '')}}}", "", code)
    parts = text.split("```")
    if len(parts) < 2:
        return text
    block = parts[-2] if len(parts) % 2 else parts[-1]  # an odd number of fences: the last one never closes
    return block.partition("\n")[2]
