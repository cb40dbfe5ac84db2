"""Adapters of the language model and images: what vLLM samples is what a worker computes, before and after a sync, and
after the engine has slept."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envgym.images import ImageFolder
from envgym.learner import RoleSpec
from envgym.render import RenderConfig, load_renderer
from envgym.types.images import decoded
from envgym.workers.config import ImageConfig, WorkersConfig, WorkerSpec
from envgym.workers.lora import LoraConfig
from envgym.workers.model import ModelWorker
from tests.vision_episodes import CORPUS, SIZES, picture, play, with_engine
from tests.vision_models import make_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def make_worker(tmp_path):
    """make_worker(kind) -> the folder of a new model, and a worker with an adapter on it, which opens the pictures."""
    workers = []

    def make(kind):
        folder = make_vision_model(kind, tmp_path / "model", CORPUS)
        images = ImageFolder(tmp_path / "images")
        for number in range(len(SIZES)):
            for seed in range(2):
                images.store(decoded(picture(number, seed)))
        spec = WorkerSpec(
            "actor", str(folder), RoleSpec(trained=True), {"name": "grpo"}, WorkersConfig(dtype="float32"),
            LoraConfig(rank=8), images=ImageConfig(str(images.path)),
        )  # fmt: skip
        workers.append(ModelWorker(spec))
        workers[-1].load()
        return folder, workers[-1]

    yield make
    for worker in workers:
        worker.close()


def write_adapter(worker, folder, seed):
    """Draw an adapter that changes the policy, and write it."""
    torch.manual_seed(seed)
    for name, parameter in worker.network.model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    worker.export_adapter(str(folder))
    return str(folder)


def differences(worker, transcripts):
    """|sampler - trainer| of every sampled token, in nats."""
    rows = [row for transcript in transcripts for row in transcript.rows if row.turns]
    result = []
    for row, scores in zip(rows, worker.forward([row.without_record() for row in rows], with_images=True), strict=True):
        start = 0
        for segment in row.segments:
            if segment.role == "action":
                logprobs = np.array(segment.logprobs)
                result += np.abs(np.array(scores[start : start + len(segment)]) - logprobs).tolist()
            start += len(segment)
    return np.array(result)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_an_adapter_is_one_policy_after_images(make_worker, tmp_path, store, kind):
    folder, worker = make_worker(kind)
    renderer = load_renderer(str(folder), RenderConfig())
    figures = {}

    async def body(pool):
        async def compare(name, seed):
            episodes = (play(pool, renderer, seed + n, n % 2, 10) for n in range(4))
            transcripts = [transcript for transcript in await asyncio.gather(*episodes) if transcript]
            found = differences(worker, transcripts)
            figures[name] = {"tokens": len(found), "mean": float(found.mean()), "max": float(found.max())}
            return transcripts

        await compare("without an adapter", 0)  # a new adapter changes nothing
        for version in (1, 2):
            adapter = write_adapter(worker, tmp_path / "adapter", version)
            await pool.on_all(lambda engine: engine.load_adapter(adapter, version))  # noqa: B023
            before = await compare(f"adapter {version}", 100 * version)
        await pool.sleep(1)
        await pool.wake("weights")
        await pool.wake("cache")
        await compare("after sleep", 200)  # the same pictures, which the engine had processed
        write_adapter(worker, tmp_path / "adapter", 3)
        return float(differences(worker, before).mean())

    # Blocks that the prompts fill, so that a prompt finds what an earlier one has computed.
    other = with_engine(folder, tmp_path, body, lora_rank=8, engine_args={"block_size": 32})
    store(f"image_lora_{kind}", **figures, nats_to_another_adapter=other)
    assert not [name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
                if "vision" in name or "visual" in name or "projector" in name]  # fmt: skip
    assert other > 0.01
    for name, figure in figures.items():
        assert figure["tokens"] >= 40, name
        assert figure["mean"] < 1e-6, name
        assert figure["max"] < 1e-4, name
