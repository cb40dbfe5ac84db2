import pytest
import torch
from safetensors.torch import load_file

from envgym.workers.parameters import write_weights


def test_what_is_written_is_read_back(tmp_path):
    tied = torch.randn(5, 3)
    tensors = {"embed": tied, "head": tied, "turned": torch.randn(4, 2).T, "half": torch.randn(3).bfloat16()}
    write_weights(tmp_path / "w", tensors)
    read = load_file(tmp_path / "w")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_weights(tmp_path / "w", {"a": torch.ones(2)})
    with pytest.raises(RuntimeError):
        write_weights(tmp_path / "w", {"a": torch.ones(2).to_sparse()})
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    assert load_file(tmp_path / "w")["a"].tolist() == [1, 1]
