"""How long ranks wait for each other: little to meet, and long for one that reads a large checkpoint."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from envgym.workers import zero

CPU = torch.device("cpu")


@pytest.fixture
def address(monkeypatch):
    """Where two ranks can meet. This process is in no group meanwhile, and DeepSpeed is not there."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(zero, "_library", lambda: SimpleNamespace(init_distributed=lambda verbose: None))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_once_they_have_met_ranks_wait_as_long_as_a_call_may_take(address, monkeypatch):
    groups = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: groups.append(options))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: zero.join_process_group(address, rank, 2, CPU), (0, 1)))
    assert sorted(group["rank"] for group in groups) == [0, 1]
    for group in groups:
        assert group["world_size"] == 2
        # The store's limit is what a rank of NCCL's has to hear of the others before the first collective.
        assert group["timeout"] == group["store"].timeout == timedelta(hours=1)


def test_who_meets_nobody_ends_soon(address, monkeypatch):
    monkeypatch.setattr(zero, "MEETING_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"(?i)timed out.*1/2"):
        zero.join_process_group(address, 0, 2, CPU)
