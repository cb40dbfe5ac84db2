"""What a run folder keeps of its episodes, read back with pyarrow as a user would, and as episodes."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envgym.episodes.record import learned_values, read_rollouts, to_record, write_learned, write_rollouts
from envgym.errors import DataError
from envgym.types import (
    Episode,
    Group,
    ImageSpan,
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
)


@pytest.fixture
def episode():
    """Two turns in one row, a second row, text outside ASCII, and weights that are not the default."""
    segments = [
        Segment("prompt", [1, 2]),
        Segment(
            "action", [3, 4, 0], logprobs=[-0.25, -1.5, -0.0], versions=(VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))
        ),
        Segment("feedback", [9]),
        Segment("action", [5, 0], loss_weights=[0.5, 0.0], logprobs=[-2.0, -3.0], versions=(VersionSpan(7, 0, 2),)),
    ]
    turns = [Turn(None, StopReason.STOP), Turn(0.75, StopReason.LENGTH)]
    return Episode(
        id="step-000001-0/00000:001:2",
        task=Task("sum-1", prompt="1 + 1 = ?", answer=2),
        outcome=Outcome.truncate("length"),
        rows=[Row(segments, turns=turns), Row([Segment("action", [8])], objective=Objective.CROSS_ENTROPY)],
        reward=0.75,
        score=0.5,
        answer="2",
        metrics={"format": 1.0},
        messages=[
            Message("user", "1 + 1 = ?"),
            Message("assistant", (TextPart("zwölf → 12 🙂"),), (ToolCall("1", "add", {"a": 1}),)),
            Message("tool", (TextPart("2"),), (), "1", "add"),
        ],
        env="sums-v0",
        group_id="step-000001-0/00000",
        member=1,
        seed=2**31 - 1,
        attempt=2,
        seconds=0.125,
        fingerprints={"task": "0123456789abcdef"},
    )


def read(path, episodes):
    write_rollouts(path, episodes)
    return pq.read_table(path).to_pylist()


def test_an_episode_comes_back_with_every_token_mask_and_number(tmp_path, episode):
    [record] = read(tmp_path / "step.parquet", [episode])
    first, second = record.pop("rows")
    listed = [record.pop(name) for name in ("key", "tokens", "turns", "surprise")]
    assert listed == ["sum-1", 6, 2, pytest.approx(1.35)]
    assert json.loads(record.pop("task"))["prompt"] == "1 + 1 = ?"
    said = {"tool_calls": None, "tool_call_id": None, "name": None}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "error": None}
    assert record == {
        "id": "step-000001-0/00000:001:2",
        "env": "sums-v0",
        "group": "step-000001-0/00000",
        "member": 1,
        "seed": 2**31 - 1,
        "attempt": 2,
        "outcome": {"status": "truncated", "reason": "length", "retryable": False, "message": ""},
        "answer": "2",
        "reward": 0.75,
        "score": 0.5,
        "score_is_reward": False,
        "metrics": [("format", 1.0)],
        "seconds": 0.125,
        "fingerprints": [("task", "0123456789abcdef")],
        "messages": [
            {**said, "role": "user", "content": "1 + 1 = ?"},
            {**said, "role": "assistant", "content": "zwölf → 12 🙂", "tool_calls": [call]},
            {**said, "role": "tool", "content": "2", "tool_call_id": "1", "name": "add"},
        ],
    }
    assert first["objective"] == "policy_gradient"
    assert first["turns"] == [{"reward": None, "stop_reason": "stop"}, {"reward": 0.75, "stop_reason": "length"}]
    assert [segment["role"] for segment in first["segments"]] == ["prompt", "action", "feedback", "action"]
    assert [segment["token_ids"] for segment in first["segments"]] == [[1, 2], [3, 4, 0], [9], [5, 0]]
    assert [segment["weights"] for segment in first["segments"]] == [[0, 0], [1, 1, 1], [0], [0.5, 0]]
    assert [segment["logprobs"] for segment in first["segments"]] == [None, [-0.25, -1.5, 0], None, [-2, -3]]
    assert first["segments"][1]["versions"] == [
        {"version": 6, "start": 0, "end": 1},
        {"version": 7, "start": 1, "end": 3},
    ]
    assert (second["objective"], second["turns"]) == ("cross_entropy", [])


def test_a_failed_episode_is_kept_with_its_reason_and_without_a_reward(tmp_path):
    failed = Episode("e", Task("t"), Outcome.fail("environment", "KeyError: 'x'", retryable=True))
    [record] = read(tmp_path / "step.parquet", [failed])
    assert record["outcome"] == {
        "status": "failed", "reason": "environment", "retryable": True, "message": "KeyError: 'x'"
    }  # fmt: skip
    assert (record["reward"], record["score"], record["answer"], record["rows"]) == (None, None, None, [])


@pytest.mark.parametrize("answer", [[1, 2], {"x": 1}, 2.5, "text", math.inf])
def test_any_answer_of_a_task_is_written_as_text(tmp_path, answer):
    [record] = read(tmp_path / "step.parquet", [Episode("e", Task("t", answer=answer), Outcome.finish())])
    assert json.loads(record["task"])["answer"] == answer


def test_no_episodes_are_a_file_with_all_columns(tmp_path, episode):
    assert read(tmp_path / "empty.parquet", []) == []
    read(tmp_path / "one.parquet", [episode])
    assert pq.read_schema(tmp_path / "empty.parquet") == pq.read_schema(tmp_path / "one.parquet")


def test_the_file_appears_in_one_piece_and_compressed(tmp_path, episode):
    path = tmp_path / "step.parquet"
    write_rollouts(path, [episode] * 500)
    assert [file.name for file in tmp_path.iterdir()] == ["step.parquet"]
    assert path.stat().st_size < 500 * 64  # with the contents of its two row groups


def test_float32_log_probabilities_keep_every_bit(tmp_path):
    logprobs = [-1.1920928955078125e-07, -0.6931471824645996, -103.27892303466797]  # as a float32 engine gives them
    rows = [Row([Segment("action", [1, 2, 3], logprobs=logprobs)])]
    [record] = read(tmp_path / "step.parquet", [Episode("e", Task("t"), Outcome.finish(), rows=rows)])
    assert record["rows"][0]["segments"][0]["logprobs"] == logprobs


def test_episodes_are_read_back_as_they_were(tmp_path, episode):
    prompt = (Message("system", "Add."), Message("user", "1 + 1 = ?"))
    fields = {"level": {"name": "easy", "steps": [1, None]}}
    task = Task("sum-1", prompt, answer={"value": [2]}, fields=fields, difficulty=0.5, seed=2**31 + 7, env="sums")
    unread = ToolCall("2", "", {}, error="this is no JSON")
    other = Episode(
        id="other",
        task=task,
        outcome=Outcome.fail("timeout", "it took 3 s", retryable=True),
        rows=[Row([Segment("action", [7], loss_weights=[0.1], logprobs=[-0.5], temperature=0.7)], turns=[])],
        messages=[Message("assistant", (TextPart(""),), (unread,))],
    )
    write_rollouts(tmp_path / "episodes.parquet", [episode, other])
    read = read_rollouts(tmp_path / "episodes.parquet")
    assert [to_record(each) for each in read] == [to_record(episode), to_record(other)]
    assert read[1].task == task


def one_line(path):
    with pytest.raises(DataError) as raised:
        read_rollouts(path)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_a_file_that_holds_no_episodes_is_a_line(tmp_path, episode):
    path = tmp_path / "episodes.parquet"
    write_rollouts(path, [episode])
    pq.write_table(pq.read_table(path).drop_columns(["outcome"]), path)
    assert "holds no episodes: it has no column 'outcome'" in one_line(path)
    pq.write_table(pa.table({"question": ["1 + 1"], "answer": ["2"]}), path)
    assert "holds no episodes" in one_line(path)
    path.write_bytes(b"PAR1 and nothing more")
    assert "cannot be read" in one_line(path)


def test_a_row_that_is_no_episode_is_named(tmp_path, episode):
    path = tmp_path / "episodes.parquet"
    write_rollouts(path, [episode, episode])
    table = pq.read_table(path)
    bad = table.column("outcome").to_pylist()
    bad[1]["status"] = "exploded"
    changed = pa.array(bad, table.schema.field("outcome").type)
    pq.write_table(table.set_column(table.column_names.index("outcome"), "outcome", changed), path)
    assert "row 2: this is not an episode" in one_line(path)


def test_only_rows_with_an_advantage_that_were_learned_from_have_a_line(tmp_path):
    def row(**arrays):
        return Row([Segment("prompt", [1]), Segment("action", [2], logprobs=[-1.0])], arrays=arrays)

    learned, left, text = row(advantages=np.array([0.0, 2.0])), row(advantages=np.zeros(2)), row()
    for each in (learned, text):
        each.first_outputs, each.last_outputs = np.array([0.0, -1.5]), np.array([0.0, -0.5])
    learned.entropies = np.array([0.0, 0.75])
    group = Group("g", Task("t"), [Episode("a", Task("t"), Outcome.finish(), [learned, left, text])])
    write_learned(tmp_path / "step.parquet", learned_values([group]))
    [line] = pq.read_table(tmp_path / "step.parquet").to_pylist()
    assert (line["episode"], line["row"], line["advantages"], line["logprobs"]) == ("a", 0, [0.0, 2.0], [0.0, -1.5])
    assert line["ratios"] == pytest.approx([1.0, math.exp(0.5)])
    assert line["entropies"] == [0.0, 0.75]


def test_episodes_without_rows_segments_without_tokens_and_rows_with_everything(tmp_path):
    image = ImageSpan("a" * 64, 0, 2)
    sampled = Segment("action", [5], [0.3], [-1.5], (VersionSpan(1, 0, 1),), 0.5)
    rows = [
        Row(
            [Segment("prompt", [1, 2, 3], images=(image,)), Segment("action", [])], turns=[Turn(None, StopReason.STOP)]
        ),
        Row([sampled], Objective.CROSS_ENTROPY, turns=[Turn(1.0, StopReason.STOP)]),
    ]
    failed = Episode("a", Task("t"), Outcome.finish())
    for episodes in ([], [failed], [failed, Episode("b", Task("t"), Outcome.finish(), rows=rows), failed]):
        write_rollouts(tmp_path / "rollouts.parquet", episodes)
        assert read_rollouts(tmp_path / "rollouts.parquet") == episodes
