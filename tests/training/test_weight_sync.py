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
from envgym.images import ImageFolder
from envgym.learner import LearnerConfig, RoleSpec
from envgym.processes.runtime import WorkerHandle, message_of
from envgym.render import RenderConfig, load_renderer
from envgym.training.checkpoints import Progress
from envgym.training.components import Components
from envgym.training.probe import Probe, picture_probe, text_probe
from envgym.training.step import Update
from envgym.training.weight_sync import (
    FACTOR,
    LARGEST,
    SMALLEST,
    FileTransfer,
    GpuTimeshare,
    WeightSync,
    policy_difference,
)
from envgym.types import ImagePart, ImageSpan, PlacedImage, Row, Segment
from envgym.types.images import decoded
from envgym.workers.micro_batches import merge_metrics

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 0.01
INFO = {"adapter": False, "dtype": "float32", "n_parameters": 10, "n_trained": 2}


class Client(WorkerHandle):
    """The client of the engine of a pair."""

    def __init__(self, pair):
        self.pair, self.score = pair, pair.score

    async def send(self, message):
        method, args, _ = message
        return Path(args[0]).exists() if method == "can_read" else await getattr(self.pair, method)(*args)

    async def close(self):
        pass


class ActorAndEngine:
    """An actor and an engine whose log-probabilities of the probe differ by `differences`, and by `before` when both
    have read the same files; by `with_picture` after a picture, whose placeholders differ by more. The engine
    receives an adapter with another checksum if `loses` it."""

    with_picture = 0.0

    def __init__(self, differences, before=0.0, loses=False, **info):
        self.differences, self.before, self.loses = differences, before, loses
        self.info = SimpleNamespace(**{**INFO, **info})
        self.loaded: list[tuple[str, int, str]] = []

    async def forward(self, samples):
        self.samples = samples
        return [np.array([0.0] + [-1.0] * (len(sample) - 1), np.float32) for sample in samples]

    async def score(self, token_ids, images=()):
        if images:
            difference = self.with_picture if self.loaded else self.before
            return [5.0] * (images[0].end - 1) + [-1.0 + difference] * (len(token_ids) - images[0].end)
        return [-1.0 + (d if self.loaded else self.before) for d in self.differences]

    async def send(self, engines, version):
        self.loaded.append(("", version, "weights"))
        return 10

    async def on_first(self, call):
        method, [path, *_], _ = message_of(call)
        if method == "offer":
            Path(path).touch()
        elif Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink()
        return True

    async def on_all(self, call):
        method, [folder], _ = message_of(call)
        assert method == "export_adapter"
        Path(folder).mkdir()
        Path(folder, "adapter").write_text("adapter")
        return [5]

    async def load_adapter(self, path, version):
        self.loaded.append((path, version, Path(path, "adapter").read_text()))
        return 6 if self.loses else 5

    def sync(self, tolerance: float | None = TOLERANCE, precision="float32", **settings) -> WeightSync:
        pair: Any = self
        files = FileTransfer(pair, Path("transfer"), 100, checkpoint=False)
        files.send = pair.send
        timeshare = GpuTimeshare(None, {}, keeps_weights=False)
        probes = (Probe(tuple(range(len(self.differences) + 1))), *settings.pop("pictured", ()))
        return WeightSync(
            EnginePool(None, [Client(pair)]), pair, probes, tolerance, precision, pair, files, timeshare, **settings
        )


def test_the_engine_gets_the_actors_weights_and_is_compared_with_it():
    pair = ActorAndEngine([0.0, -0.002, 0.001])
    sync = pair.sync()
    assert asyncio.run(sync(7)) == pytest.approx(0.002, rel=1e-4)
    assert pair.loaded == [("", 7, "weights")]
    assert sync.n_bytes == 10


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


def test_an_adapter_that_did_not_arrive_stops_it():
    with pytest.raises(
        RunError, match=r"the adapter of policy 2 did not arrive at engine 0: .* sent is 5, .*received 6"
    ):
        asyncio.run(ActorAndEngine([0.0], adapter=True, loses=True).sync()(2))


def compare(before, after, samples, precision="16 bit", version=0, **settings):
    """A first sync and the check of a step's samples, whose mean difference is `samples`, without `sync.tolerance`."""
    sync = ActorAndEngine([after] * 4, before).sync(None, precision, **settings)
    asyncio.run(sync(version))
    sync.check_samples(samples)


