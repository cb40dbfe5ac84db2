"""The named task sets that ship: what a model writes earns what its answer is worth, in every form that is read.

Hand-written rows have the form of the rows that each file is for; real ones come from a folder that a variable names.
"""

import asyncio
import json
from pathlib import Path

import pytest

import envgym
from envgym import registry
from envgym.config.resolve import resolve
from envgym.errors import DataError
from envgym.rewards.final_answers import reference
from envgym.tasks.hub import is_hub_id
from envgym.tasks.named_sets import task_set_files
from envgym.types import Action

ADD = {"text": "Write a function to add two numbers.", "code": "def add(a, b):\n    return a + b", "task_id": 11,
       "test_setup_code": "", "test_list": [f"assert add({n}, 1) == {n + 1}" for n in range(3)]}  # fmt: skip
SUBTRACT = {"text": "Write a function to subtract.", "code": "import operator\nsub = operator.sub", "task_id": 601,
            "test_setup_code": "", "test_list": [f"assert sub({n}, 1) == {n - 1}" for n in range(3)]}  # fmt: skip
TWICE = {
    "task_id": "HumanEval/0", "prompt": 'import math\n\n\ndef twice(x):\n    """Twice x."""\n', "entry_point": "twice",
    "canonical_solution": "    return math.prod((2, x))\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
}  # fmt: skip
HALF = {
    "task_id": "HumanEval/1", "prompt": "def half(x):\n    '''Half of x.'''\n", "entry_point": "half",
    "canonical_solution": "    return x / 2\n", "test": "def check(candidate):\n    assert candidate(3) == 1.5\n",
}  # fmt: skip
PLUS = {"prompt": "Write a function to add.", "test_imports": ["import math"],
        "test": "assert add(1, 2) == 3\nassert math.isclose(add(.1, .2), .3)"}  # fmt: skip
ARGUMENTS = {"a": {"type": "integer"}, "b": {"type": "float"}}
FUNCTIONS = [{"name": "math.add", "description": "Add two numbers.",
              "parameters": {"type": "dict", "properties": ARGUMENTS, "required": ["a"]}}]  # fmt: skip
