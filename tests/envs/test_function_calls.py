"""function_calls: which calls are right, and the rows of the Berkeley Function Calling Leaderboard as published."""

import asyncio
import json
from collections import Counter

import pytest

import envgym
from envgym import registry
from envgym.envs.function_calls.comparison import are_right
from envgym.errors import DataError
from envgym.types import Action, ToolCall

NAME = "function_calls"
ITEM = {"type": "dict", "properties": {"size": {"type": "integer"}, "colour": {"type": "string"}}}
PROPERTIES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "float"}, "sure": {"type": "boolean"},
    "words": {"type": "array", "items": {"type": "string"}}, "point": {"type": "tuple", "items": {"type": "float"}},
    "item": ITEM, "items": {"type": "array", "items": ITEM}, "thing": {"type": "any"},
    "untyped": {"enum": ["Rome", 3]},
}  # fmt: skip
DRAW = {"name": "art.draw", "description": "Draw.", "parameters": {"type": "dict", "properties": PROPERTIES}}
ERASE = {"name": "erase", "description": "Erase.", "parameters": {"type": "dict", "properties": {}, "required": []}}

VERDICTS = [
    ("text", ["New York, NY"], "new york NY", True),
    ("text", ["New York, NY"], "New York", False),
    ("text", ["it's"], 'it"s', True),
    ("text", ["5"], 5, False),
    ("text", [5], 5, True),  # the type of the allowed values is right too
    ("text", [5], "5", False),
    ("count", [5], 5, True),
    ("count", [5], 5.0, False),
    ("count", [1], True, False),
    ("count", ["n"], "n", True),  # a variable
    ("count", ["n"], "N", False),
    ("share", [5.0], 5, True),
    ("share", [0.5], 0.25, False),
    ("sure", [True], True, True),
    ("sure", [True], "true", False),
    ("words", [["Red", "blue"]], ["red", "BLUE"], True),
    ("words", [["Red", "blue"]], ["blue", "red"], False),
    ("words", [["Red"], ["blue"]], ["blue"], True),
    ("words", [["Red"]], "Red", False),
    ("point", [[1.5, 2.0]], [1.5, 2], False),
    ("point", [[1, 2]], [1, 2], True),
    ("item", [{"size": [1], "colour": ["red", ""]}], {"size": 1}, True),
    ("item", [{"size": [1], "colour": ["red", ""]}], {"size": 1, "colour": "Red"}, True),
    ("item", [{"size": [1], "colour": ["red"]}], {"size": 1}, False),
    ("item", [{"size": [1]}], {"size": 1, "weight": 2}, False),
    ("items", [[{"size": [1]}, {"size": [2]}]], [{"size": 1}, {"size": 2}], True),
    ("items", [[{"size": [1]}, {"size": [2]}]], [{"size": 2}, {"size": 1}], False),
    ("items", [[{"size": [1]}]], [{"size": 1}, {"size": 1}], False),
    ("thing", [None, ""], None, True),
    ("unknown", [1], 1, False),
    ("untyped", ["Rome"], "rome", True),
    ("untyped", [3], 3, True),
    ("untyped", ["Rome"], "Paris", False),
]


@pytest.mark.parametrize(("name", "allowed", "value", "expected"), VERDICTS)
def test_an_argument_is_compared_as_its_type_asks(name, allowed, value, expected):
    answer = [{"art.draw": {name: allowed}}]
    assert are_right([ToolCall("", "art_draw", {name: value})], answer, [DRAW]) is expected


def call(name, **arguments):
    return ToolCall("", name, arguments)


TWO = [{"art.draw": {"count": [1], "text": ["", "x"]}}, {"art.draw": {"count": [2]}}]


@pytest.mark.parametrize(
    ("answer", "calls", "expected"),
    [
        (TWO, [call("art_draw", count=2), call("art_draw", count=1)], True),
        (TWO, [call("art_draw", count=1), call("art_draw", count=2, text="x")], False),
        (TWO, [call("art_draw", count=1, text="X"), call("art_draw", count=2)], True),
        (TWO, [call("art_draw", count=1), call("art_draw", count=1)], False),
        (TWO, [call("art_draw", count=1)], False),
        (TWO, [call("art_draw", count=1), call("art_draw", count=2), call("erase")], False),
        ([{"erase": {}}], [call("erase")], True),
        ([{"erase": {}}] * 2, [call("erase"), call("art_draw")], False),
        ([{"erase": {}}], [call("art_draw")], False),
        ([{"erase": {}}], [ToolCall("", "erase", {}, "not JSON")], False),
        ([], [], True),
        ([], [call("erase")], False),
        ([], [ToolCall("", "", {}, "not JSON")], False),
        ("any", [call("erase")], True),
        ("any", [], False),
        ("any", [ToolCall("", "", {}, "not JSON")], False),
    ],
)
def test_calls_are_compared_in_any_order_and_none_is_too_many(answer, calls, expected):
    assert are_right(calls, answer, [DRAW, ERASE]) is expected


def written(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"test_path": str(path)}


