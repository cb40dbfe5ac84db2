"""What the page is answered, who is answered, and how little is read for it."""

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.episodes.files import write_episodes
from envgym.errors import ConfigError, DataError
from envgym.types import Message, Segment, ToolCall
from envgym.view.episodes import listing
from envgym.view.server import Answers

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, make_run, viewing


def get(url, query="index", **headers):
    """Status and body of a request for the API."""
    request = urllib.request.Request(f"{url}api?q={urllib.parse.quote(query)}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_another_site_cannot_read_it(tree):
    with viewing(tree) as url:
        assert get(url)[0] == 200
        assert get(url, Origin="http://evil.example")[0] == 403
        assert get(url, Host="evil.example")[0] == 403
        assert get(url, Origin=url.rstrip("/"))[0] == 200
        with urllib.request.urlopen(url, timeout=20) as answer:
            policy = answer.headers["Content-Security-Policy"]
            text = answer.read().decode()
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "<script>" not in text  # nothing inline


@pytest.mark.parametrize(("query", "status"), [
    ("list|../../etc|0|0|9", 404), ("episode|/etc/passwd|0|0", 404), ("run|runs/first/../..", 404),
    ("run|runs/none", 404), ("list|runs/first|99|0|9", 404), ("episode|runs/first|1|99", 404),
    ("list|runs/first|x|0|9", 400), ("nothing", 400), ("", 400), ("episode|runs/first|1|-1", 400),
    ("list|runs/first|-1|0|9", 400), ("list|runs/first|1|-5|9", 400), ("list|runs/first|1|0|-9", 400),
    ("metrics|runs/first|-1", 400), ("lanes|runs/first|-1", 400), (f"list|runs/first|{'9' * 5000}|0|9", 400),
    ("lanes|runs/first|\u0661", 400), ("compare|runs/first", 400), ("index|1", 400),
    ("beginnings|runs/first|1|", 400), ("beginnings|runs/first|1|0,-1", 400), ("beginnings|runs/first|99|0", 404),
])  # fmt: skip
def test_what_is_not_in_the_folders_is_not_there(tree, query, status):
    with viewing(tree) as url:
        answered, answer = get(url, query)
        assert (answered, list(answer)) == (status, ["error"])
        assert "Traceback" not in answer["error"]
        for path in ("page/../server.py", "page/%2e%2e/server.py", "page//etc/passwd"):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(url + path, timeout=20)


def test_others_are_let_in_by_a_token_alone(tree, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret-0123456789\n")
    token.chmod(0o600)
    with viewing(tree, "--token-file", str(token)) as url:
        assert get(url)[0] == 403
        assert get(url, Cookie="envgym-view=wrong")[0] == 403
        assert get(url, Cookie="envgym-view=s3cret-0123456789")[0] == 200


def test_metrics_are_followed_from_where_one_was(tree):
    answers = Answers([tree / "runs" / "first"])
    [name] = answers.sources
    told = answers(f"metrics|{name}|0")
    assert [record["step"] for record in told["records"]] == [1, 2, 3]
    file = tree / "runs" / "first" / "metrics.jsonl"
    with file.open("a") as metrics:
        metrics.write('{"step": 4}\n{"step": 5, "lo')  # in the middle of a line
    more = answers(f"metrics|{name}|{told['offset']}")
    assert [record["step"] for record in more["records"]] == [4]
    with file.open("a") as metrics:
        metrics.write('ss": 1}\n')
    assert [record["step"] for record in answers(f"metrics|{name}|{more['offset']}")["records"]] == [5]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("text", "indices"),
    [(r"2 \times 3", [0]), (r"\FRAC{12}", [0]), ('say "hi"', [0]), ("<|im_end|>", [1]), ("a|b", [1]), ("none", [])],
)
def test_a_search_is_for_the_text_as_it_is(tmp_path, suffix, text, indices):
    texts = (r'It is 2 \times 3 = \frac{12}{2}? say "hi"', "a|b <|im_end|>")
    write_episodes(tmp_path / f"some{suffix}", [made(n, 0, text) for n, text in enumerate(texts)])
    answers = Answers([tmp_path / f"some{suffix}"])
    [name] = answers.sources
    assert answers(f"search|{name}|0|{text}") == indices


def test_an_episode_that_was_written_again_is_in_the_list_as_it_is_now(tmp_path):
    """After the judging of its group, or the withdrawal of its score."""
    episodes = [made(n, 0, reward=1.0) for n in range(3)]
    withdrawn = made(1, 0, reward=1.0)
    withdrawn.score = None
    write_episodes(tmp_path / "some.jsonl", [*episodes, withdrawn])
    answers = Answers([tmp_path / "some.jsonl"])
    [name] = answers.sources
    assert listing(answers.sources[name], 0).column("score") == [1.0, None, 1.0]
    assert listing(answers.sources[name], 0).record(1)["score"] is None


def bytes_read():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_one_episode_is_read_with_a_few_others_and_not_with_all(tmp_path):
    folder = make_run(tmp_path / "run", steps=1, groups=1000)
    answers = Answers([folder.path])
    [name] = answers.sources
    answers(f"list|{name}|1|0|10")
    size = folder.rollout_file(1).stat().st_size + folder.learned_file(1).stat().st_size
    before = bytes_read()
    told = answers(f"episode|{name}|1|2500")
    assert told["id"].endswith("/00625:000:0")
    assert bytes_read() - before < size / 2
    assert listing(answers.sources[name], 1) is listing(answers.sources[name], 1)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_beginnings_are_of_the_prompt_and_the_last_answer_in_one_line(tmp_path, suffix):
    turns = [("system", "Be brief."), ("user", "one\n\n two"), ("assistant", "early"), ("tool", "4"),
             ("assistant", "late\tanswer")]  # fmt: skip
    call = ToolCall("1", "add", {"a": 1})
    others = [made(1, 0, "y" * 5000), made(2, 0, messages=[Message("user", "no answer")]),
              made(3, 0, messages=[Message("user", "3?"), Message("assistant", "", tool_calls=(call,))])]  # fmt: skip
    others[0].answer = "1"
    episodes = [made(0, 0, messages=[Message(role, text) for role, text in turns]), *others]
    write_episodes(tmp_path / f"some{suffix}", episodes)
    answers = Answers([tmp_path / f"some{suffix}"])
    [name] = answers.sources
    listed = answers(f"beginnings|{name}|0|3,1,0,2,0")
    first = ["one two", "late answer", "0", "", ""]  # with what was wanted, and what was read as the answer
    assert listed == [
        ["3?", "", "3", "", ""],
        ["question 1?", "y" * 200, "1", "1", "not in the completion"],
        first,
        ["no answer", "", "2", "", ""],
        first,
    ]
    with pytest.raises(DataError):
        answers(f"beginnings|{name}|0|0,9")
    assert [answers(f"episode|{name}|0|{n}")["beginning"] for n in (0, 2)] == [first, ["no answer", "", "2", "", ""]]


def test_beginnings_are_read_without_tokens_and_most_others(tmp_path):
    episodes = [made(n, 0, f"answer {n}") for n in range(600)]
    for n, episode in enumerate(episodes):
        ids = [n * number * number % 50_021 for number in range(1000)]
        episode.rows[0].segments[1] = Segment("action", ids, logprobs=[-number / 7919 for number in ids])
    write_episodes(path := tmp_path / "some.parquet", episodes)
    answers = Answers([path])
    [name] = answers.sources
    answers(f"list|{name}|0|0|10")
    before = bytes_read()
    listed = answers(f"beginnings|{name}|0|300,301")
    assert bytes_read() - before < path.stat().st_size / 10  # an episode with its tokens takes a third
    assert listed == [[f"question {n}?", f"answer {n}", str(n), "", ""] for n in (300, 301)]


def test_tokens_come_with_what_was_learned_of_them(tree):
    told = Answers([tree / "runs" / "first"])(f"episode|{tree / 'runs' / 'first'}|1|0")
    [row] = told["rows"]
    assert row["ids"] == [40, 41, 50, 51, 52]
    assert row["advantages"][:2] == [None, None]
    assert row["advantages"][2:] == [0.5, 0.5, -0.25]
    assert row["entropies"] == [None, None, 0.25, 0.5, 2.0]
    assert row["trained"][2:] == pytest.approx([-0.11, -0.51, -2.01])
    assert row["versions"] == [None, None, 0, 0, 0]
    assert all(isinstance(text, str) for text in row["texts"])


@pytest.mark.parametrize("cut", ["metrics.jsonl", "events/step_000003.jsonl"])
def test_a_run_that_was_killed_in_the_middle_of_a_line_opens(tree, cut):
    path = tree / "runs" / "first"
    whole = (path / cut).read_text()
    (path / cut).write_text(whole[:-7])
    (path / "rollouts" / "step_000004.parquet.tmp").write_bytes(b"PAR1 half")
    answers = Answers([path])
    [name] = answers.sources
    assert answers(f"run|{name}")["state"] == "unfinished"
    assert len(answers(f"metrics|{name}|0")["records"]) in (2, 3)
    assert len(answers(f"lanes|{name}|3")["episodes"]) == 16
    assert answers(f"run|{name}")["steps"] == [1, 2, 3]


def test_what_is_no_run_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    assert Answers([tmp_path / "empty"]).sources == {}
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="byte 0: this is not an episode"):
        Answers([tmp_path / "no.jsonl"])(f"list|{tmp_path / 'no.jsonl'}|0|0|9")
    (tmp_path / "no.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a file of episodes"):
        Answers([tmp_path / "no.parquet"])(f"list|{tmp_path / 'no.parquet'}|0|0|9")
    with pytest.raises(ConfigError, match="there is nothing at"):
        Answers([tmp_path / "none"])


