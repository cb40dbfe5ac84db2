"""An API as the policy, by the commands: what its test asks for, and what the terminal says of failures."""

from __future__ import annotations

import json

import pytest

from envgym.cli import main
from tests.chat_api import api

QUOTA = "You exceeded your current quota, please check your plan and billing details."
WORDY = """
import envgym


@envgym.reward
def wordy(completion):
    return float(len(completion) > 3)


@envgym.reward
def by_tokens(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def evaluate(tmp_path, capsys):
    """Exit status and output of an evaluation on five tasks."""

    def evaluate(url, *words, env="tool_use"):
        engine = ["engine.kind=openai", f"engine.base_url={url}", "engine.tries=1", "rollout.retries=0"]
        engine.append(f"evals_dir={tmp_path / 'evals'}")
        status = main(["eval", "--env", env, "--model", "m", "eval.tasks=5", *engine, *words])
        return status, "".join(capsys.readouterr())

    return evaluate


@pytest.fixture
def rewards(tmp_path):
    """File of reward functions, and of rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(5)))
    (file := tmp_path / "wordy.py").write_text(WORDY)
    return f"data.path={rows}", str(file)


def test_a_server_that_takes_no_tools_fails_the_test_and_not_the_episodes(evaluate):
    told = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

    def answer(body):
        return (400, {"error": {"message": told}}) if "tools" in body else (200, {"content": "OK"})

    with api(answer) as (url, bodies):
        status, said = evaluate(url)
    assert status == 2
    assert told in said
    assert "the test without the environment's tools passed" in said
    assert ["tools" in body for body in bodies] == [False, True]


def test_the_test_offers_the_environments_tools_and_is_short(evaluate):
    with api(lambda body: (200, {"content": "no idea"})) as (url, bodies):
        status, said = evaluate(url, "rollout.temperature=0.5")
    assert status == 0
    assert "failed; the most common" not in said
    _, tested, *played = bodies
    assert tested["tools"] == played[0]["tools"]
    assert [message["content"] for message in tested["messages"]] == ["Reply with the word OK."]
    assert (tested["temperature"], tested["max_tokens"]) == (played[0]["temperature"], played[0]["max_tokens"])
    with api(lambda body: (200, {"content": "1"})) as (url, bodies):
        evaluate(url, env="math_verify")
    assert not any("tools" in body for body in bodies)
    assert sum("Reply with the word OK." in str(body) for body in bodies) == 1


def test_a_quota_that_is_used_up_is_not_waited_for(evaluate):
    error = {"error": {"message": QUOTA, "type": "insufficient_quota", "code": None}}
    with api(lambda body: (429, error)) as (url, bodies):
        status, said = evaluate(url, "engine.tries=5")
    assert (status, len(bodies)) == (2, 1)
    assert QUOTA in said


def test_the_commonest_cause_of_failures_is_said(evaluate):
    def answer(body):
        question = body["messages"][-1]["content"]
        if question == "Reply with the word OK.":
            return 200, {"content": "OK"}
        return 422, {"error": {"message": "the seventh layer is on strike"}}

    with api(answer) as (url, _):
        status, said = evaluate(url)
    assert status == 2  # no episode was scored
    assert "5 of 5 episodes failed; the most common failure is engine: " in said
    assert "the seventh layer is on strike" in said


def test_answers_of_null_are_counted_and_said(evaluate):
    with api(lambda body: (200, {"content": None})) as (url, _):
        status, said = evaluate(url, env="math_verify")
    assert status == 0
    assert "5 answers of the API were empty" in said
    with api(lambda body: (200, {"content": "1"})) as (url, _):
        assert "empty" not in evaluate(url, env="math_verify")[1]


def test_a_reward_of_tokens_is_refused_where_there_is_only_text(evaluate, rewards):
    data, file = rewards
    with api(lambda body: (200, {"content": "a few words"})) as (url, _):
        status, said = evaluate(url, data, env=f"{file}:by_tokens")
        assert status == 2
        assert "reward function by_tokens takes 'completion_ids', and there is only text" in said
        assert evaluate(url, data, env=f"{file}:wordy")[0] == 0


def test_a_score_that_judges_nothing_exits_with_1(tmp_path, capsys, rewards):
    _, file = rewards
    generations = tmp_path / "generations.jsonl"
    generations.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": "four"}) + "\n" for n in range(3)))
    assert main(["score", str(generations), "--env", f"{file}:by_tokens", "--out", str(tmp_path / "a.jsonl")]) == 1
    said = "".join(capsys.readouterr())
    assert "0 of 3" in said
    assert "completion_ids" in said
    assert main(["score", str(generations), "--env", f"{file}:wordy", "--out", str(tmp_path / "b.jsonl")]) == 0


def test_the_first_prompt_is_said_as_the_api_gets_it(evaluate, rewards):
    data, file = rewards
    with api(lambda body: (200, {"content": "a long answer"})) as (url, bodies):
        _, said = evaluate(url, data, "data.system=Be brief.", env=f"{file}:wordy")
        assert bodies[-1]["messages"][0]["content"] == "Be brief."
        assert said.count("first prompt, as the API gets it:\n  system: Be brief.\n  user: ") == 1
        assert "template: the API's own; tools: none" in said
        assert "columns: prompt prompt; answer answer" in said
        assert "longest prompt" not in said
        assert "template: the API's own; tools: " in evaluate(url)[1]
        assert "tools: none" not in evaluate(url)[1]
