"""A run folder survives a kill at any moment."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from envgym.config.resolve import resolve
from envgym.config.words import nest_keys
from envgym.disk import unused_folder, write_atomically
from envgym.errors import CheckpointDamaged, DataError, EnvgymError, RunError, WorkerDied
from envgym.run_folder import RunFolder, stage_folders, state_from_json, state_to_json
from envgym.training.checkpoints import set_aside
from envgym.training.resume import claimed_folder, resume_config


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def checkpoint(folder, step, keep=2, state=None):
    written = folder.new_checkpoint()
    (written / "actor").mkdir()
    (written / "actor" / "weights").write_text(f"of step {step}")
    state = state or {"progress": {"step": step}}
    return folder.add_checkpoint(written, step, state_to_json(state), state["progress"].get("best"), keep)


def test_metrics_are_one_json_object_a_line(folder):
    folder.append_metrics({"step": 1, "reward/mean": 0.5})
    folder.append_metrics({"step": 2, "reward/mean": 0.75})
    lines = folder.metrics_file.read_text().splitlines()
    assert [json.loads(line) for line in lines] == folder.read_metrics()
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]


def test_a_folder_without_metrics_has_none(folder):
    assert folder.read_metrics() == []
    folder.rewind(0)
    assert folder.read_metrics() == []


@pytest.mark.parametrize("torn", ['{"step": 3', '{"step": 3, "reward/mean": 1.0}'])
def test_a_last_line_cut_short_is_left_out_and_does_not_spoil_the_next(folder, torn):
    """Without its newline a line may be a part of one, even where it reads like a whole."""
    folder.append_metrics({"step": 1})
    folder.append_metrics({"step": 2})
    with folder.metrics_file.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]
    folder.rewind(2)
    folder.append_metrics({"step": 3})
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 3]


def test_rewind_forgets_later_evaluations(folder):
    folder.held_out.mkdir()
    for step in (0, 2, 4):
        folder.held_out_file(step).touch()
    folder.rewind(2)
    assert sorted(folder.held_out.iterdir()) == [folder.held_out_file(0), folder.held_out_file(2)]


def test_rewind_forgets_what_came_after(folder):
    for step in range(5):
        folder.append_metrics({"step": step})
        folder.rollout_file(step).touch()
    (folder.rollouts / "step_000004.parquet.tmp").touch()
    folder.rewind(2)
    assert [record["step"] for record in folder.read_metrics()] == [0, 1, 2]
    assert sorted(path.name for path in folder.rollouts.glob("*.parquet")) == [
        f"step_00000{n}.parquet" for n in range(3)
    ]
    folder.rewind(-1)
    assert folder.read_metrics() == []


def test_a_checkpoint_counts_only_once_it_is_whole(folder):
    assert folder.last_checkpoint() is None
    written = folder.new_checkpoint()
    (written / "weights").touch()
    assert folder.last_checkpoint() is None
    final = folder.add_checkpoint(written, 7, state_to_json({"progress": {"step": 7}}), None, keep=2)
    assert folder.last_checkpoint() == final
    assert folder.read_state(final) == {"progress": {"step": 7}}
    assert (final / "weights").exists()
    assert not written.exists()


def test_what_a_killed_checkpoint_left_is_not_in_the_next_one(folder):
    (folder.new_checkpoint() / "half").touch()
    assert list(folder.new_checkpoint().iterdir()) == []


def test_the_newest_checkpoints_are_kept(folder):
    for step in (8, 9, 10, 100):
        checkpoint(folder, step, keep=2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_000010", "step_000100"]
    assert folder.last_checkpoint().name == "step_000100"


@pytest.mark.parametrize("falling", [False, True])
def test_of_one_step_the_new_checkpoint_counts_before_the_one_it_replaces(folder, monkeypatch, falling):
    """However the disk lists them."""
    new = checkpoint(folder, 3)
    shutil.copytree(new, new.with_suffix(".replaced"))
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(glob(self, pattern), reverse=falling))
    assert folder.last_checkpoint() == new


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(number, monkeypatch, *more):
    """Ends what is within, in silence, before the change of a folder that has this number. `more`: of `os`, counted
    beside those that every folder sees."""
    operations = 0

    def counted(operation):
        def run(*args, **kwargs):
            nonlocal operations
            if operations == number:
                raise Killed
            operations += 1
            return operation(*args, **kwargs)

        return run

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        for name in ("unlink", "rmdir", "replace", "rename", *more):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


@pytest.mark.parametrize("kill_at", range(9))
def test_a_kill_during_a_checkpoint_of_the_same_step_loses_nothing(folder, monkeypatch, kill_at):
    """A stop right after a checkpoint makes the same one again. Killed before any of its changes to the folder, there
    is still a whole one to go on from."""
    checkpoint(folder, 3, keep=1)
    written = folder.new_checkpoint()
    (written / "actor").mkdir()
    (written / "actor" / "weights").write_text("of step 3")
    with killed_at(kill_at, monkeypatch):
        folder.add_checkpoint(written, 3, state_to_json({"progress": {"step": 3}}), None, keep=1)
    last = folder.last_checkpoint()
    assert last is not None
    assert folder.read_state(last) == {"progress": {"step": 3}}
    assert (last / "actor" / "weights").read_text() == "of step 3"
    checkpoint(folder, 4, keep=1)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000004"]


def best(folder):
    return (folder.best / "actor" / "weights").read_text()


def checkpoint_of(folder, step, best_step, keep=1):
    best = {"metric": "eval/score", "value": 0.5, "step": best_step}
    return checkpoint(folder, step, keep, {"progress": {"step": step, "best": best}})


def test_the_best_checkpoint_is_kept_beside_the_newest(folder):
    for step, best_step in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4)):
        checkpoint_of(folder, step, best_step, keep=2)
        assert best(folder) == f"of step {best_step}"
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "best", "step_000004", "step_000005", "step_000006",
    ]  # fmt: skip


def test_the_best_checkpoint_is_not_the_newest(folder):
    checkpoint_of(folder, 1, 1)
    newest = checkpoint_of(folder, 2, 1)
    assert folder.last_checkpoint() == newest


def test_a_best_checkpoint_that_was_deleted_is_forgotten(folder):
    checkpoint_of(folder, 1, 1)
    assert folder.mark_best({"step": 1}) == {"step": 1}
    assert folder.mark_best({"step": 9}) is None
    assert not os.path.lexists(folder.best)


@pytest.mark.parametrize("kill_at", range(12))
def test_a_kill_while_a_better_checkpoint_is_kept_leaves_one_that_is_whole(folder, monkeypatch, kill_at):
    """And what the run then goes on from knows which one it was."""
    checkpoint_of(folder, 1, 1)
    checkpoint_of(folder, 2, 1)
    with killed_at(kill_at, monkeypatch, "symlink", "mkdir"):
        checkpoint_of(folder, 3, 3)
    assert best(folder) in ("of step 1", "of step 3")
    state = folder.read_state(folder.last_checkpoint())["progress"]
    assert folder.mark_best(state["best"]) == state["best"]
    assert best(folder) == f"of step {state['best']['step']}"
    checkpoint_of(folder, 4, 4)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["best", "step_000004"]


GARBAGE = [
    b"", b"{", b'{"progress": {"step": 1}}'[:-1], b"\xff\xfe", b"[]", b"{}", b'{"progress": {}}', b'{"progress": 3}',
    b'{"progress": {"step": 1}, "x": {"$tuple": 1}, "y": {"$group": {}}}',
    b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("content", [*GARBAGE, None])
def test_a_checkpoint_that_cannot_be_read_is_said_in_one_line(folder, content):
    final = checkpoint(folder, 1)
    file = final / "controller.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"step_000001/controller.json cannot be read \(") as raised:
        folder.read_state(final)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "of step", "of step 1 and more"])
def test_a_checkpoint_without_a_file_of_a_rank_is_said_before_a_model_is_loaded(folder, content):
    final = checkpoint(folder, 1)
    assert folder.read_state(final)["progress"]["step"] == 1
    file = final / "actor" / "weights"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointDamaged, match=r"actor/weights cannot be read \(it is missing or truncated\)"):
        folder.read_state(final)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": ', b"3", b"\xff"])
def test_a_list_of_files_that_cannot_be_read_is_said(folder, content):
    final = checkpoint(folder, 1)
    (final / "files.json").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"step_000001/files.json cannot be read \("):
        folder.read_state(final)


def test_a_damaged_checkpoint_makes_way_for_the_one_before_it(folder):
    first, second = checkpoint(folder, 1), checkpoint(folder, 2)
    assert set_aside(folder, second) == first == folder.last_checkpoint()
    assert set_aside(folder, first) is None
    assert first.exists()
    checkpoint(folder, 2, keep=1)  # the run comes by again
    assert folder.last_checkpoint() == second
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_000002", "step_000002.damaged"]


def test_an_older_checkpoint_goes_only_once_the_disk_has_the_new_one(folder, monkeypatch):
    """Else a power failure could leave the name of the new one without its content, and no other."""
    checkpoint(folder, 1, keep=1)
    flushed, fsync = [], os.fsync

    def note(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert (folder.checkpoints / "step_000001").exists()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    checkpoint(folder, 2, keep=1)
    written = folder.checkpoints / "unfinished"
    names = ("actor", "actor/weights", "controller.json", "files.json")
    everything = [written, *(written / name for name in names)]
    assert sorted(flushed[:-1]) == sorted(map(str, everything))
    assert flushed[-1] == str(folder.checkpoints)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000002"]


def test_a_reader_of_a_file_written_atomically_sees_the_old_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "new"


def test_summary(folder):
    assert folder.read_summary() is None
    folder.write_summary({"status": "completed", "eval": {"before": {"ci95": [0.1, 0.2]}}})
    assert folder.read_summary()["eval"]["before"]["ci95"] == [0.1, 0.2]


def test_a_full_disk_takes_what_was_there_with_it_in_no_file(tmp_path):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("summary.json", "old")]


# -- whose it is ------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_nobody_elses(tmp_path):
    config = resolve({"env": "math_verify", "name": "first", "runs_dir": str(tmp_path)})
    with claimed_folder(config, resume=False) as folder:
        RunFolder(folder).write_summary({"status": "stopped", "steps": 0})  # of an earlier end
        for resume in (True, False):
            with (
                pytest.raises(RunError, match=r"another envgym train is writing to .*first: wait until it ends, or"),
                claimed_folder(config, resume=resume),
            ):
                pass
    with claimed_folder(config, resume=True):
        assert (folder / "config.yaml").exists()


def test_the_name_of_a_run_that_never_began_is_free_again_and_no_others(tmp_path):
    """A run whose resume failed before it began has steps all the same."""
    config = resolve({"env": "math_verify", "name": "first", "runs_dir": str(tmp_path)})
    with claimed_folder(config, resume=False) as folder:
        RunFolder(folder).write_summary({"status": "failed", "steps": 0})
    with claimed_folder(config, resume=False):
        assert {path.name for path in folder.iterdir()} == {"config.yaml", "lock"}
        RunFolder(folder).write_summary({"status": "failed", "steps": 0})
        RunFolder(folder).append_metrics({"step": 1})
    with pytest.raises(RunError, match="exists: choose another --name"), claimed_folder(config, resume=False):
        pass
    assert RunFolder(folder).read_metrics() == [{"step": 1}]


def test_the_name_of_several_stages_that_never_began_is_free_again(tmp_path):
    config = resolve({"env": "math_verify", "name": "two", "runs_dir": str(tmp_path)}, recipe="sft_grpo")
    with claimed_folder(config, resume=False) as folder:
        first, second = stage_folders(folder, config.stage_names)
        first.create()
        first.write_summary({"status": "failed", "steps": 0})
    with claimed_folder(config, resume=False):
        assert not first.path.exists()
        for stage, summary in (
            (first, {"status": "completed", "steps": 2}),
            (second, {"status": "failed", "steps": 0}),
        ):
            stage.create()
            stage.write_summary(summary)
    with pytest.raises(RunError, match="exists: choose another --name"), claimed_folder(config, resume=False):
        pass


@pytest.mark.parametrize(
    ("error", "began", "is_kept"),
    [(DataError("no file"), False, False), (DataError("gone"), True, True), (WorkerDied("see its log"), False, True)],
)
def test_a_run_that_cannot_be_set_up_leaves_no_folder(tmp_path, error, began, is_kept):
    config = resolve({"env": "math_verify", "name": "first", "runs_dir": str(tmp_path)})
    folder = RunFolder(tmp_path / "first")

    def run():
        with claimed_folder(config, resume=False):
            folder.create()
            if began:
                folder.rewind(-1)
            raise error

    with pytest.raises(type(error)):
        run()
    assert folder.path.exists() == is_kept


# -- how far a resumed run goes ---------------------------------------------------------------------------


def begun(path, steps, recipe=None, **length):
    """A run folder with its config, whose last stage has taken `steps` steps."""
    config = resolve({"env": "math_verify", **(length or {"steps": 5})}, recipe=recipe)
    path.mkdir()
    (path / "config.yaml").write_text(config.to_yaml())
    [*_, last] = stage_folders(path, config.stage_names)
    last.create()
    for step in range(1, steps + 1):
        last.append_metrics({"step": step})
    return config


def test_a_run_is_resumed_with_more_steps_and_otherwise_its_own_settings(tmp_path):
    config = begun(tmp_path / "run", 5)
    further = resume_config("run", str(tmp_path), {"steps": 8})
    assert further.stages[0].steps == 8
    further.stages[0].steps = 5
    assert further.stages == config.stages
    assert resume_config("run", str(tmp_path)).stages == config.stages


def test_a_run_may_go_on_elsewhere_and_stays_there(tmp_path):
    config = begun(tmp_path / "run", 5)
    changes = nest_keys({"workers.ranks": 2, "engine.count": 3, "roles.actor.workers.zero_stage": 3}.items())
    moved = resume_config("run", str(tmp_path), {"steps": 8, **changes, "runtime": "ray", "colocate": "all"})
    assert moved.stages[0].workers_of("actor").zero_stage == 3
    with claimed_folder(moved, resume=True):
        pass
    again = resume_config("run", str(tmp_path))
    assert again == moved
    assert (again.runtime, again.stages[0].workers.ranks, again.stages[0].engine.count) == ("ray", 2, 3)
    assert again.stages[0].learner == config.stages[0].learner


def test_of_several_stages_the_last_one_goes_further(tmp_path):
    config = begun(tmp_path / "run", 5, recipe="sft_grpo")
    first, last = resume_config("run", str(tmp_path), {"steps": 8}).stages
    assert (first, last.steps) == (config.stages[0], 8)


def test_a_run_by_epochs_goes_on_to_a_number_of_steps(tmp_path):
    begun(tmp_path / "run", 5, epochs=1)
    saved = tmp_path / "run" / "config.yaml"
    with pytest.raises(RunError, match="has taken 5 steps"):
        resume_config("run", str(tmp_path), {"steps": 5})
    for steps in (8, None):
        further = resume_config("run", str(tmp_path), steps and {"steps": steps})
        with claimed_folder(further, resume=True):
            pass
        last = yaml.safe_load(saved.read_text())["stages"][-1]
        assert (further.stages[0].steps, further.stages[0].epochs) == (last["steps"], last["epochs"]) == (8, None)


@pytest.mark.parametrize(("steps", "says"), [(3, "has taken 5 steps"), (0, "key 'steps'"), ("all", "key 'steps'")])
def test_a_run_does_not_go_back(tmp_path, steps, says):
    begun(tmp_path / "run", 5)
    with pytest.raises(EnvgymError, match=says):
        resume_config("run", str(tmp_path), {"steps": steps})


def test_folders_of_the_same_second_have_different_names(tmp_path, monkeypatch):
    monkeypatch.setattr("envgym.disk.time.strftime", lambda *form: "20260101-000000")
    folders = []
    for _ in range(3):
        folders.append(unused_folder(tmp_path, "sums", "grpo"))
        folders[-1].mkdir()
    first = f"sums-grpo-20260101-000000-{os.getpid()}"
    assert [folder.name for folder in folders] == [first, f"{first}-2", f"{first}-3"]


def test_a_state_of_an_earlier_version_has_lists_for_its_tuples():
    """It wrote the spans of phases, and a learner's state, with tuples."""
    text = '{"progress": {"step": 1, "spans": [{"$tuple": ["rollout", 1.0, {"$tuple": [2]}]}]}}'
    assert state_from_json(text) == {"progress": {"step": 1, "spans": [["rollout", 1.0, [2]]]}}


@pytest.mark.parametrize("state", [{"seen": (1, 2)}, {"counts": {3: 1}}, {"names": {"a"}}])
def test_a_learners_state_that_would_come_back_changed_is_refused(state):
    with pytest.raises(
        RunError, match=r"^a checkpoint cannot be saved: .*numbers, text, lists, and mappings with keys"
    ):
        state_to_json({"progress": {"step": 1}, "learner": state})
