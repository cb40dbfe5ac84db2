"""Episodes in files and folders, and files that cannot be written."""

from pathlib import Path

import pytest

from envgym.episodes.files import check_target, read_episodes, write_episodes
from envgym.episodes.record import to_record
from envgym.errors import ConfigError, DataError, RunError
from envgym.types import Episode, Message, Outcome, Task


def episode(member, task="t"):
    messages = [Message("user", "1 + 1 = ?"), Message("assistant", "2")]
    return Episode(f"g:{member}", Task(task), Outcome.finish(), messages=messages, group_id="g", member=member)


EPISODES = [episode(1), episode(0), episode(2)]


def ids(episodes):
    return [each.id for each in episodes]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_is_written_is_read_in_its_order(tmp_path, suffix):
    path = tmp_path / f"episodes{suffix}"
    write_episodes(path, EPISODES)
    assert [to_record(each) for each in read_episodes(path)] == [to_record(each) for each in EPISODES]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("falling", [False, True])
def test_a_folder_is_read_file_by_file(tmp_path, monkeypatch, falling):
    """By their names, however the disk lists them."""
    write_episodes(tmp_path / "step_2.parquet", [episode(0)])
    write_episodes(tmp_path / "step_1.parquet", EPISODES)
    write_episodes(tmp_path / "step_3.jsonl", [episode(3)])
    listed = sorted(tmp_path.iterdir(), reverse=falling)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(listed))
    assert ids(read_episodes(tmp_path)) == ["g:1", "g:0", "g:2", "g:0", "g:3"]


def test_a_run_and_an_evaluation_are_read_by_their_folder(tmp_path):
    run, evaluation = tmp_path / "run", tmp_path / "evaluation"
    (run / "rollouts").mkdir(parents=True)
    evaluation.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    write_episodes(run / "rollouts" / "step_000001.parquet", EPISODES)
    write_episodes(evaluation / "episodes.jsonl", EPISODES)
    assert ids(read_episodes(run)) == ids(read_episodes(evaluation)) == ids(EPISODES)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.jsonl", None, "there is no file"),
        ("empty.jsonl", "", "holds no episodes"),
        ("episodes.csv", "a,b", "end with .jsonl or .parquet"),
        ("rows.jsonl", '{"question": "1 + 1"}\n', "line 1: this is not an episode"),
        ("cut.jsonl", '{"id": "g:0", "ta', "holds no episodes"),
    ],
)
def test_what_holds_no_episodes_is_one_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as raised:
        read_episodes(tmp_path / name)
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_without_files_is_one_line(tmp_path):
    with pytest.raises(DataError, match="holds no files of episodes"):
        read_episodes(tmp_path)


def test_a_target_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "there.jsonl").write_text("")
    with pytest.raises(RunError, match="--overwrite"):
        check_target(tmp_path / "there.jsonl", overwrite=False)
    check_target(tmp_path / "there.jsonl", overwrite=True)
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        check_target(tmp_path / "episodes.txt", overwrite=False)
    with pytest.raises(DataError, match="cannot be written"):
        check_target(tmp_path / "there.jsonl" / "episodes.jsonl", overwrite=False)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_target(tmp_path / "folder.jsonl", overwrite=True)


def test_a_folder_for_the_target_is_made(tmp_path):
    check_target(tmp_path / "new" / "episodes.jsonl", overwrite=False)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, suffix):
    path = tmp_path / f"episodes{suffix}"
    write_episodes(path, EPISODES)
    before = path.read_bytes()
    path.with_name(path.name + ".tmp").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device"):
        write_episodes(path, EPISODES * 200)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
