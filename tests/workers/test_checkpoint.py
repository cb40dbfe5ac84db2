"""The files of a checkpoint: what is in them comes back, and nothing in them is run."""

import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address

from envgym.errors import CheckpointDamaged, RunError
from envgym.workers import checkpoint, reshard, zero


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


RANKS = 11  # of which the last, sorted as text, would come third
SHAPES = {"first": (3, 4), "second": (5,), "third": (RANKS, 2)}


def full_array(name, kind):
    """The values of a parameter, and of its moments, each unlike any other."""
    start = 1000 * list(SHAPES).index(name) + {"weights": 0, "exp_avg": 100, "exp_avg_sq": 200}[kind]
    return start + torch.arange(float(torch.tensor(SHAPES[name]).prod()))


def check_parameters(folder):
    read = dict(reshard.parameters(folder, list(SHAPES)))
    assert list(read) == list(SHAPES)
    for name, parameter in read.items():
        assert torch.equal(parameter.weights, full_array(name, "weights"))
        assert all(torch.equal(parameter.moments[kind], full_array(name, kind)) for kind in reshard.MOMENTS)
        assert parameter.step == 7


def write_shard(folder, rank, state):
    torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def test_a_stage_3_checkpoint_of_eleven_ranks_is_put_together(tmp_path):
    """Each rank has ceil(n / 11) values of each parameter; the last ranks' shares are filled up."""

    def shares(kind, rank):
        pieces = []
        for name, shape in SHAPES.items():
            share = -(-int(torch.tensor(shape).prod()) // RANKS)
            padded = torch.cat([full_array(name, kind), torch.full((share * RANKS,), -1.0)])
            pieces.append(padded[rank * share : (rank + 1) * share])
        return torch.cat(pieces)

    for rank in range(RANKS):
        moments = {kind: shares(kind, rank) for kind in reshard.MOMENTS}
        inner = {"state": {0: {"step": torch.tensor(7.0), **moments}}}
        write_shard(tmp_path, rank, {"fp32_flat_groups": [shares("weights", rank)], "optimizer_state_dict": inner})
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    torch.save({"param_shapes": [shapes]}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    check_parameters(tmp_path)


def test_a_stage_2_checkpoint_of_eleven_ranks_is_put_together(tmp_path):
    """Ranks have neighbouring slices of all parameters, end to end: a parameter may lie in several."""
    flat = {kind: torch.cat([full_array(name, kind) for name in SHAPES]) for kind in ("weights", *reshard.MOMENTS)}
    size = -(-len(flat["weights"]) // RANKS)
    for rank in range(RANKS):
        offset, start, places = rank * size, 0, {}
        for name in SHAPES:
            n = len(full_array(name, "weights"))
            low, high = max(start, offset), min(start + n, offset + size)
            if low < high:
                places[name] = fragment_address(numel=high - low, start=low - offset)
            start += n
        parts = {kind: values[offset : offset + size].clone() for kind, values in flat.items()}
        state = {
            "single_partition_of_fp32_groups": [parts.pop("weights")],
            "param_slice_mappings": [places],
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0), **parts}}},
        }
        write_shard(tmp_path, rank, state)
    check_parameters(tmp_path)


@pytest.mark.parametrize(("fused", "place"), [(True, "meta"), (False, "cpu")])
def test_a_restored_optimizers_step_counter_is_where_its_kernel_reads_it(fused, place):
    """On an H100 a fused AdamW refused a counter on the host. Here `meta` stands for the GPU."""
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = SimpleNamespace(param_groups=[{"params": [weight], "fused": fused}], state={})
    reshard.restore_parameters(SimpleNamespace(module=torch.nn.Module(), optimizer=optimizer), iter(()))
    assert optimizer.state[weight]["step"].device.type == place
    assert optimizer.state[weight]["exp_avg"].device.type == "meta"