@pytest.mark.parametrize("function", [DRAW, {"type": "function", "function": DRAW}])
def test_the_policy_reads_a_schema_and_names_without_dots(tmp_path, function):
    row = {
        "question": "Draw.",
        "functions": [function],
        "answer": [{"art.draw": {"point": [[1.5]]}}],
        "category": "easy",
    }

    async def main():
        async with envgym.spec(NAME, data=written(tmp_path, [row])) as spec:
            task = await spec.tasks("test").get(0)
            async with spec.make() as env:
                observation, _ = await env.reset(seed=0, options={"task": task})
                step = await env.step(Action("", tool_calls=(call("art_draw", point=[1.5]),)))
            return observation, step

    observation, (_, reward, terminated, _, info) = asyncio.run(main())
    [tool] = observation.tools
    assert (tool.name, tool.parameters["type"]) == ("art_draw", "object")
    assert tool.parameters["properties"]["point"] == {"type": "array", "items": {"type": "number"}}
    assert observation.messages[-1].text == "Draw."
    assert (reward, terminated, info["score"], info["metrics"]) == (1.0, True, 1.0, {"score_easy": 1.0})
    assert info["answer"] == '[["art_draw", {"point": [1.5]}]]'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"functions": None}, "has no list 'functions'; env.functions names another field"),
        ({"answer": None}, "the answer is a list of calls of its functions"),
        ({"answer": [{"erase": {"a": 1}}]}, "the answer is a list of calls of its functions"),
        ({"answer": [{"other": {}}]}, "the answer is a list of calls of its functions"),
        ({"functions": [{"name": "erase"}]}, "each of 'functions' is a function with `name`, `description` and `param"),
        ({"functions": ["erase"]}, "each of 'functions' is a function with `name`, `description` and `parameters`"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused(change, message, tmp_path):
    row = {"question": "Erase.", "functions": [ERASE], "answer": [{"erase": {}}]} | change

    async def main():
        async with envgym.spec(NAME, data=written(tmp_path, [row])):
            pass

    with pytest.raises(DataError, match=r"task rows-1") as error:
        asyncio.run(main())
    assert message in str(error.value)


# -- the files of the leaderboard -------------------------------------------------------------------------


def write_files(folder, files):
    for name, rows in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))


QUESTION = [[{"role": "user", "content": "Erase."}]]
PUBLISHED = {
    "BFCL_v4_multiple": [{"id": "multiple_0", "question": QUESTION, "function": [ERASE, DRAW]}],
    "BFCL_v4_live_multiple": [{"id": "live_multiple_0", "question": QUESTION, "function": [ERASE]}],
    "BFCL_v4_irrelevance": [{"id": "irrelevance_0", "question": QUESTION, "function": [DRAW]}],
    "BFCL_v4_live_relevance": [{"id": "live_relevance_0", "question": QUESTION, "function": [ERASE]}],
    "BFCL_v4_multi_turn_base": [{"id": "multi_turn_base_0", "question": QUESTION * 2, "function": []}],
    "possible_answer/BFCL_v4_multiple": [{"id": "multiple_0", "ground_truth": [{"erase": {}}]}],
    "possible_answer/BFCL_v4_live_multiple": [{"id": "live_multiple_0", "ground_truth": [{"erase": {}}]}],
}


async def tasks_of(spec):
    tasks = spec.tasks("test")
    return [await tasks.get(number) for number in range(tasks.size)]


@pytest.mark.parametrize("place", ["", "bfcl"])
def test_the_files_of_the_authors_are_joined(place, tmp_path):
    write_files(tmp_path / place, PUBLISHED)

    async def main():
        async with envgym.spec("bfcl", data={"folder": str(tmp_path)}) as spec:
            return [(task.id, task.fields["category"], task.answer) for task in await tasks_of(spec)]

    assert asyncio.run(main()) == [
        ("multiple_0", "multiple", [{"erase": {}}]),
        ("irrelevance_0", "irrelevance", []),
        ("live_multiple_0", "live_multiple", [{"erase": {}}]),
        ("live_relevance_0", "live_relevance", "any"),
    ]


def test_a_question_without_its_answer_is_named(tmp_path):
    write_files(tmp_path, PUBLISHED | {"possible_answer/BFCL_v4_multiple": []})
    with pytest.raises(DataError, match=r"there is no answer to multiple_0 in possible_answer/BFCL_v4_multiple.json"):
        registry.spec("bfcl", data={"folder": str(tmp_path)})
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no file bfcl.jsonl, nor a folder bfcl with the files of its authors in"):
        registry.spec("bfcl", data={"folder": str(empty)})


def test_every_published_answer_is_right_and_every_answer_of_another_request_wrong(benchmark_data):
    async def main():
        async with envgym.spec("bfcl", data={"folder": str(benchmark_data)}) as spec:
            tasks = await tasks_of(spec)
            right, wrong = Counter(), Counter()
            for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
                spec.check_task(task)
                turns = [spec.demonstrations(each, 0)[0] for each in (task, other)]
                calls = [() if isinstance(turn, str) else turn.tool_calls for turn in turns]
                functions, category = spec.functions(task), task.fields["category"]
                right[category, are_right(calls[0], task.answer, functions)] += 1
                if task.answer or other.answer:  # two requests that need no call have the same answer
                    wrong[category, are_right(calls[1], task.answer, functions)] += 1
            return right, wrong

    right, wrong = asyncio.run(main())
    counts = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240}
    assert right == {(category, True): count for category, count in counts.items()}
    assert wrong == {(category, False): count for category, count in (counts | {"irrelevance": 1}).items()}
