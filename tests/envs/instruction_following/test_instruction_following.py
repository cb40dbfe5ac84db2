"""instruction_following: the verdict on each instruction, which are those of IFEval's published checker."""

import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path

import pytest

import envgym
from envgym.envs.instruction_following import _verdicts
from envgym.envs.instruction_following.instructions import CHECKS, are_followed, load_languages
from envgym.errors import DataError, MissingDependency

from tests.envs.instruction_following.answers import answers  # isort: skip

NAME = "instruction_following"
CAPITALS = {"capital_relation": "less than", "capital_frequency": 3}
SECOND = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "It"}
SECTIONS = {"section_spliter": "SECTION", "num_sections": 2}
SENTENCES = {"relation": "at least", "num_sentences": 2}
LETTERS = {"letter": "e", "let_relation": "at least", "let_frequency": 2}
BY_HAND = [
    ("change_case:capital_word_frequency", CAPITALS, "I SAW it.", "I DON'T."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hello."}, "say HELLO. Hello.", "Sure: Say hello."),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("combination:two_responses", {}, "******One.******Two.", "One.******Two.******Three."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [[b]]", "[a] and [b\n]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. Thanks.", "Bye.\nPS: Thanks."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye. P.P.S. Thanks.", "Bye.\nP.S. Thanks."),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "maybe"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
    ("detectable_format:json_format", {}, "[1]", "[" * 100_000),
    ("detectable_format:multiple_sections", SECTIONS, "SECTION 1 a SECTION2", "Section 1 Section 2"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n\n  - b", "* a\n** b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "* * and *b*"),
    ("detectable_format:title", {}, "<<Title>>\nText", "<< >>\n<a>"),
    ("detectable_format:title", {}, "<<<a>>>", "<<a\n>>"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cats and DOGS.", "Cats alone."),
    ("keywords:existence", {"keywords": ["C++("]}, "I like c++(.", "I like C."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "Cats sit.", "The CAT sits."),
    ("keywords:frequency", {"keyword": "cat", "relation": "at least", "frequency": 2}, "Cat, concatenate", "A cat."),
    ("keywords:letter_frequency", LETTERS, "Eve", "end"),
    ("keywords:letter_frequency", LETTERS | {"letter": "#"}, "##", "#e"),
    ("length_constraints:nth_paragraph_first_word", SECOND, "A.\n\n'it's b.", "It is.\n\nNot."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "It's.", "It's a."),
    ("punctuation:no_comma", {}, "None; here.", "One, here."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It is. the END."', "The end. Bye."),
    ("startend:quotation", {}, ' "Hello." ', '"'),
]  # fmt: skip
WITH_PACKAGES = [
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN ENGLISH.", "THIS IS A SENTENCE IN english."),
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN ENGLISH.", "DAS IST EIN SATZ AUF DEUTSCH."),
    ("change_case:english_lowercase", {}, "this is a sentence in english.", "das ist ein satz auf deutsch."),
    ("language:response_language", {"language": "de"}, "Das ist ein kleiner Satz.", "This is a small sentence."),
    ("language:response_language", {"language": "de"}, "123", "Ceci est une petite phrase."),
    ("length_constraints:number_sentences", SENTENCES, "It is Dr. No. He left.", "It is Dr. No."),
]  # fmt: skip


@pytest.fixture(scope="module")
def packages():
    for name in ("langdetect", "nltk", "punkt"):
        pytest.importorskip(name)
    load_languages()


@pytest.mark.parametrize(("id", "arguments", "right", "wrong"), [*BY_HAND, *WITH_PACKAGES])
def test_an_instruction_is_followed_or_not(id, arguments, right, wrong, packages):
    assert are_followed(right, [(id, arguments)]) == [True]
    assert are_followed(wrong, [(id, arguments)]) == [False]
    assert are_followed(" \n", [(id, arguments)]) == [False]


def test_every_instruction_is_tried_here():
    assert {id for id, *_ in (*BY_HAND, *WITH_PACKAGES)} == set(CHECKS)


ALL = [(id, arguments) for id, arguments, *_ in (*BY_HAND, *WITH_PACKAGES)]


@pytest.mark.parametrize(
    "unit", ["\n", " ", "<", "<<", "[", "*", "*a", "-", "'", "p.", "a.", "\n*", "\n\n ", '"', "P.P.S "]
)
def test_no_text_takes_the_square_of_its_length(unit, packages):
    seconds = []
    for length in (4_000, 64_000):
        start = time.process_time()
        _verdicts((unit * length)[:length] + "x", ALL)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 64 * seconds[0] + 1  # 256 times for the square


# -- the environment --------------------------------------------------------------------------------------

ROW = {
    "key": 1, "prompt": "Write two words without a comma.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"relation": "less than", "num_words": 3}],
}  # fmt: skip


def play(tmp_path, text, row=ROW, **settings):
    path = tmp_path / "ifeval.jsonl"
    path.write_text(json.dumps(row) + "\n")

    async def main():
        async with envgym.spec(NAME, data={"test_path": str(path)}, **settings) as spec, spec.make() as env:
            observation, _ = await env.reset(seed=0, options={"task": await spec.tasks("test").get(0)})
            assert [(message.role, message.text) for message in observation.messages] == [("user", row["prompt"])]
            return await env.step(text)

    return asyncio.run(main())


def test_the_reward_is_for_all_instructions_or_the_share_of_them(tmp_path, packages):
    _, reward, terminated, _, info = play(tmp_path, "Here they are:\nHello there")
    assert (reward, terminated, info["score"]) == (0.0, True, 0.0)
    assert info["metrics"] == {"followed": 1, "followed_loosely": 2, "instructions": 2, "all_followed_loosely": 1}
    assert play(tmp_path, "Hello there")[1] == 1.0
    _, reward, _, _, info = play(tmp_path, "Here they are:\nHello there", reward="share")
    assert (reward, info["score"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "instruction_id_list and kwargs are lists of equal length"),
        ({"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]}, "Did you mean 'punctuation:no_comma'?"),
        ({"kwargs": [None, {"num_words": 3}]}, "length_constraints:number_words lacks its argument 'relation'"),
        (
            {"kwargs": [None, {"num_words": "3", "relation": "at least"}]},
            "arguments of the instruction length_constraints:number_words are wrong",
        ),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_graded_is_refused(change, message, tmp_path, packages):
    with pytest.raises(DataError, match=r"task ifeval-1: ") as error:
        play(tmp_path, "Hello", ROW | change)
    assert message in str(error.value)


def test_a_missing_package_is_named_before_a_task_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "punkt", None)
    pytest.importorskip("langdetect")
    with pytest.raises(MissingDependency, match=r"environment instruction_following needs the package 'punkt'"):
        play(tmp_path, "Hello")


# -- the published checker --------------------------------------------------------------------------------


def test_verdicts_are_those_of_the_published_checker(benchmark_data, packages):
    stored = json.loads((Path(__file__).parent / "verdicts.json").read_text())
    digest, differences, count = hashlib.sha256(), [], 0
    for line in (benchmark_data / "ifeval.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts = answers(row)
        digest.update(json.dumps(texts).encode())
        instructions = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        expected = stored["verdicts"][str(row["key"])].split()
        for text, verdicts in zip(texts, expected, strict=True):
            ours = "/".join(
                "".join(str(int(is_followed)) for is_followed in part) for part in _verdicts(text, instructions)
            )
            # `-`: a letter that is none, for which the checker counts a random one.
            ours = "".join("-" if theirs == "-" else our for our, theirs in zip(ours, verdicts, strict=True))
            count += 1
            if ours != verdicts:
                differences.append((row["key"], text, ours, verdicts))
    assert digest.hexdigest() == stored["answers"], "answers.py writes other answers than those that were checked"
    assert (count, differences) == (3 * 541, [])
