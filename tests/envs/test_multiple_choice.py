"""multiple_choice: which rows are questions, which option a completion chooses, and that hedges choose none."""

import asyncio
import json
import re
import time

import pytest

import envgym
from envgym.check import CheckVerdict, check_environment
from envgym.envs.multiple_choice import COMPLETIONS, INSTRUCTIONS, LETTERS, choice, chosen
from envgym.errors import ConfigError, DataError
from envgym.types import Task

NAME = "envgym.envs.multiple_choice:MultipleChoice"
PLANETS = ["Mercury", "Venus", "the Earth", "Mars"]
READINGS = ("box", "answer", "first")


def spec_of(**config):
    return envgym.spec(NAME, **config)


def task(answer, **fields):
    return Task("t", "Which is red?", answer, fields=fields)


def play(spec, of, text, seed=0):
    """The observation's text, the reward and the info of one completion."""

    async def main():
        env = spec.make()
        observation, _ = await env.reset(seed=seed, options={"task": of})
        _, reward, terminated, _, info = await env.step(envgym.Action(text))
        assert terminated
        assert reward == info["score"]
        return observation.messages[-1].text, reward, info

    return asyncio.run(main())


# -- reading completions ---------------------------------------------------------------------------------

CONTENTS = {
    "C": "C", "c": "C", "(C)": "C", "(c)": "C", "C.": "C", "C)": "C", "**C**": "C", r"\text{C}": "C", "C:": "C",
    r"\textbf{(C)}": "C", r"\textbf{(C) }the Earth": "C", "$C$": "C", "$C$.": "C", "**C.**": "C", "`C`": "C",
    "C. the Earth": "C", "C: the earth.": "C", "(C) the Earth": "C", "C) The  Earth": "C", r"\text{C. the Earth}": "C",
    "the Earth": "C", "The  EARTH.": "C", r"\text{the Earth}": "C", "Mars": "D", "$Mars$": "D", r"\mathrm{Mars}": "D",
    "A or B": None, "A, B": None, "A and C": None, "A/B": None, "AB": None, "A B": None, "not A": None, "A. B": None,
    "C. Mars": None, "C: the Earth or Mars": None, "E": None, "Z": None, "": None, " ": None, "Earth": None, "3": None,
    r"\text{A} or \text{B}": None, "$A$ or $B$": None, "**A** or **B**": None, "(A)(B)": None, "Mars, Venus": None,
    "all of them": None, "A?": None, "\u0421": None, "none": None, ".": None,
}  # fmt: skip
"""What stands in a box or after `Answer:`, and the letter that it is of PLANETS."""
TRANSCRIPTS = {
    "box": {
        r"It is \boxed{C}.": "C",
        r"$\boxed{C}$": "C",
        r"\boxed{\text{(C)}}": "C",
        r"\boxed{\boxed{C}}": "C",
        r"\boxed{A} " + "No, I looked at it from the wrong side. " * 3 + r"\boxed{B}": "B",
        r"First \boxed{A}. Then again: \boxed{B}": "B",
        r"\boxed{C} is right, not A.": "C",
        r"\boxed{A} or \boxed{B}": None,
        r"\boxed{A}, \boxed{B}": None,
        r"\boxed{A} and \boxed{B} and \boxed{C} and \boxed{D}": None,
        r"\boxed{A \text{ or } B}": None,
        r"\boxed{A, B, C, D}": None,
        r"\boxed{}": None,
        r"\boxed{C": None,
        "C": None,
        "Answer: C": None,
        "": None,
    },
    "answer": {
        "It is red.\n\nAnswer: C": "C",
        "ANSWER: C": "C",
        "answer: C\n\n": "C",
        "**Answer: C**": "C",
        "**Answer:** C": "C",
        "**Answer**: C": "C",
        "The answer: C.": "C",
        "Final Answer: (C)": "C",
        r"Answer: \boxed{C}": "C",
        r"Answer: $\boxed{\text{C}}$": "C",
        "### Answer: C": "C",
        "Answer: A\nNo.\nAnswer: C": "C",
        "Answer: C\nBecause it is red.": None,
        "Answer: A or Answer: B": None,
        "Answer: A, Answer: B": None,
        "Not the answer: C": None,
        "NoAnswer: C": None,
        "The answer is C": None,
        "Answer C": None,
        "Answer:\nC": None,
        "Answer:": None,
        "Answer: **": None,
        r"\boxed{C}": None,
        "C": None,
        "\n \n": None,
    },
    "first": {
        "C": "C",
        " C\n": "C",
        "C.": "C",
        "(C)": "C",
        "**C**": "C",
        r"\textbf{(C)}": "C",
        "$C$": "C",
        "C. the Earth": "C",
        "**C**. the Earth\nIt is blue.": "C",
        "C: the earth": "C",
        "C, because the Earth is blue.": "C",
        "C) because\nA is small": "C",
        "C\nbecause of A": "C",
        "C. A man knows": "C",
        "C. C": "C",
        "A. I think": "A",
        "the Earth": "C",
        "Mars.": "D",
        "c": None,
        "E": None,
        "A man walks": None,
        "A": "A",
        "Certainly C": None,
        "I think C": None,
        "As C": None,
        "A or B": None,
        "A, B": None,
        "A, or B.": None,
        "A) or (B)": None,
        "A/B": None,
        "A and C": None,
        "AB": None,
        "A\nB\nC\nD": None,
        "A. B. C. D.": None,
        "A, B or C": None,
        "C. Mars": None,
        "not A": None,
        "Answer: C": None,
        r"\boxed{A} or \boxed{B}": None,
        "": None,
    },
}