ROWS = {
    "gsm8k": [
        {"question": "Tom has 3 eggs and buys 4.", "answer": "3 + 4 = <<3+4=7>>7 eggs.\n#### 7"},
        {"question": "A box costs $1,200 more than 0.", "answer": "It costs 1200.\n#### 1,200"},
    ],
    "math": [
        {"problem": "Solve $2x = 3$.", "level": "Level 1", "solution": r"So $x = \boxed{\frac{3}{2}}$."},
        {"problem": "Factor $x^2-1$.", "level": "Level 2", "solution": r"It is $\boxed{(x-1)(x+1)}$."},
    ],
    "math_500": [
        {"problem": "What is $1+1$?", "solution": "", "answer": "2", "unique_id": "test/a.json"},
        {"problem": "List the roots.", "solution": "", "answer": "1,-2", "unique_id": "test/b.json"},
    ],
    "aime_2024": [
        {"ID": "2024-I-1", "Problem": "Find m.", "Solution": "", "Answer": 33},
        {"ID": "2024-I-2", "Problem": "Find n.", "Solution": "", "Answer": 25},
    ],
    "aime_2025": [
        {"id": "0", "problem": "Find m.", "answer": "070"},
        {"id": "1", "problem": "Find n.", "answer": "588"},
    ],
    "amc_2023": [
        {"question": "How many miles?", "answer": 27.0, "url": "", "id": 0},
        {"question": "How much is it?", "answer": 36.0, "url": "", "id": 1},
    ],
    "minerva_math": [
        {"problem": "How wide is it?", "solution": r"It is $\boxed{1.6} \mathrm{~cm}$.", "type": "Astronomy"},
        {"problem": "How long?", "solution": r"It takes $\boxed{4e33}$.", "type": "Astronomy"},
    ],
    "olympiadbench": [
        {"id": 1, "question": "Find $x$.", "final_answer": ["2"], "language": "English"},
        {"id": 2, "question": "Find all $x$.", "final_answer": ["$1$, $3$"], "language": "English"},
    ],
    "svamp": [
        {"Body": "There are 87 oranges and 290 bananas in 2 groups.", "Question": "How big is one?", "Answer": 145.0,
         "ID": "chal-1"},
        {"Body": "He had 3 pens.", "Question": "How many are left?", "Answer": 1.5, "ID": "chal-2"},
    ],
    "asdiv": [
        {"body": "Seven red and two green apples.", "question": "How many?", "answer": "9 (apples)"},
        {"body": "It rains on Monday.", "question": "When does it rain?", "answer": "Monday"},
    ],
    "humaneval": [TWICE, HALF],
    "humaneval_plus": [TWICE, HALF],
    "mbpp": [ADD, SUBTRACT, {**ADD, "text": "Again.", "task_id": 510}, {**ADD, "text": "Few-shot.", "task_id": 2}],
    "mbpp_plus": [{**ADD, **PLUS}, {**SUBTRACT, "prompt": "Write it.", "test": "assert sub(3, 1) == 2"}],
    "mmlu_pro": [
        {"question_id": 1, "question": "Which?", "options": [f"option {n}" for n in range(10)], "answer": "I",
         "answer_index": 8, "category": "law"},
        {"question_id": 2, "question": "And?", "options": ["yes", "no", "both"], "answer": "A", "category": "law"},
    ],
    "gpqa_diamond": [
        {"Question": question, "Correct Answer": "10^-4 eV", "Incorrect Answer 1": "10^-8 eV",
         "Incorrect Answer 2": "10^-9 eV", "Incorrect Answer 3": "10^-11 eV"} for question in ("Which?", "What?")
    ],
    "arc_challenge": [
        {"id": "a", "question": "Which?", "choices": {"text": ["dry palms", "wet palms"], "label": ["A", "B"]},
         "answerKey": "A"},
        {"id": "b", "question": "And?", "choices": {"text": ["ice", "steam"], "label": ["1", "2"]}, "answerKey": "2"},
    ],
    "sat_math": [
        {"id": "0", "question": "Which is true?", "options": "A) $f(-6)=0$ B) $f(6)=-6$ C) $f(-6)=6$", "Answer": "A"},
        {"id": "1", "question": "Which is not?", "options": "A) $1$ B) $2$ C) $3$ D) $4$", "Answer": "C"},
    ],
    "mmlu_stem": [
        {"question": "Which?", "type": "biology", "choices": ["a lot", "a few", "none", "all"], "answer": 2},
        {"question": "And?", "type": "physics", "choices": ["up", "down", "left", "right"], "answer": 0},
    ],
    "ifeval": [
        {"key": 1, "prompt": "Write two words.", "instruction_id_list": ["length_constraints:number_words"],
         "kwargs": [{"relation": "less than", "num_words": 3}]},
        {"key": 2, "prompt": "Write a title.", "kwargs": [{}, {"num_words": None}],
         "instruction_id_list": ["detectable_format:title", "punctuation:no_comma"]},
    ],
    "bfcl": [
        {"id": "simple_python_0", "category": "simple_python", "question": "Add 1 and 2.", "functions": FUNCTIONS,
         "answer": [{"math.add": {"a": [1], "b": [2.0]}}]},
        {"id": "simple_python_1", "category": "simple_python", "question": "And 3?", "functions": FUNCTIONS,
         "answer": [{"math.add": {"a": [3], "b": ["", 1.0]}}]},
    ],
}  # fmt: skip
"""Rows of the form of each task set; the answers of the first two differ, but for GPQA's, which are shuffled."""


FOLLOWED = {"1": "Hello there", "2": "<<A title>> of mine"}
"""Answers that follow the instructions of `ifeval`'s rows; the environment writes none."""
PACKAGES = {"ifeval": ("langdetect", "nltk", "punkt")}