def test_a_file_of_episodes_alone_opens_while_it_is_written(tmp_path):
    path = tmp_path / "some.jsonl"
    write_episodes(path, [made(0, 0), made(1, 0, reward=1.0)])
    with path.open("a") as file:
        file.write('{"id": "half')
    told = Answers([path])(f"list|{path}|0|0|99")
    assert told["total"] == 2
    assert told["columns"]["tokens"] == [3, 3]
    assert told["columns"]["surprise"] == pytest.approx([2.6 / 3] * 2)
    assert Answers([path])(f"episode|{path}|0|1")["messages"][1]["content"] == "the answer"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_surprise_is_over_the_tokens_that_have_a_log_probability(tmp_path, suffix):
    path = tmp_path / f"some.{suffix}"
    half, none = made(0, 0), made(1, 0)
    half.rows[0].segments += [Segment("feedback", [7]), Segment("action", [60, 61, 62, 63])]  # an API gave these
    half.rows[0].turns *= 2
    none.rows[0].segments[1].logprobs = None
    write_episodes(path, [half, none])
    told = Answers([path])(f"list|{path}|0|0|9")["columns"]
    assert told["surprise"] == [pytest.approx((0.1 + 0.5 + 2.0) / 3), None]
    assert told["tokens"] == [7, 3]
    assert told["turns"] == [2, 1]


