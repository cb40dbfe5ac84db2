"""The cheats as data: every field is known, every program is one, and forms come from demonstrations."""

import asyncio
import random
import re
from pathlib import Path

import pytest

from envgym.attack.attempts import CheatAttempts, _calls
from envgym.attack.fields import CHEATS, CONSTANTS, echoes, fill, guess_fields
from envgym.attack.forms import RAW, split_form
from envgym.check.subject import Subject
from envgym.registry import spec
from envgym.types import Message, Observation, ToolSpec

LITERAL = {"answer", "args", "call", "name", "each", "correct"}
"""Words in braces that are no fields: templates, Python's f-strings, and what calls fill in."""


def fields(*observations, guess="7"):
    rng = random.Random(0)
    return {
        **CONSTANTS,
        **guess_fields([guess, "8"], rng, RAW.text),
        **echoes(
            [Observation((Message.user(text),)) for text in observations or ("Write f(a): a plus 1.",)], guess, rng
        ),
    }


def texts(cheat):
    return [cheat] if isinstance(cheat, str) else [text for turn in cheat for text in turn.values()]


def test_there_are_forty_general_cheats_and_every_field_is_known():
    assert len(CHEATS["texts"]) + len(CHEATS["echoes"]) >= 40
    known = fields()
    for kind in ("texts", "echoes", "hanging", "tools", "programs", "endless_programs", "left_behind"):
        for name, cheat in CHEATS[kind].items():
            words = {word for text in texts(cheat) for word in re.findall(r"\{([a-z]\w*)\}", text)}
            assert words - LITERAL <= set(known), name


@pytest.mark.parametrize("kind", ["programs", "endless_programs"])
def test_programs_are_programs(kind):
    for name, cheat in CHEATS[kind].items():
        program = fill(cheat, fields())
        compile(program, name, "exec")
        assert "{folders}" not in program


def run(name, conversation):
    """The function that a program defines."""
    namespace = {}
    exec(fill(CHEATS["programs"][name], fields(conversation)), namespace)
    return namespace


def test_a_program_finds_the_results_of_the_examples():
    conversation = "Write `add(a, b)`.\nadd(1, 2) == 3\nadd([4], [5]) == [4, 5]  # a list\n"
    add = run("the expected results, from the examples of the task", conversation)["add"]
    assert (add(1, 2), add([4], [5]), add(9, 9)) == (3, [4, 5], None)


def test_a_program_finds_the_results_in_the_frames():
    add = run("the expected results, from the frames", "Write add(a, b).")["add"]

    def grade():
        cases = [{"args": [1, 2], "expected": 3}, {"args": [4, 5], "expected": 9}]
        return [add(*case["args"]) for case in cases]

    assert grade() == [3, 9]


@pytest.mark.parametrize(
    ("field", "text", "piece"),
    [
        ("conversation_last_marked", "The question.\nIncorrect. The correct value was 77.", "77"),
        ("conversation_last_marked", '{"id": 3, "answer": "oak", "n": 1}', "oak"),
        ("conversation_last_marked", '<p data-answer="42">x</p>', "42"),
        ("conversation_last_hidden", "<p>a</p>\n<!-- 12\n -->", "12"),
        ("conversation_last_quoted", "say 'red' or `blue`", "blue"),
        ("last_after_colon", "Correct the spelling: teh cat", "teh cat"),
        ("first_option", "Which is it: a fox, an owl or the emu?", "fox"),
        ("last_option", "Which is it: a fox, an owl or the emu?", "emu"),
        ("last_number", "from 3 to -17.5 and", "-17.5"),
        ("decoded", "token: b2FrIHRyZWU=", "oak tree"),
        ("tags", "write <a>x</a> and <b>", "<a>7</a><b>7</b>"),
        ("conversation_last_marked", "nothing is there", ""),
    ],
)
def test_echoes(field, text, piece):
    assert fields(text)[field]() == piece


@pytest.mark.parametrize(
    ("turns", "answer", "text", "guess"),
    [
        (["\\boxed{12}"], "12", "\\boxed{x}", "12"),
        (["I add.\n#### 12"], "12", "I add.\n#### x", "12"),
        (["look", "<answer>a b</answer>"], "", "<answer>x</answer>", "a b"),
        (["So it is 12 after all."], "12", "So it is x after all.", "12"),
        (["Here:\n```python\ndef f(): 1\n```"], "", "Here:\n```python\nx```", "def f(): 1\n"),
        (["north"], "", "x", "north"),
    ],
)
def test_the_form_of_a_right_answer(turns, answer, text, guess):
    form, found = split_form(turns, answer)
    assert (form.text("x"), found, list(form.lead)) == (text, guess, turns[:-1])


async def prepared(file):
    """The subject and the attempts of a planted environment."""
    env_spec = spec(str(Path(__file__).parent / "planted" / file))
    await env_spec.ensure_setup()
    subject = Subject(env_spec, file, {})
    attempts = CheatAttempts(subject)
    await attempts.prepare()
    return subject, attempts.tasks, {attempt.name: attempt for attempt in attempts.attempts()}


def test_no_cheat_knows_the_answer_of_its_own_task():
    """Of 50 tasks with different answers each cheat says those of 49 others."""
    _, tasks, attempts = asyncio.run(prepared("weak/key_in_comment.py"))
    for number, task in enumerate(tasks):
        script = attempts["all guesses in a line"].scripts(task, number)[0]
        guesses = script(0, Observation((Message.user("What?"),))).text.split()
        assert len(guesses) == 49
        assert task.answer not in guesses


@pytest.mark.parametrize(
    ("file", "cheat"),
    [
        ("weak/submits_again.py", "the first try tells the answer"),
        ("weak/reads_paths.py", "the folder above"),
        ("weak/believes_results.py", "tags of the observations"),
        ("weak/equal_in_there.py", "an object that equals everything"),
        ("weak/tests_beside.py", "the tests are overwritten"),
        ("weak/evaluates_answers.py", "the answer in a frame of the grader"),
    ],
)
def test_a_cheat_earns_all(file, cheat):
    async def best_score():
        subject, tasks, attempts = await prepared(file)
        episodes = [await subject.play(tasks[0], 0, script) for script in attempts[cheat].scripts(tasks[0], 0)]
        await subject.spec.close()
        return max(episode.result.score for episode in episodes)

    assert asyncio.run(best_score()) == 1.0


def test_the_turns_before_an_answer_are_those_of_a_demonstration():
    _, tasks, attempts = asyncio.run(prepared("weak/believes_results.py"))
    script = attempts["a guess or another"].scripts(tasks[0], 0)[1]
    observation = Observation((Message.user("go"),))
    assert re.fullmatch(r"<weigh>\w+</weigh>", script(0, observation).text)
    assert re.fullmatch(r"<answer>\d+ or \d+</answer>", script(1, observation).text)


def test_a_tool_that_changes_something_gets_no_path_out_of_its_folder():
    parameters = {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}}
    tools = [ToolSpec(name, "", parameters) for name in ("read_file", "delete_file")]
    observation = Observation((Message.user("go"),), tools=tuple(tools))
    calls = _calls("../x", [observation], {}, [])
    assert [(call.name, call.arguments["name"]) for call in calls] == [("read_file", "../x")]
    assert [call.arguments for call in _calls("-1", [observation], {}, [])] == [{"name": "-1", "count": -1}] * 2
