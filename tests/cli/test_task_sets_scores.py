"""`envgym score` on plain files of generations: whoever wrote them, in whatever fields."""

import json

import pytest

GSM8K = [
    {"question": "Tom has 3 eggs and buys 4. How many?", "answer": "3 + 4 = 7\n#### 7"},
    {"question": "Ada has 9 eggs and eats 2. How many?", "answer": "9 - 2 = 7\n#### 7"},
]
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def twice(x):\n    '''Twice x.'''\n", "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}  # fmt: skip
RIGHT, WRONG = r"So \boxed{7}.", r"So \boxed{8}."


@pytest.fixture
def score(run, tmp_path):
    """`score(rows, *words)` -> the scores of the file's episodes, in order."""

    def call(rows, *words):
        path = tmp_path / "generations.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = run("score", str(path), *words, "--overwrite")
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / "generations.jsonl.scored.jsonl").read_text().splitlines()
        return [json.loads(line)["score"] for line in lines]

    return call


def write(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "answer": "7", "completion": RIGHT},
        {"question": "q", "ground_truth": "7", "generated_text": RIGHT},
        {"problem": "q", "solution": r"\boxed{7}", "response": RIGHT},
        {"messages": [{"role": "user", "content": "q"}], "target": 7, "outputs": [{"text": RIGHT}]},
        {"prompt": "q", "label": "7", "generations": [{"message": {"role": "assistant", "content": RIGHT}}]},
    ],
)
def test_usual_names_of_fields_are_known(row, score):
    assert score([row], "--env", "math_verify") == [1.0]


def test_fields_with_other_names_are_named(score):
    row = {"frage": "q", "loesung": "7", "antwort": RIGHT, "answer": "8", "output": WRONG}
    words = ("--prompt", "frage", "--reference", "loesung", "--completion", "antwort")
    assert score([row], "--env", "math_verify", *words) == [1.0]
    assert score([row], "--env", "gsm8k", *words) == [1.0]


def test_rows_of_a_task_set_need_no_data_set(score):
    rows = [{**GSM8K[0], "output": RIGHT}, {**GSM8K[1], "output": WRONG}, {**GSM8K[0], "output": "#### 7"}]
    assert score(rows, "--env", "gsm8k") == [1.0, 0.0, 0.0]
    assert score(rows, "--env", "gsm8k", "env.read=####") == [0.0, 0.0, 1.0]
    rows.append({**GSM8K[1], "output": "9 - 2 = 7, so **$7.00**."})
    assert score(rows, "--env", "gsm8k", "env.read=last_number") == [1.0, 0.0, 1.0, 1.0]


def test_several_completions_of_a_prompt_are_one_group(score, tmp_path):
    rows = [{**GSM8K[0], "completions": [RIGHT, WRONG]}, {**GSM8K[1], "completions": [WRONG]}]
    rows.append({**GSM8K[0], "completions": [RIGHT]})
    assert score(rows, "--env", "gsm8k") == [1.0, 0.0, 0.0, 1.0]
    episodes = [json.loads(line) for line in (tmp_path / "generations.jsonl.scored.jsonl").read_text().splitlines()]
    groups = [(episode["group"], episode["member"]) for episode in episodes]
    assert groups == [(groups[0][0], 0), (groups[0][0], 1), (groups[2][0], 0), (groups[0][0], 2)]


def test_rows_with_one_prompt_and_answer_are_graded_by_their_fields(score):
    """The options of the two questions differ."""
    rows = [
        {"question": "Which is true?", "choices": ["red", "green"], "answer": "A", "completion": r"\boxed{red}"},
        {"question": "Which is true?", "choices": ["one", "two"], "answer": "A", "completion": r"\boxed{one}"},
        {"question": "Which is true?", "choices": ["one", "two"], "answer": "A", "completion": r"\boxed{red}"},
    ]
    assert score(rows, "--env", "multiple_choice") == [1.0, 1.0, 0.0]


def test_samples_of_lm_eval_hold_the_row_in_doc(score):
    rows = [
        {"doc_id": n, "doc": row, "target": row["answer"], "arguments": [["Q: …", {}]], "resps": [[text]],
         "filtered_resps": ["7"]} for n, (row, text) in enumerate(zip(GSM8K, (RIGHT, WRONG), strict=True))
    ]  # fmt: skip
    assert score(rows, "--env", "gsm8k") == [1.0, 0.0]


def test_rows_without_a_reference_are_found_by_id_or_prompt(score, tmp_path):
    write(tmp_path, "humaneval.jsonl", [HUMANEVAL])
    write(tmp_path, "gsm8k_test.jsonl", GSM8K)
    samples = [
        {"task_id": "HumanEval/0", "completion": HUMANEVAL["canonical_solution"]},
        {"task_id": "HumanEval/0", "completion": "    return x\n"},
    ]
    folder = f"data.folder={tmp_path}"
    assert score(samples, "--env", "humaneval", folder) == [1.0, 0.0]
    samples = [{"prompt": GSM8K[1]["question"], "response": RIGHT}, {"input": GSM8K[0]["question"], "response": WRONG}]
    assert score(samples[:1], "--env", "gsm8k", folder) == [1.0]
    assert score(samples[1:], "--env", "gsm8k", folder) == [0.0]


# -- references of strangers ------------------------------------------------------------------------------


@pytest.fixture
def command(run, tmp_path):
    """`command(rows, *words)` -> the scores of a file of rows, and the lines that the command prints, by their name."""

    def call(rows, *words):
        write(tmp_path, "generations.jsonl", rows)
        result = run("score", str(tmp_path / "generations.jsonl"), *words, "--overwrite")
        assert result.returncode == 0, result.stderr
        lines = dict(line.split(None, 1) for line in result.stdout.splitlines() if "  " in line)
        scored = (tmp_path / "generations.jsonl.scored.jsonl").read_text().splitlines()
        return [json.loads(line)["score"] for line in scored], lines

    return call


