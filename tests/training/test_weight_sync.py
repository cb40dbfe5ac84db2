"""Weight sync, and the two checks that the weights arrived."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envgym.config.schema import StageConfig
from envgym.engine import SamplingParams
from envgym.engines.pool import EnginePool
from envgym.errors import RunError
from envgym.learner import LearnerConfig, RoleSpec
from envgym.training.checkpoints import Progress
from envgym.training.components import Components
from envgym.training.turns import GpuTimeshare
from envgym.training.update import Update
from envgym.training.weight_sync import MEAN_SHARE, PROBE, WeightSync
from envgym.training.weight_transfer import FileTransfer, Receipt
from envgym.workers.metrics import merge

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 0.01
INFO = {"adapter": False, "dtype": "float32", "n_parameters": 10, "n_trained": 2}


class ActorAndEngine:
    """An actor and an engine whose log-probabilities of the probe differ by `differences`."""

    def __init__(self, differences, **info):
        self.differences = differences
        self.info = SimpleNamespace(**{**INFO, **info})
        self.loaded: list[tuple[str, int, str]] = []

    def prompt(self, observation):
        assert observation.text == PROBE
        return list(range(len(self.differences) + 1))

    async def forward(self, samples):
        return [np.array([0.0, *(-1.0 + d for d in self.differences)], np.float32) for _ in samples]

    async def score(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)

    async def send(self, engines, version):
        self.loaded.append(("", version, "weights"))
        return Receipt(10, 0.5)

    async def on_first(self, method, path, *args):
        if method == "offer":
            Path(path).touch()
        elif Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink()
        return True

    async def call(self, method, *args):
        return Path(args[0]).exists() if method == "can_read" else await getattr(self, method)(*args)

    async def on_all(self, method, folder):
        assert method == "export_adapter"
        Path(folder).mkdir()
        Path(folder, "adapter").write_text("adapter")

    async def load_adapter(self, path, version):
        self.loaded.append((path, version, Path(path, "adapter").read_text()))

    def sync(self, **settings) -> WeightSync:
        pair: Any = self
        files = FileTransfer(pair, Path("transfer"), 100, checkpoint=False)
        files.send = pair.send
        timeshare = GpuTimeshare(None, {}, keeps_weights=False)
        return WeightSync(EnginePool(None, [pair]), pair, pair, TOLERANCE, pair, files, timeshare, **settings)


def test_the_engine_gets_the_actors_weights_and_is_compared_with_it():
    pair = ActorAndEngine([0.0, -0.002, 0.001])
    sync = pair.sync()
    assert asyncio.run(sync(7)) == pytest.approx(0.002, rel=1e-4)
    assert pair.loaded == [("", 7, "weights")]
    assert sync.receipt == Receipt(10, 0.5)


def test_an_adapter_is_sent_alone_once_the_engine_has_the_base():
    pair = ActorAndEngine([0.0], adapter=True)
    sync = pair.sync(base_is_quantized=True)
    asyncio.run(sync(1))
    asyncio.run(sync(2))
    assert [(version, kind) for _, version, kind in pair.loaded] == [(1, "weights"), (1, "adapter"), (2, "adapter")]
    assert not any(Path(path).exists() for path, *_ in pair.loaded if path)


@pytest.mark.parametrize(
    "differences",
    [[0.0, 0.02, 0.0], [0.0, -0.02], [math.nan, 0.0], [0.0, math.nan, 0.001], [0.0, math.nan], [math.inf, 0.0]],
)
def test_a_probe_that_differs_stops_the_run(differences):
    subject = r"disagree on the probe after sync 3( of [23] tokens \(.*\))?: "
    with pytest.raises(RunError, match=rf"{subject}.*sync\.tolerance=0\.01"):
        asyncio.run(ActorAndEngine(differences).sync()(3))


def test_small_differences_of_all_tokens_stop_it_too():
    """As of a sync in 16 bits with two experts swapped, none of whose tokens may differ by the tolerance."""
    with pytest.raises(RunError, match=r"differ by 0\.002 on average, more than 12% of sync\.tolerance=0\.01"):
        asyncio.run(ActorAndEngine([0.002, -0.002, 0.002]).sync()(3))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_the_bound_of_the_mean_lies_between_right_syncs_and_wrong_ones(dtype, tolerance):
    """As `benchmarks/sync_families.py` measured them, in nats."""
    kinds = json.loads((BENCHMARKS / "results" / "sync_families.json").read_text())["kinds"]
    assert len(kinds) == 13
    for kind, syncs in kinds.items():
        means = {fault: figures["mean"] for fault, figures in syncs["weights"][dtype].items()}
        right = means.pop("right")
        assert right < MEAN_SHARE * tolerance < min(means.values()), kind


class Actor:
    """The ranks of an actor whose log-probabilities differ from the sampler's by `mean_abs`."""

    def __init__(self, mean_abs: float) -> None:
        self.has_stepped = False
        self.mean_abs = mean_abs

    async def accumulate(self, samples, normalizers):
        return {"mismatch/mean_abs": self.mean_abs}

    async def step(self, lr):
        self.has_stepped = True
        raise InterruptedError


def take_step(actor, **sampling):
    """An optimizer step of the actor without samples."""
    roles = {"actor": RoleSpec(trained=True)}
    learner: Any = SimpleNamespace(
        roles=roles, loss_normalizers=lambda samples: {}, config=LearnerConfig(name="any"), needs_policy_samples=False
    )
    params = SamplingParams(max_tokens=4, **sampling)
    components = Components(learner, None, {"actor": actor}, params, sync=ActorAndEngine([0.0]).sync())
    asyncio.run(Update(components, StageConfig(env="any", learner="any"), Progress(), 1).optimizer_step([], []))


@pytest.mark.parametrize("mean_abs", [0.02, math.nan])
def test_episodes_of_another_policy_stop_the_run_before_the_optimizer_step(mean_abs):
    actor = Actor(mean_abs)
    with pytest.raises(RunError, match="disagree on this step's episodes"):
        take_step(actor)
    assert not actor.has_stepped


@pytest.mark.parametrize(
    ("mean_abs", "sampling"),
    [(0.001, {}), (0.02, {"top_p": 0.9}), (0.02, {"top_k": 5})],  # top-p and top-k renormalize
)
def test_episodes_of_the_same_policy_are_trained_on(mean_abs, sampling):
    actor = Actor(mean_abs)
    with pytest.raises(InterruptedError):
        take_step(actor, **sampling)
    assert actor.has_stepped


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]])
def test_the_largest_of_several_values_is_nan_if_one_is(values):
    merged = merge({"mismatch/max": (value, 1.0), "ratio/min": (value, 1.0)} for value in values)
    assert math.isnan(merged["mismatch/max"])
    assert math.isnan(merged["ratio/min"])