def letter(index):
    return None if index is None else LETTERS[index]


@pytest.mark.parametrize(("text", "expected"), CONTENTS.items())
def test_what_an_answer_is(text, expected):
    assert letter(chosen(text, PLANETS)) == expected
    assert letter(choice(rf"So it is \boxed{{{text}}}", PLANETS, "box")) == expected
    assert letter(choice(f"Answer: {text}", PLANETS, "answer")) == expected


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [(read, text, expected) for read, texts in TRANSCRIPTS.items() for text, expected in texts.items()],
)
def test_which_option_a_completion_chooses(read, text, expected):
    assert letter(choice(text, PLANETS, read)) == expected


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("A", ["B", "A", "AB", "O"], "A"),  # the letter that the prompt asks for, before a text
        ("AB", ["B", "A", "AB", "O"], "C"),
        ("O", ["B", "A", "AB", "O"], "D"),
        ("A. B", ["B", "A", "AB", "O"], "A"),
        ("c", ["c", "a", "b"], "A"),
        ("b", ["x", "y"], "B"),
        ("mg", ["Mg", "mg"], "B"),
        ("MG", ["Mg", "mg"], None),
        ("$5", ["5", "$5"], "B"),
        ("x^2", ["$x^2$", "$x$"], "A"),
        ("one", ["one", "one", "two"], None),
        ("B. one", ["one", "one", "two"], "B"),
        ("A and B", ["A", "B", "A and B"], "C"),
        ("A. 1, 2...", ["1, 2...", "3"], "A"),
        (".", [",", "."], "B"),
        ("", [",", "."], None),
        ("A. thaliana", ["B. subtilis", "A. thaliana"], "B"),
    ],
)
def test_letters_and_texts_that_resemble_each_other(text, options, expected):
    assert letter(chosen(text, options)) == expected


def test_the_first_letter_may_stand_before_its_own_text():
    assert choice("A. B", ["B", "A", "AB", "O"], "first") == 0
    assert choice("A man walks", ["A dog", "A man walks"], "first") == 1
    assert choice("A. A man walks", ["A man walks", "A dog"], "first") == 0
    assert choice("A. A man walks", ["A dog", "A man walks"], "first") is None


@pytest.mark.parametrize("read", READINGS)
def test_hostile_completions_are_read_at_once(read):
    parts = (r"\text{", r"\boxed{", "A ", "(", "*", "answer", "Answer:", "A\n", "$", "A,", " " * 5, r"\boxed{A} or ")
    start = time.process_time()
    for part in parts:
        assert choice(part * 20_000, PLANETS, read) in (None, 0)
    assert time.process_time() - start < 5


# -- rows ------------------------------------------------------------------------------------------------

