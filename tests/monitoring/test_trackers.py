"""What trackers are told, and that a run does not mind what becomes of them."""

import threading

import pytest

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, MissingDependency
from envgym.monitoring import trackers
from envgym.monitoring.trackers import TRACKERS, RunInfo, Tracker, Trackers, check_installed, numbers_of, run_id
from envgym.run_folder import RunFolder
from envgym.training.stage import run_info


@pytest.fixture
def info(tmp_path):
    return RunInfo("0123abc", "first", "first", "envgym", tmp_path, {"seed": 0})


class Remembering(Tracker):
    """What it was told, in the order of its thread."""

    def __init__(self):
        self.told = []

    def open(self, run):
        self.told.append(("open", run.id, threading.current_thread().name))
        return "a page"

    def log(self, step, numbers):
        self.told.append((step, numbers))

    def close(self, status):
        self.told.append(("close", status))


@pytest.fixture
def tracking(monkeypatch, info):
    """Run trackers of these kinds in place of the real ones; gives them and what was noted."""

    def track(*kinds):
        notes = []
        classes = {f"t{number}": kind for number, kind in enumerate(kinds)}
        for name, kind in classes.items():
            monkeypatch.setitem(TRACKERS, name, kind)
        return Trackers(list(classes), info, notes.append), notes

    return track


def test_each_is_told_everything_in_order_on_a_thread_of_its_own(tracking):
    one, two = Remembering(), Remembering()
    all_of_them, notes = tracking(lambda: one, lambda: two)
    for step in range(1, 4):
        all_of_them.log({"step": step, "reward/mean": 0.5})
    all_of_them.close("completed")
    numbers = {"reward/mean": 0.5, "alarms": 0.0}
    for number, tracker in enumerate((one, two)):
        assert tracker.told == [
            ("open", "0123abc", f"tracker-t{number}"),
            *((step, numbers) for step in range(1, 4)),
            ("close", "completed"),
        ]
    assert sorted(notes) == ["t0: a page", "t1: a page"]
    assert all_of_them.summary() == {"t0": {"failures": 0}, "t1": {"failures": 0}}


def test_what_can_be_drawn_of_a_record():
    record = {
        "step": 3, "reward/mean": 0.5, "episodes": 4, "eval/score": None, "loss": float("nan"), "lr": float("inf"),
        "eval/ci95": [0.25, 0.75], "eval/a/ci95": None, "alarms": ["truncation", "kl"],
    }  # fmt: skip
    assert numbers_of(record) == {
        "reward/mean": 0.5, "episodes": 4.0, "eval/ci95/low": 0.25, "eval/ci95/high": 0.75, "alarms": 2.0,
    }  # fmt: skip


class Broken(Remembering):
    def log(self, step, numbers):
        super().log(step, numbers)
        if step > 1:
            raise ConnectionError("the server\nis gone")


def test_failures_are_counted_and_said_once_and_the_others_hear_everything(tracking):
    broken, fine = Broken(), Remembering()
    both, notes = tracking(lambda: broken, lambda: fine)
    for step in range(1, 5):
        both.log({"step": step})
    both.close("failed")
    assert both.summary() == {"t0": {"failures": 3}, "t1": {"failures": 0}}
    assert [note for note in notes if "page" not in note] == [
        "t0 fails: ConnectionError: the server (the run continues; its metrics are in metrics.jsonl)"
    ]
    assert broken.told[-1] == fine.told[-1] == ("close", "failed")


class Shut(Remembering):
    def open(self, run):
        raise PermissionError("no key")


def test_one_that_cannot_start_hears_nothing_more(tracking):
    shut = Shut()
    one, notes = tracking(lambda: shut)
    one.log({"step": 1})
    one.close("completed")
    assert shut.told == []
    assert one.summary() == {"t0": {"failures": 1}}
    assert notes == [
        "t0 could not be started, and records nothing of this run: PermissionError: no key "
        "(the run continues; its metrics are in metrics.jsonl)"
    ]


class Hanging(Remembering):
    released = threading.Event()

    def open(self, run):
        self.released.wait(1000)
        return ""


def test_one_that_hangs_holds_nobody_up(tracking, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    one, notes = tracking(Hanging)
    one.log({"step": 1})
    one.close("completed")
    assert one.summary() == {"t0": {"failures": 1}}
    assert "has not ended within 0.2 s" in notes[0]
    Hanging.released.set()


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        ("none", []),
        ([], []),
        ("wandb", ["wandb"]),
        (["tensorboard", "swanlab"], ["tensorboard", "swanlab"]),
    ],
)
def test_report_to_is_one_or_several(value, names):
    assert resolve({"env": "math_verify", "report_to": value}).report_to == names


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match=r"key 'report_to\.0': must be 'tensorboard', 'wandb' or 'swanlab'"):
        resolve({"env": "math_verify", "report_to": "mlflow"})


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"report_to=wandb needs .* pip install 'wandb>=[\d.]+'$"):
        check_installed(["wandb"])


def test_a_run_keeps_its_id(tmp_path):
    first = run_id(tmp_path)
    assert first == run_id(tmp_path)
    assert len(first) == 21
    assert first.isalnum()
    (tmp_path / "another").mkdir()
    assert run_id(tmp_path / "another") != first


def test_each_stage_is_a_run_of_the_runs_group_with_all_settings(tmp_path):
    settings = {
        "env": "math_verify", "name": "two", "seed": 7, "project": "sums", "recipe": "sft_grpo", "model": "starter",
    }  # fmt: skip
    config = resolve(settings)
    folder = RunFolder(tmp_path / "2-grpo")
    folder.create()
    described = run_info(config, config.stages[1], folder, 20)
    assert (described.name, described.group, described.project, described.step) == ("two/2-grpo", "two", "sums", 20)
    logged = described.config
    assert (logged["seed"], logged["learner"]["name"], logged["rollout"]["tasks_per_step"]) == (7, "grpo", 64)
    single = resolve({**settings, "recipe": "grpo"})
    assert run_info(single, single.stages[0], folder, 0).name == "two"