def test_a_sync_is_compared_with_what_the_same_files_give():
    """As much as a pretrained model's rounding in 16 bits, of which nothing is wrong, though a fixed bound stops it."""
    compare(before=0.066, after=0.07, samples=0.039)
    compare(before=0.066, after=0.18, samples=0.039)


@pytest.mark.parametrize("samples", [0.2, math.nan, None])
def test_a_larger_difference_stops_the_run_once_samples_confirm_it(samples):
    """None: with top-p the samples cannot be compared, and nothing refutes the probe."""
    words = r"this step's episodes, as on the probe after sync 0 \(by 0\.3 nats; 0\.02 with the same files\)"
    with pytest.raises(RunError, match=words):
        compare(before=0.02, after=0.3, samples=samples)
    compare(before=0.02, after=0.3, samples=0.04)


def test_an_alarm_is_over_once_it_was_refuted():
    sync = ActorAndEngine([0.3] * 4, 0.02).sync(None, "16 bit")
    asyncio.run(sync(0))
    sync.check_samples(0.04)
    sync.check_samples(0.2)


@pytest.mark.parametrize(("precision", "difference"), [("16 bit", 0.6), ("float32", 0.06), ("16 bit", math.nan)])
def test_an_engine_that_computes_differently_from_the_same_files_stops_the_run(precision, difference):
    with pytest.raises(RunError, match=r"the probe before the first sync.*is not this model; sync.tolerance=N sets"):
        compare(before=difference, after=0.0, samples=0.0, precision=precision)


def test_an_engine_that_scores_too_few_tokens_is_refused():
    pair = ActorAndEngine([0.0] * 4)
    pair.score = lambda token_ids: asyncio.sleep(0, [-1.0] * 3)
    with pytest.raises(RunError, match=r"^the engine's score returned 3 numbers for 5 tokens: 4 are needed$"):
        asyncio.run(pair.sync(None, "float32")(0))


def test_a_resumed_run_is_compared_with_its_first_sync():
    """Its engines have read older files, whose difference from the actor says nothing."""
    compare(before=5.0, after=0.07, samples=0.039, version=3)
    with pytest.raises(RunError, match="the probe after sync 3"):
        compare(before=0.0, after=0.6, samples=0.039, version=3)


def test_a_run_that_begins_from_a_checkpoint_is_compared_with_its_first_sync():
    """The policy has moved since the model's folder was written, which the engines have read."""
    compare(before=5.0, after=0.07, samples=0.039, from_checkpoint=True)
    with pytest.raises(RunError, match="the probe after sync 0"):
        compare(before=0.0, after=0.6, samples=0.039, from_checkpoint=True)


def with_picture(difference, tmp_path, before=0.0):
    """A sync of which the probe with a picture differs so."""
    image = decoded(ImagePart.from_value(np.zeros((2, 2, 3), np.uint8)))
    pair = ActorAndEngine([before] * 4, before)
    pair.with_picture = difference
    probe = Probe(tuple(range(20)), 11, (PlacedImage(image, 2, 9),), ImageFolder(tmp_path).store)
    sync = pair.sync(None, pictured=[probe])
    return pair, image, asyncio.run(sync(0)), sync


def test_the_engines_see_a_picture_as_the_actor_does(tmp_path):
    pair, image, maximum, sync = with_picture(2e-4, tmp_path)
    assert maximum == pytest.approx(2e-4, rel=1e-3)
    assert [sample.images for sample in pair.samples] == [(), (ImageSpan(image.sha256, 2, 9),)]
    assert ImageFolder(tmp_path).find(image.sha256).read_bytes() == image.data
    ImageFolder(tmp_path).find(image.sha256).unlink()  # as an old file
    asyncio.run(sync(1))
    assert ImageFolder(tmp_path).find(image.sha256)


def test_a_vision_tower_of_older_weights_stops_the_run(tmp_path):
    with pytest.raises(RunError, match=r"on the probe with a picture after sync 0: .* by 0\.2 on .* than 0\.05"):
        with_picture(0.2, tmp_path)
    *_, sync = with_picture(0.03, tmp_path)
    with pytest.raises(RunError, match=r"as on the probe with a picture after sync 0 \(by 0.03 nats; 0 with the same"):
        sync.check_samples(0.01)
    *_, sync = with_picture(0.03, tmp_path, before=0.02)  # as much as before
    sync.check_samples(0.01)


