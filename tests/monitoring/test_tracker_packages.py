"""The real packages, as far as they are installed: what is told can be read back."""

import json
import struct

import pytest

from envgym.monitoring.trackers import RunInfo, Trackers

STEPS = range(1, 6)


def run_info(folder, step=0):
    return RunInfo("0123456789abcdefghijk", "first", "first", "sums", folder, {"learner": {"lr": 0.5}}, step)


def tell(name, folder, steps, *, after=0, scale=1.0):
    """A run's steps, from one process's beginning to its end; gives what was noted."""
    notes = []
    trackers = Trackers([name], run_info(folder, after), notes.append)
    for step in steps:
        trackers.log({"step": step, "reward/mean": scale * step, "eval/ci95": [0.25, 0.75], "alarms": ["kl"]})
    trackers.close("completed")
    assert trackers.summary() == {name: {"failures": 0}}, notes
    return notes


# -- TensorBoard ------------------------------------------------------------------------------------------


def shown(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    [note] = tell("tensorboard", tmp_path, STEPS)
    assert note == f"tensorboard: tensorboard --logdir {tmp_path.parent}"
    scalars = shown(tmp_path)
    assert scalars["reward/mean"] == [(step, float(step)) for step in STEPS]
    assert scalars["eval/ci95/low"] == [(step, 0.25) for step in STEPS]
    assert scalars["alarms"] == [(step, 1.0) for step in STEPS]


def test_tensorboard_writes_to_the_folder_that_is_set(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"tensorboard_dir": str(tmp_path / "logs")}
    info = RunInfo("0123456789abcdefghijk", "first", "first", "sums", tmp_path / "run", config, 0)
    notes = []
    trackers = Trackers(["tensorboard"], info, notes.append)
    trackers.log({"step": 1, "reward/mean": 2.0})
    trackers.close("completed")
    assert notes == [f"tensorboard: tensorboard --logdir {tmp_path / 'logs'}"]
    events = EventAccumulator(str(tmp_path / "logs" / "first"))
    events.Reload()
    assert [event.value for event in events.Scalars("reward/mean")] == [2.0]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_takes_again(tmp_path):
    pytest.importorskip("tensorboard")
    tell("tensorboard", tmp_path, STEPS)
    tell("tensorboard", tmp_path, range(4, 8), after=3, scale=10.0)
    assert shown(tmp_path)["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]


# -- Weights & Biases -------------------------------------------------------------------------------------


def wandb_records(file):
    """The records of an offline run's file: LevelDB's log format, in blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(b"".join(parts))
            parts = []


def wandb_history(file):
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            yield record.history.step.num, items


def test_wandb_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    [note] = tell("wandb", tmp_path, STEPS)
    assert note == f"wandb: offline; send it with: wandb sync {tmp_path}/wandb/offline-run-*"
    [file] = tmp_path.glob("wandb/offline-run-*/run-0123456789abcdefghijk.wandb")
    history = dict(wandb_history(file))
    assert [history[step]["reward/mean"] for step in STEPS] == [1, 2, 3, 4, 5]
    assert history[5]["eval/ci95/high"] == 0.75
    [run] = [record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_group) == ("sums", "first", "first")
    assert {update.key: json.loads(update.value_json) for update in run.config.update}["learner"] == {"lr": 0.5}
    assert capfd.readouterr() == ("", "")  # the terminal is the display's


def test_wandb_without_a_key_asks_nobody(tmp_path, monkeypatch):
    """On a terminal its own login would wait for somebody to type."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    notes = []
    trackers = Trackers(["wandb"], run_info(tmp_path), notes.append)
    trackers.log({"step": 1})
    trackers.close("completed")
    assert "there is no API key: type `wandb login` once, or set WANDB_MODE=offline (the run continues" in notes[0]
    assert trackers.summary() == {"wandb": {"failures": 1}}


# -- SwanLab ----------------------------------------------------------------------------------------------


def swanlab_records(file):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(file)
    while (data := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(data)
        yield record
    reader.close()


def test_swanlab_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    tell("swanlab", tmp_path, STEPS)
    [file] = tmp_path.glob("swanlab/run-*/run-0123456789abcdefghijk.swanlab")
    records = list(swanlab_records(file))
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    values = {(scalar.key, scalar.step): scalar.value.number for scalar in scalars}
    assert [values["reward/mean", step] for step in STEPS] == [1, 2, 3, 4, 5]
    assert values["alarms", 5] == 1
    [start] = [record.start for record in records if record.HasField("start")]
    assert (start.project, start.name, start.id) == ("sums", "first", "0123456789abcdefghijk")