@pytest.mark.parametrize("beside", [True, False])
def test_references_of_a_stranger_do_not_grade_where_the_task_set_is_at_hand(beside, command, tmp_path):
    folder = tmp_path if beside else tmp_path / "data"
    folder.mkdir(exist_ok=True)
    write(folder, "gsm8k_test.jsonl", [*GSM8K, {"question": "Why?", "answer": "#### 1"}])
    rows = [
        {**GSM8K[0], "answer": "#### 8", "output": WRONG},
        {"prompt": f" {GSM8K[0]['question']} ", "target": "8", "output": WRONG},
        {"question": GSM8K[0]["question"], "answer": "7", "output": RIGHT},
        {"question": "What is 4 + 4?", "answer": "8", "output": WRONG},
    ]
    words = () if beside else (f"data.folder={folder}",)
    assert command(rows[:1], "--env", "gsm8k", *words)[0] == [0.0]
    assert command(rows[1:2], "--env", "gsm8k", *words)[0] == [0.0]
    scores, lines = command([rows[0], *rows[2:]], "--env", "gsm8k", *words)
    assert scores == [0.0, 1.0, 1.0]
    assert lines["coverage"] == "1 of 3 held-out tasks of gsm8k"
    assert lines["references"] == (
        "1 rows have another reference than gsm8k, whose own was used; 1 rows are none of its tasks, theirs was used"
    )
    scores, lines = command([{**row, "output": RIGHT} for row in GSM8K], "--env", "gsm8k", *words)
    assert (scores, lines["coverage"]) == ([1.0, 1.0], "2 of 3 held-out tasks of gsm8k")
    assert "references" not in lines


def test_tests_of_a_stranger_do_not_grade_either(command, tmp_path):
    write(tmp_path, "humaneval.jsonl", [HUMANEVAL])
    forged = {**HUMANEVAL, "test": "def check(candidate):\n    pass\n", "completion": "    return x\n"}
    scores, lines = command([forged], "--env", "humaneval")
    assert scores == [0.0]
    assert lines["references"].startswith("1 rows have another reference")


def test_saved_episodes_are_looked_up_too(command, run, tmp_path):
    command([{**GSM8K[0], "answer": "8", "output": WRONG}], "--env", "gsm8k")
    episodes = tmp_path / "generations.jsonl.scored.jsonl"
    assert json.loads(episodes.read_text())["score"] == 1
    write(tmp_path, "gsm8k_test.jsonl", GSM8K)
    result = run("score", str(episodes), "--env", "gsm8k", "--out", str(tmp_path / "again.jsonl"))
    assert result.returncode == 0, result.stderr
    assert "1 of 2 held-out tasks of gsm8k" in result.stdout
    assert json.loads((tmp_path / "again.jsonl").read_text())["score"] == 0


def test_without_the_task_set_the_references_are_said_to_be_the_file_s(command):
    scores, lines = command([{**GSM8K[0], "answer": "8", "output": WRONG}], "--env", "gsm8k")
    assert scores == [1.0]
    assert lines["references"].startswith("the file's own, not compared with gsm8k: data.folder=DIR")
    assert "references" not in command([{**GSM8K[0], "output": RIGHT}], "--env", "math_verify")[1]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"question": "q", "answer": "7"}], (), "1: no completion; the row has question, answer: name it with"),
        ([{"completion": "x"}], ("--completion", "completon"), "Did you mean 'completion'?"),
        ([{**GSM8K[0], "output": 7}], (), "field 'output': a completion is text, or a list of them, not 7"),
        ([{**GSM8K[0], "output": "7"}, GSM8K[1]], (), "generations.jsonl:2: the row has no field 'output'"),
        ([{"task_id": 1, "output": "7"}], ("data.folder=.",), "nor the id or prompt of a task of gsm8k"),
        ([{**GSM8K[0], "output": "7"}], ("--reference", "gold"), "the row has no field 'gold'"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line(rows, words, message, run, tmp_path):
    write(tmp_path, "generations.jsonl", rows)
    write(tmp_path, "gsm8k_test.jsonl", GSM8K)
    result = run("score", "generations.jsonl", "--env", "gsm8k", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


OWN = """
import envgym

class Upper(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return f"Write {self.task.id} in capitals.", {}

    async def step(self, action):
        return None, float(action.text == self.task.answer), True, False, {}

class UpperSpec(envgym.EnvSpec):
    env_class = Upper

    def tasks(self, split):
        return envgym.TaskList([envgym.Task(id=word, prompt=word, answer=word.upper()) for word in ("cat", "dog")])
"""


def test_rows_of_an_environment_without_data_are_found_by_id_or_prompt(score, run, tmp_path):
    (tmp_path / "upper.py").write_text(OWN)
    rows = [{"task_id": "cat", "completion": "CAT"}, {"task_id": "dog", "completion": "CAT"}]
    assert score(rows, "--env", "upper.py") == [1.0, 0.0]
    assert score([{"prompt": "dog", "completion": "DOG"}], "--env", "upper.py") == [1.0]
    write(tmp_path, "generations.jsonl", [{"prompt": "cow", "completion": "x"}])
    result = run("score", "generations.jsonl", "--env", "upper.py", "--overwrite")
    assert result.returncode == 2
    assert "generations.jsonl:1: the row has neither a prompt with a reference, nor the id or prompt" in result.stderr
    assert "Traceback" not in result.stderr
