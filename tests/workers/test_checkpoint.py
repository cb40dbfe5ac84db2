"""The files of a checkpoint: what is in them comes back, and nothing in them is run."""

import os

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from envgym.errors import CheckpointDamaged, RunError
from envgym.workers import checkpoint, zero


class Trap:
    """What is unpickled makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    torch.save({"optimizer": torch.zeros(3), "more": Trap(tmp_path / "trapped")}, tmp_path / "state.pt")
    for read in (checkpoint.read, zero.read):
        with pytest.raises(
            CheckpointDamaged, match=r"state.pt cannot be read \(it names posix.mkdir, which would be code"
        ):
            read(tmp_path / "state.pt")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("spoiled", [b"", b"PK", b"garbage" * 1000, "cut", None])
def test_a_file_that_cannot_be_read_is_said_in_one_line(tmp_path, spoiled):
    file = tmp_path / "state.pt"
    torch.save({"a": torch.arange(1000)}, file)
    if spoiled is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-300] if spoiled == "cut" else spoiled)
    reason = "No such file or directory" if spoiled is None else "it is cut short or garbage"
    with pytest.raises(CheckpointDamaged, match=rf"state\.pt cannot be read \({reason}\)$"):
        checkpoint.read(file)


def test_what_deepspeed_keeps_of_float16_comes_back(tmp_path):
    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False)
    torch.save({"static": LossScaler(8.0), "dynamic": scaler}, tmp_path / "state.pt")
    read = zero.read(str(tmp_path / "state.pt"))
    assert (read["static"].cur_scale, read["dynamic"].cur_scale) == (8.0, 2.0**16)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_is_said_in_one_line(tmp_path, size):
    file = tmp_path / "state.pt"
    file.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"state\.pt cannot be written"):
        checkpoint.write(file, {"a": torch.zeros(size)})