TEXTS = ["4", "5", "6 (six)", "B or C"]
ROWS = [
    ({"options": TEXTS}, 2),
    ({"options": TEXTS}, "C"),
    ({"options": TEXTS}, "(C)"),
    ({"options": TEXTS}, "C."),
    ({"options": TEXTS}, "c"),
    ({"options": TEXTS}, " 6 (six)\n"),
    ({"choices": TEXTS}, 2),
    ({"endings": TEXTS}, 2),
    ({"options": None, "choices": TEXTS}, 2),
    ({"options": [4, 5, "6 (six)", "B or C"]}, "C"),
    ({"options": [{"label": label, "text": text} for label, text in zip("1234", TEXTS, strict=True)]}, "3"),
    ({"options": [{"label": label, "text": text} for label, text in zip("FGHJ", TEXTS, strict=True)]}, "H"),
    ({"options": [{"label": label, "text": text} for label, text in zip((0, 1, 2, 3), TEXTS, strict=True)]}, 2),
    ({"options": [{"text": text} for text in TEXTS]}, "C"),
    ({"choices": {"text": TEXTS, "label": list("ABCD")}}, "C"),
    ({"choices": {"text": TEXTS, "label": list("1234")}}, "3"),
    ({"choices": {"text": TEXTS, "label": list("1234")}}, "C"),
    ({"choices": {"text": TEXTS}}, "C"),
    ({"options": dict(zip("ABCD", TEXTS, strict=True))}, "C"),
    ({"options": "A) 4 B) 5 C) 6 (six) D) B or C"}, "C"),
    ({"options": "(A) 4 (B) 5 (C) 6 (six) (D) B or C"}, "C"),
    ({"options": "A. 4\nB. 5\nC. 6 (six)\nD. B or C"}, 2),
    ({"options": " A: 4 B: 5 C: 6 (six) D: B or C "}, "6 (six)"),
    ({"options": ["A)4", "B)5", "C)6 (six)", "D)B or C"]}, "C"),
]


@pytest.mark.parametrize(("fields", "answer"), ROWS)
def test_forms_of_rows(fields, answer):
    of = task(answer, **fields)
    prompt, reward, info = play(spec_of(), of, r"\boxed{C}")
    assert prompt == f"Which is red?\n\nA. 4\nB. 5\nC. 6 (six)\nD. B or C\n\n{INSTRUCTIONS['box']}"
    assert (reward, info["answer"], info["metrics"]) == (1.0, "C", {"answered": 1.0})
    assert [play(spec_of(), of, rf"\boxed{{{wrong}}}")[1] for wrong in "ABD"] == [0.0] * 3


def test_marks_inside_an_option_of_a_text():
    of = task("B", options="A) set A\nB) either A) or B) of them\nC) none")
    prompt, reward, _ = play(spec_of(instruction=""), of, r"\boxed{B}")
    assert (prompt, reward) == ("Which is red?\n\nA. set A\nB. either A) or B) of them\nC. none", 1.0)


def test_a_chat_and_an_instruction():
    chat = (envgym.Message("system", "s"), envgym.Message("user", "q"))
    of = Task("t", chat, "B", fields={"choices": ["x", "y"]})
    assert play(spec_of(instruction="Choose."), of, "")[0] == "q\n\nA. x\nB. y\n\nChoose."
    _, reward, info = play(spec_of(), of, "B")
    assert (reward, info["answer"], info["metrics"]) == (0.0, None, {"answered": 0.0})


@pytest.mark.parametrize(
    ("answer", "options", "problem"),
    [
        (4, TEXTS, "the answer 4 is no index from 0, label or text of an option; they are '4', '5', '6 (six)', 'B or"),
        (-1, TEXTS, "the answer -1 is no index"),
        (True, TEXTS, "the answer True is no index"),
        (1.0, TEXTS, "the answer 1.0 is no index"),
        (None, TEXTS, "the answer None is no index"),
        ("", TEXTS, "the answer '' is no index"),
        (["C"], TEXTS, "the answer ['C'] is no index"),
        ("E", TEXTS, "the answer 'E' is no index"),
        ("2", TEXTS, "the answer '2' is no index"),
        ("one", ["one", "two", "one"], "the answer 'one' names 2 options"),
        (2, {"text": TEXTS, "label": list("1234")}, "the answer 2 names 2 options"),  # from 0, or a label?
        ("A", ["one"], "there are 1 options; a question has 2 to 26"),
        (0, [str(number) for number in range(27)], "there are 27 options"),
        (0, [], "there are 0 options"),
        (0, ["x", " "], "an option is a text or a number, not ' '"),
        (0, ["x", None], "an option is a text or a number, not None"),
        (0, {"text": ["x", "y"], "label": ["A"]}, "2 options have 1 labels"),
        (0, {"text": ["x"], "label": ["A", "B"]}, "an option is a text or a number, not None"),
        (0, [{"text": "x", "label": "A"}, {"text": "y", "label": None}], "2 options have 1 labels"),
        (0, [{"label": "A"}, {"label": "B"}], "an option is a text or a number, not None"),
        (0, ["x", {"text": "y"}], "an option is a text or a number, not {'text': 'y'}"),
        (0, 3, "options are a list, a mapping or a text, not 3"),
        (0, "x, y", "the options 'x, y' are not marked A) … B) … in order"),
        (0, "A) x C) y", "are not marked"),
        (0, "A) x B) B) y", "are not marked"),
    ],
)
def test_a_row_without_one_right_option_is_an_error_of_one_line(answer, options, problem):
    with pytest.raises(DataError, match=re.escape(problem)) as error:
        play(spec_of(), task(answer, options=options), "")
    assert str(error.value).startswith("task t: ")
    assert len(str(error.value).splitlines()) == 1


