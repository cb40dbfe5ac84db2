import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from envgym.workers import weight_files as weights


def test_what_is_written_is_read_back(tmp_path):
    tied = torch.randn(5, 3)
    tensors = {"embed": tied, "head": tied, "turned": torch.randn(4, 2).T, "half": torch.randn(3).bfloat16()}
    weights.write(tmp_path / "w", tensors)
    read = dict(weights.read(tmp_path / "w"))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    weights.write(tmp_path / "w", {"a": torch.ones(2)})
    with pytest.raises(RuntimeError):
        weights.write(tmp_path / "w", {"a": torch.ones(2).to_sparse()})
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    assert dict(weights.read(tmp_path / "w"))["a"].tolist() == [1, 1]


def test_where_is_a_folder_that_can_be_written():
    file = weights.where(0) / "envgym-test-where"
    file.touch()
    file.unlink()


def test_a_small_shared_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    assert weights.where(2**30) == Path(tempfile.gettempdir())