def test_probes_have_the_renderers_tokens_and_room_after_the_picture(vision_model, tiny_model, tmp_path):
    renderer = load_renderer(str(vision_model("llava")), RenderConfig())
    text, stored = text_probe(renderer, 1000), []
    assert len(text.token_ids) == 256
    assert len(text_probe(renderer, 40).token_ids) == 40
    probe = picture_probe(renderer, 1000, stored.append)
    [placed] = probe.images
    assert (placed.image.width, placed.image.height, placed.length) == (64, 64, 16)
    assert len(probe.token_ids) == placed.end + 64
    assert set(probe.token_ids[placed.start : placed.end]) == {renderer.tokenizer.convert_tokens_to_ids("<image>")}
    assert probe.start == placed.end
    probe.store(placed.image)
    assert stored == [placed.image]
    assert len(picture_probe(renderer, placed.end + 9, stored.append).token_ids) == placed.end + 9
    assert picture_probe(renderer, placed.end + 7, stored.append) is None
    assert picture_probe(load_renderer(str(vision_model("llava")), RenderConfig(kind="text")), 1000, print) is None


def test_differences_count_by_the_probability_of_their_token():
    likely, unlikely = math.log(0.8), math.log(0.2)
    assert policy_difference([likely, unlikely], [likely + 0.1, unlikely - 0.6]) == pytest.approx(0.2)
    assert math.isnan(policy_difference([likely, unlikely], [likely, math.nan]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bounds_lie_between_right_syncs_and_wrong_ones(dtype):
    """As `benchmarks/sync_families.py` measured them, in nats. A fault that changes the policy less than rounding does
    cannot be seen in 16 bits: its size is that in float32."""
    result = json.loads((BENCHMARKS / "results" / "sync_families.json").read_text())
    kinds = {kind: measured["weights"] for kind, measured in result["kinds"].items()}
    measured_kinds = {kind: weights for kind, weights in kinds.items() if "files" in weights[dtype]}
    assert len(measured_kinds) >= 2
    precision = "float32" if dtype == "float32" else "16 bit"
    for kind, weights in (measured_kinds | {"pretrained": result["pretrained"]}).items():
        differences = {sync: figures["difference"] for sync, figures in weights[dtype].items()}
        files, right = differences.pop("files"), differences.pop("right")
        bound = max(FACTOR * files, SMALLEST[precision])
        assert files < LARGEST[precision], kind
        assert right < bound, kind
        for fault, difference in differences.items():
            assert difference > bound or weights["float32"][fault]["difference"] < bound, (kind, fault)


class Actor:
    """The ranks of an actor whose log-probabilities differ from the sampler's by `mean_abs`."""

    def __init__(self, mean_abs: float) -> None:
        self.has_stepped = False
        self.mean_abs = mean_abs

    async def accumulate(self, rows, normalizers):
        self.rows = rows
        return {}

    async def accumulated_outputs(self):
        return [(row, np.stack([row.old_logprobs + np.float32(self.mean_abs)] * 3)) for row in self.rows]

    async def step(self, lr):
        self.has_stepped = True
        raise InterruptedError


def take_step(actor, **sampling):
    """An optimizer step of the actor on a row that its weights sampled."""
    roles = {"actor": RoleSpec(trained=True)}
    learner: Any = SimpleNamespace(roles=roles, loss_normalizers=lambda rows: {}, config=LearnerConfig(name="any"))
    row = Row([Segment("prompt", [1]), Segment("action", [2, 3], logprobs=[-1.0, -2.0])])
    params = SamplingParams(max_tokens=4, **sampling)
    components = Components(learner, None, {"actor": actor}, params, sync=ActorAndEngine([0.0]).sync())
    asyncio.run(Update(components, StageConfig(env="any", learner="any"), Progress(), 1).optimizer_step([row], []))


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
    merged = merge_metrics({"mismatch/max": (value, 1.0), "ratio/min": (value, 1.0)} for value in values)
    assert math.isnan(merged["mismatch/max"])
    assert math.isnan(merged["ratio/min"])