def test_numbers_that_json_has_not_are_nothing(tree):
    from envgym.view.server import to_json

    assert to_json({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'


def test_a_run_of_several_stages_is_its_stages(tmp_path):
    make_run(tmp_path / "rlhf" / "1-sft", steps=1)
    make_run(tmp_path / "rlhf" / "2-ppo", steps=2)
    (tmp_path / "rlhf" / "config.yaml").write_text("seed: 1\nstages: []\n")
    assert [Path(name).name for name in Answers([tmp_path / "rlhf"]).sources] == ["1-sft", "2-ppo"]


def test_training_writes_what_the_page_shows(tmp_path, monkeypatch, tiny_model, capsys):
    """A real run: times of every episode and phase, and what was learned of every token that was sampled."""
    import envgym

    monkeypatch.chdir(tmp_path)
    settings = {
        "env": "math_verify", "model": str(tiny_model), "name": "first", "steps": 2, "rollout.tasks_per_step": 4,
        "eval.every": 2, "eval.tasks": 3, "rollout.group_size": 4, "learner.update_epochs": 2, "rollout.max_tokens": 8,
        "engine.kind": "transformers", "debug": True,
    }  # fmt: skip
    result = envgym.train(settings, quiet=True)
    answers = Answers([tmp_path / "runs" / "first"])
    name, held_out = answers.sources
    lanes = answers(f"lanes|{name}|2")
    assert len(lanes["episodes"]) == 16
    assert {kind for kind, _, _ in lanes["phases"]} >= {"rollout", "learn", "sync"}
    for one in lanes["episodes"]:
        assert {kind for kind, _, _ in one["spans"]} == {"waiting", "environment", "generating"}
        assert all(start <= end for _, start, end in one["spans"])
    [row] = answers(f"episode|{name}|2|0")["rows"]
    sampled = [n for n, logprob in enumerate(row["logprobs"]) if logprob is not None]
    for n in sampled:
        assert row["trained"][n] == pytest.approx(row["logprobs"][n], abs=1e-3)  # the first pass: the same policy
        assert row["ratios"][n] > 0
        assert 0 < row["entropies"][n] < 10  # nats
    assert row["advantages"][sampled[0]] is not None
    kept = (tmp_path / "runs" / "first" / "tokenizer.json").read_text()
    assert kept == (tiny_model / "tokenizer.json").read_text()
    assert all(isinstance(text, str) for text in row["texts"])

    # the episodes of the evaluations, on the page, in the terminal and as a data frame
    assert answers(f"run|{name}")["evaluated"] == answers(f"run|{held_out}")["steps"] == [0, 2]
    evaluated = answers(f"list|{held_out}|2|0|99")["columns"]
    assert [group.startswith("eval-greedy") for group in evaluated["group"]] == [False] * 3 + [True] * 3
    [row] = answers(f"episode|{held_out}|2|0")["rows"]
    assert all(isinstance(text, str) for text in row["texts"])
    assert main(["show", "first", "--eval", "--step", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- task test-") == 4
    assert "4 of 6 episodes of the evaluation at step 0" in shown
    assert list(result.metrics["step"]) == [0, 1, 2]
    assert result.metrics["eval/score"].notna().tolist() == [True, False, True]
    assert result.episodes().groupby("step").size().to_dict() == {1: 16, 2: 16}
    frame = result.episodes(2, held_out=True)
    assert frame["task"].tolist() == evaluated["key"]
    assert all(frame["prompt"].str.len() > 5)
    assert frame["score"].tolist() == evaluated["score"]

    ask = ["ask", "2 + 2?", "--model", "runs/first", "engine.kind=transformers", "rollout.temperature=0", "debug=true"]
    assert main(ask) == 0
    answer = capsys.readouterr().out
    assert main(ask) == 0
    assert capsys.readouterr().out == answer
    assert 0 < len(answer.encode()) < 200  # of 8 tokens, by the run's settings


def test_a_file_of_another_kind_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hi")
    assert main(["view", "--port", "0", "notes.txt"]) == 2
    assert (
        capsys.readouterr().err
        == "envgym: error: notes.txt is not a file of episodes: these end in .jsonl or .parquet\n"
    )
