r"""Mathematics in one turn: a problem, an answer in `\boxed{…}`, checked with the `math-verify` library."""

from __future__ import annotations

import importlib.util
import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from envgym.env import Env, Info, StepResult, TaskList, TaskSet
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import InvalidOutcome, missing_package
from envgym.hashing import hash_fraction
from envgym.rewards.final_answers import boxed, final_line, reference
from envgym.tasks import GeneratedTasks
from envgym.types import Action, Message, Task, add_instruction, as_messages
from envgym.types.messages import joined_text

from .answers import grade_by_text, is_list, plain
from .grader import Grade, Grader
from .prose import LAST_NUMBER, last_number

Operation = Literal["+", "-", "*"]

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
BOX = "box"
IN_A_BOX = "Put the final answer in \\boxed{}."
INSTRUCTIONS = {BOX: IN_A_BOX, LAST_NUMBER: "End with the final answer, a number."}
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all problems; of two-digit sums that is 1250, of which TEST_TASKS are asked


class MathVerifyConfig(DataEnvConfig):
    """Without data, the tasks are generated sums."""

    operations: tuple[Operation, ...] = Field(("+",), min_length=1)
    """Operations of the sums."""
    digits: int = Field(2, ge=1, le=18)
    """Digits the operands of the sums have at most."""
    read: str = Field(BOX, min_length=1)
    """The place of the final answer: the last `\\boxed{}` (`box`), the last number of the completion (`last_number`;
    one that merely lists numbers is then rewarded by its last), or the last line, after this text, in upper or lower
    case: `####`, `The answer is`, `ANSWER:`."""
    instruction: str | None = None
    """Added to every problem; empty for none. Unset: it asks for the form that is read."""
    boxed_share: float | None = Field(None, ge=0, le=1)
    """Share of the demonstrations with a boxed answer. The others show formats that get no reward. Unset: 0.4 for the
    sums, 1 for problems of your own."""
    grader_processes: int = Field(2, ge=1)
    """Processes that grade at the same time (and one or two more for answers that are costly)."""
    grader_timeout: float = Field(5.0, gt=0)
    """Seconds of CPU time that grading one answer may take; then it counts as wrong. Waiting for a process does not
    count; an answer that waits twelve times as long has no reward, its episode fails."""


BOXED_SHARE = 0.4
"""Of the demonstrations for sums: a policy that was trained on them has a format to learn by reinforcement."""


class MathVerifyEnv(Env):
    """Mathematics in one turn: the reward is 1 for a right answer in a box, else 0."""

    spec: MathVerify
    config: MathVerifyConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        instruction = self.config.instruction
        if instruction is None:
            read = self.config.read
            instruction = INSTRUCTIONS.get(read, f"End with a line of this form: {read} the final answer")
        return add_instruction(self.task.prompt, instruction, separator="\n"), {}

    async def step(self, action: Action) -> StepResult:
        problem = joined_text(as_messages(self.task.prompt))
        gold = reference(self.task.answer)
        answer = self.spec.final_answer(action.text, gold)
        grade = Grade(False) if answer is None else await self.spec.grade(answer, gold, problem)
        if grade.is_late:
            raise InvalidOutcome("timeout", "the processes that grade were too busy for this answer", retryable=True)
        score = float(grade.correct)
        metrics = {
            "answered": float(answer is not None),
            "grader_timeout": float(grade.failure == "timeout"),
            "grader_crash": float(grade.failure == "crash"),
        }
        return (), score, True, False, {"score": score, "answer": answer, "metrics": metrics}