def test_options_that_are_not_there():
    with pytest.raises(DataError, match=r"task t: no options in options, choices, endings: say where .* env.options="):
        play(spec_of(), task(0, option=TEXTS), "")
    with pytest.raises(
        DataError, match=r"no field 'optoin' of env.options; the row has option. Did you mean 'option'?"
    ):
        play(spec_of(options="optoin"), task(0, option=TEXTS), "")
    with pytest.raises(DataError, match=r"no field 'y' of env.options; the row has x"):
        play(spec_of(options=["x", "y", "z"]), task("2", x="1"), "")
    with pytest.raises(ConfigError, match=r"data.path=FILE"):
        asyncio.run(spec_of().ensure_setup()) or spec_of().tasks("train")
    with pytest.raises(ConfigError, match="key 'read'"):
        spec_of(read="last")


def rows_with(**fields):
    return [{"question": f"q{number}", **fields} for number in range(20)]


def outcomes(spec, text):
    """Prompts, rewards and chosen letters of a completion, for the first training task."""

    async def main():
        async with spec:
            return await spec.tasks("train").get(0)

    return play(spec, asyncio.run(main()), text)


GPQA = {"Correct Answer": "Mars", "Incorrect Answer 1": "Venus", "Incorrect Answer 2": "Mercury"}


def test_each_option_in_a_field():
    """The field of the answer is not in a task's fields: it is the option that is missing there."""
    fields = ["Incorrect Answer 1", "Correct Answer", "Incorrect Answer 2"]
    data = {"path": rows_with(**GPQA), "answer": "Correct Answer"}
    prompt, reward, _ = outcomes(spec_of(data=data, options=fields), r"\boxed{B}")
    assert "A. Venus\nB. Mars\nC. Mercury\n" in prompt
    assert reward == 1.0
    # A label in another field.
    rows = rows_with(opa="x", opb="y", opc="z", cop="B")
    spec = spec_of(data={"path": rows, "answer": "cop"}, options=["opa", "opb", "opc"])
    assert outcomes(spec, r"\boxed{B}")[1] == 1.0
    # A field that is missing by mistake is not taken for the answer's.
    spec = spec_of(data={"path": rows, "answer": "cop"}, options=["opa", "opb", "opd"])
    with pytest.raises(DataError, match=r"no field 'opd' of env.options"):
        asyncio.run(spec.ensure_setup())


@pytest.mark.parametrize("name", ["answer", "answer_index", "answerKey", "correct", "label"])
def test_usual_names_of_answers(name):
    assert outcomes(spec_of(data=rows_with(choices=PLANETS, **{name: "D"})), r"\boxed{D}")[1] == 1.0


@pytest.mark.parametrize("split", ["path", "test_path"])
def test_a_wrong_field_is_reported_by_setup(split):
    good, bad = rows_with(choices=PLANETS, answer="A"), rows_with(choices=PLANETS, answer="E")
    bad = [{**row, "question": f"other {row['question']}"} for row in bad]
    data = {"path": good, "test_path": good, split: bad}
    with pytest.raises(DataError, match="the answer 'E' is no index"):
        asyncio.run(spec_of(data=data).ensure_setup())


# -- order and demonstrations ----------------------------------------------------------------------------