@pytest.fixture
def folder(tmp_path):
    """Files as `data.folder` takes them."""
    for name, rows in ROWS.items():
        parts = {name: rows}
        if name != "mbpp" and registry.task_set_of(name).train_on is None:
            parts = {f"{name}_train": rows[:1], f"{name}_test": rows[1:]}
        for stem, lines in parts.items():
            (tmp_path / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return tmp_path


def completion(spec, task):
    """The reference as a model writes it."""
    if hasattr(spec, "final_answer"):
        answer = reference(task.answer).removesuffix(".0")
        return rf"Therefore the answer is $\boxed{{{answer}}}$."
    if type(spec).__name__ == "InstructionFollowing":
        return FOLLOWED[task.id]
    [turn] = spec.demonstrations(task, 0)
    return turn if isinstance(turn, str) else Action("", tool_calls=turn.tool_calls)


async def reward(spec, task, text):
    async with spec.make() as env:
        await env.reset(seed=0, options={"task": task})
        return (await env.step(text))[1]


async def all_tasks(spec):
    return [await tasks.get(n) for tasks in map(spec.tasks, ("train", "test")) for n in range(tasks.size)]


def test_every_task_set_that_ships_has_rows_here_and_says_what_it_is():
    assert set(ROWS) == {name for name, path in task_set_files().items() if "envgym" in str(path)}
    for name in ROWS:
        task_set = registry.task_set_of(name)
        assert task_set.source, name
        if task_set.train_on:
            other = registry.find(task_set.train_on).task_set  # None: an environment, which takes rows of one's own
            assert other is None or other.train_on is None, name
        if is_hub_id(str(task_set.data.get("path") or task_set.data.get("test_path"))):
            assert task_set.data["test_split"], name


@pytest.mark.parametrize("name", ROWS)
def test_a_reference_earns_1_and_the_answer_of_another_row_0(name, folder):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)

    async def main():
        async with envgym.spec(name, data={"folder": str(folder)}) as spec:
            first, second, *_ = tasks = await all_tasks(spec)
            rewards = [await reward(spec, task, completion(spec, task)) for task in tasks]
            wrong = await reward(spec, first, completion(spec, second)), await reward(spec, second, "I do not know.")
            return rewards, wrong

    rewards, wrong = asyncio.run(main())
    assert set(rewards) == {1.0}
    assert wrong[1] == 0.0
    assert wrong[0] == 0.0 or name == "gpqa_diamond"


def test_mbpp_in_one_file_is_split_as_in_the_paper(folder):
    async def main():
        async with envgym.spec("mbpp", data={"folder": str(folder)}) as spec:
            splits = map(spec.tasks, ("train", "test"))
            return [[(await tasks.get(n)).id for n in range(tasks.size)] for tasks in splits]

    assert asyncio.run(main()) == [["601"], ["11", "510"]]


@pytest.mark.parametrize("ending", ["", "\n\ndef helper():\n    return 1\n", "\n# an example\nprint(twice(2))"])
def test_a_base_model_completes_the_prompt_up_to_a_stop(ending, folder):
    async def main():
        async with envgym.spec("humaneval", completion=True, data={"folder": str(folder)}) as spec:
            task = await spec.tasks("test").get(0)
            async with spec.make() as env:
                observation, _ = await env.reset(seed=0, options={"task": task})
            solution = TWICE["canonical_solution"].rstrip("\n")
            return observation, await reward(spec, task, solution + ending), await reward(spec, task, "    return x\n")

    observation, right, wrong = asyncio.run(main())
    assert observation.text == TWICE["prompt"]
    assert not observation.messages
    assert (right, wrong) == (1.0, 0.0)