class MathVerify(DataEnvSpec):
    """The tasks, and the processes that grade."""

    env_class = MathVerifyEnv
    Config = MathVerifyConfig
    config: MathVerifyConfig
    grader_packages = ("math-verify",)

    _grader: Grader | None = None

    async def setup(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise missing_package("math-verify", "math", f"environment {self.id}")
        await super().setup()
        self._grader = Grader(self.config.grader_processes, self.config.grader_timeout)
        self.closing.push_async_callback(self._grader.close)

    def final_answer(self, completion: str, gold: str) -> str | None:
        """The final answer of a completion, in the form that `env.read` names; None if it has none."""
        if self.config.read == BOX:
            return boxed(completion, allow_several=is_list(gold))
        if self.config.read == LAST_NUMBER:
            return last_number(completion)
        return final_line(completion, self.config.read)

    @property
    def unanswered(self) -> str:
        if self.config.read == LAST_NUMBER:
            return "they have no number; env.read=box reads the last \\boxed{}"
        place = "a box" if self.config.read == BOX else f"the last line after {self.config.read!r}"
        return f"none is in {place}; if the policy writes prose, env.read={LAST_NUMBER} reads its last number"

    def default_tasks(self, split: str) -> TaskSet:
        operations, digits = self.config.operations, self.config.digits
        if split == "train":
            return GeneratedTasks(lambda index: train_task(index, operations, digits))
        return TaskList(held_out_tasks(operations, digits))

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """One right answer, in a format drawn by the seed; only the boxed format gets the reward."""
        rng = random.Random(f"{task.id} {seed}")
        answer = reference(task.answer)
        share = self.config.boxed_share
        if share is None:
            share = BOXED_SHARE if self.config.data is None else 1.0
        if rng.random() < share:
            return [self._last_line(answer)]
        return [rng.choice((f"The answer is {answer}.", f"= {answer}", answer))]

    def worked_answer(self, task: Task) -> list[str | Message]:
        """The solution in the task's answer, without a calculator's marks (`<<3+4=7>>`), and the final answer as it is
        read."""
        text, answer = str(task.answer), reference(task.answer)
        working = _CALCULATOR.sub("", text.rpartition("####")[0]) if "####" in text else text if boxed(text) else ""
        if self.config.read == BOX and boxed(working):
            return [working]
        return [f"{working.rstrip()}\n{self._last_line(answer)}".lstrip()]

    def _last_line(self, answer: str) -> str:
        """A final answer in the form that is read."""
        marker = {BOX: "", LAST_NUMBER: "The answer is"}.get(self.config.read, self.config.read)
        return f"{marker} {answer}" if marker else rf"\boxed{{{answer}}}"

    async def grade(self, answer: str, gold: str, problem: str = "") -> Grade:
        """Grade the content of a box: by its text where that is enough, else in a grading process."""
        certain = grade_by_text(answer, gold, problem)
        if certain is not None:
            return Grade(certain)
        assert self._grader is not None  # a reset has set the spec up
        return await self._grader.grade(plain(answer), plain(gold), problem)

    boxed = staticmethod(boxed)  # for other frameworks' files

    @staticmethod
    def grade_here(answer: str, gold: str, seconds: int | None) -> bool:
        """Grade in this process. Parsing and comparing may take `seconds` each (None: no limit); the limit is set by a
        signal, so that only the main thread can give one."""
        certain = grade_by_text(answer, gold)
        if certain is not None:
            return certain
        try:
            from math_verify import parse, verify
        except ImportError:
            raise missing_package("math-verify", "math", "grading") from None
        left, right = (parse(rf"\boxed{{{plain(text)}}}", parsing_timeout=seconds) for text in (gold, answer))
        return bool(verify(left, right, timeout_seconds=seconds))


def train_task(index: int, operations: Sequence[Operation], digits: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    rng = random.Random(f"train {index}")
    while True:
        problem = draw(rng, operations, digits)
        if not is_held_out(*problem):
            return _task(f"train-{index}", *problem)


def held_out_tasks(operations: Sequence[Operation], digits: int) -> list[Task]:
    """The 512 test tasks, all different; fewer where there are not as many problems (one digit)."""
    rng = random.Random("test")
    problems: dict[tuple[Operation, int, int], None] = {}
    for _ in range(40 * TEST_TASKS):  # ample: one draw in eight is held out
        problem = draw(rng, operations, digits)
        if is_held_out(*problem):
            problems[problem] = None
        if len(problems) == TEST_TASKS:
            break
    return [_task(f"test-{index}", *problem) for index, problem in enumerate(problems)]


def draw(rng: random.Random, operations: Sequence[Operation], digits: int) -> tuple[Operation, int, int]:
    """An operation and two operands of at most `digits` digits."""
    return rng.choice(operations), rng.randrange(10**digits), rng.randrange(10**digits)


def is_held_out(operation: Operation, a: int, b: int) -> bool:
    """True for a problem of the test tasks, by a hash that is the same everywhere.

    The order of the operands does not count: 45 + 23 is no new problem to a policy trained on 23 + 45.
    """
    return hash_fraction(f"{min(a, b)} {operation} {max(a, b)}") < TEST_SHARE


def _task(id: str, operation: Operation, a: int, b: int) -> Task:
    return Task(id=id, prompt=f"What is {a} {operation} {b}?", answer=COMPUTE[operation](a, b))
