import pytest
import torch
from safetensors.torch import load_file

from envgym.engines.spec import IncomingWeights, read_bucket
from envgym.errors import WorkerError
from envgym.models.weights_file import write_weights
from envgym.workers.export import split_into_buckets, write_bucket


def test_what_is_written_is_read_back(tmp_path):
    shared = torch.randn(5, 3)
    tensors = {"embed": shared, "head": shared, "turned": torch.randn(4, 2).T, "half": torch.randn(3).bfloat16()}
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


def tensors(*sizes):
    return {str(number): torch.arange(size, dtype=torch.float32) for number, size in enumerate(sizes)}


def test_buckets_hold_as_much_as_they_may_and_a_larger_tensor_alone():
    sizes = [
        [int(name) for name in bucket] for bucket in split_into_buckets(tensors(10, 10, 10, 100, 5, 5).items(), 80)
    ]
    assert sizes == [[0, 1], [2], [3], [4, 5]]
    assert list(split_into_buckets([], 80)) == []


def test_a_bucket_is_read_as_it_was_written(tmp_path):
    expected = {"w": torch.randn(3, 5), "odd": torch.randn(3).bfloat16(), "none": torch.empty(0)}
    bucket = write_bucket(4, str(tmp_path / "bucket"), expected)
    assert (bucket.number, bucket.n_bytes) == (4, 66)
    read = read_bucket(bucket)
    (tmp_path / "bucket").unlink()  # what was read outlives it
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("place", [0, 1, 7, 8, 20, 65])
def test_a_flipped_byte_is_noticed(tmp_path, place):
    bucket = write_bucket(0, str(tmp_path / "bucket"), {"w": torch.randn(3, 5), "odd": torch.randn(3).bfloat16()})
    content = bytearray((tmp_path / "bucket").read_bytes())
    content[len(content) - 66 + place] ^= 1
    (tmp_path / "bucket").write_bytes(content)
    with pytest.raises(WorkerError, match="bucket 0 of the weights has changed on its way"):
        read_bucket(bucket)


def test_a_tensor_under_another_name_is_noticed(tmp_path):
    bucket = write_bucket(0, str(tmp_path / "bucket"), tensors(3, 4))
    write_weights(tmp_path / "bucket", {"1": torch.arange(4.0), "2": torch.arange(3.0)})
    with pytest.raises(WorkerError, match="has changed"):
        read_bucket(bucket)


def test_buckets_come_once_in_order_and_all_of_them(tmp_path):
    buckets = [write_bucket(number, str(tmp_path / str(number)), tensors(2)) for number in range(3)]
    update = IncomingWeights()
    update.take(buckets[0])
    with pytest.raises(WorkerError, match="bucket 2 of the weights came in place of bucket 1"):
        update.take(buckets[2])
    with pytest.raises(WorkerError, match="bucket 0 of the weights came in place of bucket 1"):
        update.take(buckets[0])
    update.take(buckets[1])
    with pytest.raises(WorkerError, match="2 of 3 buckets"):
        update.check(3)
    update.take(buckets[2])
    update.check(3)


def test_tensors_of_a_gpu_are_copied_once_to_pinned_memory(tmp_path, monkeypatch):
    """Tensors that say that they are on a GPU stand for those that are."""
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3).T, "host": torch.zeros(2)}
    on_gpu = {id(tensors["a"]), id(tensors["b"])}
    empty, pinned, waits = torch.empty, [], []

    def make(*size, pin_memory=False, **settings):
        made = empty(*size, **settings)
        pinned.extend([made] if pin_memory else [])
        return made

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(pinned)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: id(tensor) in on_gpu), raising=False)
    bucket = write_bucket(0, str(tmp_path / "bucket"), tensors)
    assert [tuple(tensor.shape) for tensor in pinned] == [(4,), (3, 2)]
    assert waits == [2]
    arrived = read_bucket(bucket)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