READERS = [
    ("####", "3 + 4 = 7\n#### 7", 1.0),
    ("####", "3 + 4 = 7\n#### **$7$**.", 1.0),
    ("####", "#### 7\nThat is it.", 0.0),
    ("####", r"\boxed{7}", 0.0),
    ("The answer is", "3 + 4 = 7. The answer is 7.", 1.0),
    ("The answer is", "The answer is 8. No: The answer is 7", 1.0),
    ("The answer is", "The answer is 7. Or is it?", 0.0),
    ("The answer is", "The answer is 7 or 8.", 0.0),
    ("ANSWER:", "So:\n\nANSWER: 7\n\n", 1.0),
    ("ANSWER:", "**ANSWER: 7**", 1.0),
    ("ANSWER:", "answer: 7", 1.0),
    ("Answer:", "**Answer**: 7", 1.0),
    ("Answer:", r"**Answer:** $\boxed{7}$.", 1.0),
    ("Answer:", "the answer 7", 0.0),
    ("The answer is", "the answer is: **7** eggs.", 1.0),
    ("The answer is", "The answer isn't 7", 0.0),
    ("last_number", "She has **$7.00**.", 1.0),
    ("last_number", "5, 6, 7", 1.0),
    ("last_number", "7 eggs, not 8", 0.0),
    ("A:", "DATA: 7", 0.0),
    ("A:", "A:", 0.0),
    ("box", r"Thus \boxed{7}.", 1.0),
]


@pytest.mark.parametrize(("read", "text", "expected"), READERS)
def test_mathematics_is_read_from_a_box_or_from_the_last_line(read, text, expected, folder):
    async def main():
        async with envgym.spec("gsm8k", read=read, data={"folder": str(folder)}) as spec:
            task = await spec.tasks("train").get(0)
            async with spec.make() as env:
                observation, _ = await env.reset(seed=0, options={"task": task})
            return observation.messages[-1].text, await reward(spec, task, text)

    prompt, value = asyncio.run(main())
    assert value == expected
    assert {"box": "\\boxed{}", "last_number": "a number"}.get(read, read) in prompt


def test_demonstrations_have_the_form_that_is_read(folder):
    async def main():
        async with envgym.spec("gsm8k", read="####", boxed_share=1.0, data={"folder": str(folder)}) as spec:
            task = await spec.tasks("train").get(0)
            return spec.demonstrations(task, 0), await reward(spec, task, spec.demonstrations(task, 0)[0])

    assert asyncio.run(main()) == (["#### 7"], 1.0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no file gsm8k_train.jsonl or gsm8k_test.jsonl in"):
        envgym.spec("gsm8k", data={"folder": str(tmp_path)})
    with pytest.raises(DataError, match=r"data.test_path: there is no file or folder svamp.jsonl"):
        resolve({"env": "svamp"})


# -- real rows --------------------------------------------------------------------------------------------

EXCEPTIONS = {}
"""Name -> ids of references that are not graded as right."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["gsm8k", "math_500", "minerva_math", "svamp", "asdiv", "humaneval", "mbpp", "sat_math", "mmlu_stem"]
)
def test_real_references_earn_1_and_answers_of_other_rows_0(name, benchmark_data):
    async def main():
        async with envgym.spec(name, data={"folder": str(benchmark_data)}) as spec:
            tasks = await all_tasks(spec)
            neighbours = [next((o for o in tasks[n:] + tasks[:n] if differs(o, t)), None) for n, t in enumerate(tasks)]
            right = await rewards_of(spec, [(task, completion(spec, task)) for task in tasks])
            is_program = "entry_point" in tasks[0].fields or "test_list" in tasks[0].fields
            wrong = [] if is_program else await rewards_of(
                spec, [(task, completion(spec, other)) for task, other in zip(tasks, neighbours, strict=True) if other]
            )  # fmt: skip
            return [task.id for task, value in zip(tasks, right, strict=True) if value != 1], sum(wrong)

    missed, rewarded = asyncio.run(main())
    assert missed == EXCEPTIONS.get(name, [])
    assert rewarded == 0


def differs(a, b):
    """True if two answers have different values: numbers for mathematics, anything else for options."""
    texts = [str(reference(task.answer)).replace(",", "").removesuffix(".0") for task in (a, b)]
    return texts[0] != texts[1] and all(text.lstrip("-").isdecimal() or len(text) == 1 for text in texts)


async def rewards_of(spec, pairs):
    values = []
    for start in range(0, len(pairs), 32):
        values += await asyncio.gather(*(reward(spec, task, text) for task, text in pairs[start : start + 32]))
    return values


def test_the_page_lists_them_all():
    page = (Path(__file__).parents[2] / "docs" / "evaluation" / "task_sets.md").read_text()
    assert [name for name in ROWS if f"| `{name}` |" not in page] == []
