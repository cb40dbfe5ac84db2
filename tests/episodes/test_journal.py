"""Episodes as they end: what a kill leaves, what is said later, and files that are something else."""

import pytest

from envgym.episodes.files import Journal
from envgym.episodes.record import to_record
from envgym.errors import DataError
from envgym.types import Episode, Outcome, Task


def episode(member, *, group="g/00000", task="t", score=None):
    return Episode(f"{group}:{member}", Task(task), Outcome.finish(), group_id=group, member=member, score=score)


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "episodes.jsonl")
    journal.open()
    return journal


def test_episodes_come_back_in_the_order_in_which_they_ended(journal):
    for member in (1, 0, 2):
        journal.write(episode(member))
    assert [member for _, member in journal.originals()] == [1, 0, 2]
    assert to_record(journal.originals()["g/00000", 2]) == to_record(episode(2))


def test_what_is_said_later_is_told_from_what_was_played(journal):
    journal.write(episode(0))
    journal.write(episode(1))
    journal.write(episode(0, score=0.5))
    assert [each.score for each in journal.originals().values()] == [None, None]
    assert [each.score for each in journal.latest().values()] == [0.5, None]


def test_a_line_that_was_cut_is_left_out_and_written_anew(journal):
    for member in range(3):
        journal.write(episode(member))
    content = journal.path.read_bytes()
    for length in range(len(content)):  # a kill at any byte
        journal.path.write_bytes(content[:length])
        whole = content[: length + 1].count(b"\n")  # one that lacks its end alone is whole
        assert len(journal.originals()) == whole
        journal.open()
        journal.write(episode(7))
        assert [member for _, member in journal.originals()] == [*range(whole), 7]


def test_a_journal_that_is_not_there_is_empty(tmp_path):
    assert Journal(tmp_path / "none.jsonl").originals() == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id": 1}\n', "line 2: this is not an episode (KeyError"),
        (b"[1, 2]\n", "line 2: this is not an episode (TypeError"),
        (b"{oops}\n", "line 2: this is not an episode (JSONDecodeError"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_a_line_that_is_no_episode_is_named(journal, line, said):
    journal.write(episode(0))
    with journal.path.open("ab") as file:
        file.write(line)
    with pytest.raises(DataError) as raised:
        journal.originals()
    assert said in str(raised.value)


def test_of_joined_files_every_episode_is_read(journal):
    first, second = episode(0, score=0.0), episode(0, score=1.0)
    second.seconds = 0.5
    for each in (first, second, episode(0, task="other"), episode(1), episode(1, score=0.25)):
        journal.write(each)
    assert [(each.task.id, each.score) for each in journal.episodes()] == [
        ("t", 0.0), ("t", 1.0), ("other", None), ("t", 0.25)
    ]  # fmt: skip


def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "episodes.jsonl").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device; the episodes before this one are saved"):
        Journal(tmp_path / "episodes.jsonl").write(episode(0))
