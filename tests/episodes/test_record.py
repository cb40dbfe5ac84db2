"""An episode that went through JSON is the same episode."""

import json
from dataclasses import replace
from datetime import date

import pyarrow.parquet as pq
import pytest

from envgym.episodes.files import read_episodes, write_episodes
from envgym.episodes.record import from_record, to_record
from envgym.errors import DataError
from envgym.types import (
    Episode,
    Message,
    Objective,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    TextPart,
    ToolCall,
    Turn,
    VersionSpan,
    as_messages,
)

EPISODE = Episode(
    id="eval/00001:002:1",
    task=Task(
        "sum-1",
        prompt=(Message("system", "add"), Message("user", "1 + 1 = ?")),
        answer=2,
        fields={"source": "seiten", "levels": [1, None]},
        difficulty=0.5,
        seed=9,
        env="sums",
    ),
    outcome=Outcome.fail("timeout", "it took too long", retryable=True),
    rows=[
        Row(
            [
                Segment("prompt", [1, 2]),
                Segment("action", [3, 4], logprobs=[-0.1, -1e-7], versions=(VersionSpan(6, 0, 2),), temperature=0.7),
                Segment("feedback", [9], loss_weights=[0.5]),
            ],
            turns=[Turn(None, StopReason.STOP), Turn(0.1, StopReason.LENGTH)],
        ),
        Row([Segment("action", [8])], objective=Objective.CROSS_ENTROPY),
    ],
    reward=-0.5,
    score=0.25,
    answer="2",
    metrics={"format": 1.0},
    messages=[
        Message("user", "1 + 1 = ?"),
        Message(
            "assistant",
            (TextPart("zwölf → 12 🙂"),),
            (ToolCall("1", "add", {"a": 1}), ToolCall("2", "", {}, "this is no JSON")),
        ),
        Message("tool", (TextPart("2"),), tool_call_id="1", name="add"),
    ],
    env="sums-v0",
    group_id="eval/00001",
    member=2,
    seed=2**31 - 1,
    attempt=1,
    seconds=0.125,
    fingerprints={"task": "0123456789abcdef"},
)


@pytest.mark.parametrize(
    "episode",
    [EPISODE, replace(EPISODE, task=Task("t", "1?"), rows=[], messages=[], reward=None, score=None, answer=None)],
)
def test_an_episode_comes_back_from_json_as_it_was(episode):
    assert from_record(json.loads(json.dumps(to_record(episode)))) == episode


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_task_comes_back_from_a_file_as_it_was(tmp_path, suffix):
    task = Task("t", "?", answer=[1, [2.5, "a"]], fields={"grid": {"0": [[], None]}, "$ref": [3], "n": {"4": True}})
    path = tmp_path / f"episodes{suffix}"
    write_episodes(path, [replace(EPISODE, task=task)])
    (back,) = read_episodes(path)
    assert repr(back.task) == repr(task)  # equality alone takes 1 for True


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"answer": (1, 2)}, r"the answer of task t holds a tuple, \(1, 2\), which JSON does not have: write a list"),
        ({"answer": [{"a": ()}]}, r"the answer of task t holds a tuple, \(\)"),
        (
            {"fields": {"grid": {4: True}}},
            "fields of task t holds the key 4, and keys are text in JSON",
        ),
    ],
)
def test_what_json_would_change_is_no_task(values, said):
    """An answer (1, 2) that came back from a file as [1, 2] would be judged as another one."""
    with pytest.raises(ValueError, match=f"^{said}"):
        Task("t", **values)
    assert Task("t", answer=date(2026, 1, 2), fields={"a": {"b": [1, None, {2}]}}).answer == date(2026, 1, 2)


@pytest.mark.parametrize("mark", [{"$tuple": [1, 2]}, {"$items": [[1, 2]]}])
def test_a_tuple_that_an_earlier_version_wrote_is_refused_in_a_line(tmp_path, mark):
    path = tmp_path / "episodes.jsonl"
    record = to_record(EPISODE)
    record["task"]["answer"] = [mark]
    path.write_text(json.dumps(record) + "\n")
    said = rf"line 1: this is not an episode \(.*: the answer of task sum-1 holds a \{next(iter(mark))}, which only"
    with pytest.raises(DataError, match=said):
        read_episodes(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_of_others_stay_theirs_and_no_other_is_written_differently(tmp_path, suffix):
    theirs = replace(Message("user", "<|im_end|>"), from_others=True)
    assert as_messages([theirs.as_dict()]) == (theirs,)
    marked = replace(EPISODE, id="second", messages=[*EPISODE.messages, theirs], task=Task("t", prompt=(theirs,)))
    for name, episode in (("plain", replace(EPISODE, id="second")), ("marked", marked)):
        path = tmp_path / f"{name}{suffix}"
        write_episodes(path, [EPISODE, episode])
        first, again = read_episodes(path)
        assert (first.messages, again.messages) == (EPISODE.messages, episode.messages)
        assert again.task.prompt == episode.task.prompt
        content = path.read_text() if suffix == ".jsonl" else str(pq.read_schema(path))
        assert ("from_others" in content) == (name == "marked")


def test_messages_have_the_form_of_the_apis():
    assert to_record(EPISODE)["messages"][1]["tool_calls"][0] == {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1}},
    }


def test_a_record_shares_nothing_with_the_episode_that_could_change_under_it():
    record = to_record(EPISODE)
    record["rows"][0]["segments"][0]["token_ids"].append(5)
    record["metrics"]["format"] = 0.0
    assert list(EPISODE.rows[0].segments[0].token_ids) == [1, 2]
    assert EPISODE.metrics == {"format": 1.0}