def test_the_seed_draws_the_order():
    spec, of = spec_of(shuffle=True), task("D", choices=PLANETS)
    orders = {seed: play(spec, of, "Mars", seed)[0] for seed in range(60)}
    assert {seed: play(spec, of, "Mars", seed)[0] for seed in range(60)} == orders
    assert len(set(orders.values())) > 15
    letters = []
    for seed, prompt in orders.items():
        [right] = [line[0] for line in prompt.splitlines() if line.endswith(". Mars")]
        rewards = {letter: play(spec, of, rf"\boxed{{{letter}}}", seed)[1] for letter in "ABCD"}
        assert rewards == {letter: float(letter == right) for letter in "ABCD"}
        assert sorted(line[3:] for line in prompt.splitlines()[2:6]) == sorted(PLANETS)
        letters.append(right)
    assert {letters.count(letter) > 5 for letter in "ABCD"} == {True}
    others = {spec.question(Task(f"t{number}", "q", "D", fields=of.fields), 0)[1] for number in range(20)}
    assert others == {0, 1, 2, 3}, "one seed gives different tasks different orders"
    assert len({play(spec_of(), of, "", seed)[0] for seed in range(5)}) == 1


def test_without_a_seed_the_order_is_random_too():
    spec, of = spec_of(shuffle=True), task("D", choices=PLANETS)
    assert len({play(spec, of, "", None)[0] for _ in range(20)}) > 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("read", READINGS)
@pytest.mark.parametrize("options", [PLANETS, ["one", "two", "three", "one"], ["f(x) = {", "A", "d", "C"], ["1", "2"]])
def test_demonstrations_are_right(options, read, shuffle):
    spec = spec_of(read=read, shuffle=shuffle)
    for index in range(len(options)):
        of = task(index, choices=options)
        for seed in range(12):
            [text] = spec.demonstrations(of, seed)
            assert play(spec, of, text, seed)[1] == 1.0, text
            [replayed] = spec.recording(of, seed, 0).turns
            assert play(spec, of, replayed, seed)[1] == 1.0, replayed
            assert replayed in {COMPLETIONS[read].format(letter) for letter in "ABCD"}
    if options == PLANETS:
        shown = {play(spec, of, spec.demonstrations(of, seed)[0], seed + 1)[1] for seed in range(12)}
        assert shown == {1.0}, "whatever the order of the options is"


@pytest.mark.parametrize("config", [{"read": read, "shuffle": shuffle} for read in READINGS for shuffle in (0, 1)])
def test_it_passes_its_check(config, tmp_path):
    rows = [
        {"question": f"What is {a} + {a + 3}?", "choices": [2 * a + 3 + (k - a) % 4 for k in range(4)], "answer": a % 4}
        for a in range(20, 60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = asyncio.run(check_environment(NAME, {**config, "data": str(tmp_path / "rows.jsonl")}))
    assert [str(finding) for finding in report.findings if finding.verdict is CheckVerdict.FAILED] == []
    assert report.verdict("demonstrations") is CheckVerdict.OK


# -- benchmarks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "settings"),
    [
        ("sat_math", 32, {"answer": "Answer"}),
        pytest.param("mmlu_stem", 3018, {}, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_references_of_benchmarks(name, count, settings, benchmark_data):
    """Each reference, by its letter and by its text, gets the reward in every form, and no other letter does."""
    path = benchmark_data / f"{name}.jsonl"
    wrong = []

    async def main(read):
        async with spec_of(data={"path": str(path), **settings}, read=read) as spec:
            env, splits = spec.make(), [spec.tasks("train"), spec.tasks("test")]
            tasks = [await split.get(index) for split in splits for index in range(split.size)]
            for of in tasks:
                options, right = spec.question(of, 0)
                texts = {letter: float(letter == LETTERS[right]) for letter in LETTERS[: len(options)]}
                if options.count(options[right]) == 1:
                    texts[f"{LETTERS[right]}. {' '.join(options[right].split())}"] = 1.0  # in one line
                for text, expected in texts.items():
                    await env.reset(options={"task": of}, seed=0)
                    step = await env.step(envgym.Action(COMPLETIONS[read].format(text)))
                    if step[1] != expected:
                        wrong.append((of.id, read, text))
            return len(tasks)

    assert [asyncio.run(main(read)) for read in READINGS] == [count] * 3
    assert wrong == []
