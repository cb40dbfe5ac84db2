"""Weights of many families of models on their way from a worker into engines: every name and piece is one that they
know, experts' and tied heads' among them."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec, read_bucket
from envgym.engines.transformers import TransformersEngine
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.types import Row, Segment, int_array
from envgym.workers import export
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.export import ParameterSource
from envgym.workers.model import ModelWorker

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "phi3": {},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
}
IDS = tuple(range(5, 45))
BUCKET = 2**17


@pytest.fixture
def make_model(tmp_path):
    """make_model(kind, seed) -> the folder of a tiny model with random weights."""

    def make(kind, seed):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            kind, vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=0, pad_token_id=1,
            bos_token_id=2, initializer_range=0.1, **FAMILIES[kind],
        )  # fmt: skip
        folder = tmp_path / f"{kind}-{seed}"
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def make_worker():
    """make_worker(folder) -> a worker that holds the model as one that learns would, and its scores of a text."""

    def make(folder):
        worker = ModelWorker(WorkerSpec("actor", str(folder), RoleSpec(), settings=WorkersConfig(dtype="float32")))
        worker.load()
        [scores] = worker.forward([Row([Segment("action", int_array(IDS))])])
        return worker, scores[1:]

    return make


def buckets(worker, prefix, *, checkpoint):
    worker.begin_export(BUCKET, str(prefix), checkpoint)
    while (bucket := worker.next_bucket()) is not None:
        yield bucket
    worker.end_export()


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "mixtral", "qwen3_moe"])
def test_weights_go_by_the_names_and_in_the_pieces_of_a_checkpoint(make_model, make_worker, tmp_path, kind):
    folder = make_model(kind, 0)
    worker, _ = make_worker(folder)
    arrived = {}
    for bucket in buckets(worker, tmp_path / "bucket", checkpoint=True):
        arrived |= read_bucket(bucket)
    saved = load_file(folder / "model.safetensors")
    assert arrived.keys() == saved.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in saved.items())
    assert ("lm_head.weight" in arrived) == (kind not in ("gemma2",))
    if kind == "mixtral":
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in arrived

    source = ParameterSource(worker.network.model)  # what goes from GPU to GPU is the same
    described = [(one.name, one.dtype, one.shape) for one in source.metadata()]
    sent = dict(source)
    assert described == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    assert source.max_bytes() == max(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize("bucket_bytes", [2**20, 2**29])
def test_between_processes_of_a_gpu_goes_an_embedding_of_any_size(monkeypatch, bucket_bytes):
    """That of Qwen2.5-0.5B has 260 MiB."""
    from vllm.distributed.weight_transfer import packed_tensor

    config = AutoConfig.for_model(
        "qwen2", vocab_size=151936, hidden_size=896, num_hidden_layers=1, intermediate_size=64,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    empty, buffers = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda buffer: buffers.append(buffer) or (None, ("handle",)))
    for name in ("current_device", "synchronize", "current_stream", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(uuid="GPU-0", synchronize=lambda: None))
    chunks = list(export._ipc_chunks(export.ParameterSource(model), bucket_bytes))
    assert [name for chunk in chunks for name in chunk["names"]] == [name for name, _ in model.named_parameters()]
    assert [buffer.nbytes for buffer in buffers] == [max(bucket_bytes, model.model.embed_tokens.weight.nbytes)]


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_the_fallback_engine_is_given_its_own_names(make_model, make_worker, tmp_path, kind):
    worker, expected = make_worker(make_model(kind, 1))

    async def main():
        engine = TransformersEngine(EngineSpec(str(make_model(kind, 0))))
        before = await engine.score(IDS)
        await engine.begin_weights()
        count = 0
        for bucket in buckets(worker, tmp_path / "bucket", checkpoint=False):
            await engine.load_bucket(bucket)
            count += 1
        await engine.end_weights(count, 1)
        return before, await engine.score(IDS)

    before, after = asyncio.run(main())
    assert np.abs(np.array(before) - expected).max() > 0.1
    np.testing.assert_allclose(after, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_vllm_samples_from_what_it_is_given(make_model, make_worker, tmp_path, kind):
    first, second = (make_worker(make_model(kind, seed)) for seed in (0, 1))

    async def main():
        runtime = LocalRuntime(tmp_path / "logs")
        try:
            arguments = {"spec": EngineSpec(str(tmp_path / f"{kind}-0"), max_model_len=128)}
            engine = await runtime.start(
                choose_engine("vllm")[0], arguments, name="vllm", environ={"OMP_NUM_THREADS": "1"}
            )
            scores = [await engine.call(lambda engine: engine.score(IDS))]
            for version, (worker, _) in enumerate((second, first), start=1):
                await engine.call(lambda engine: engine.begin_weights())
                count = 0
                for bucket in buckets(worker, tmp_path / "bucket", checkpoint=True):
                    await engine.call(lambda engine: engine.load_bucket(bucket))
                    count += 1
                assert count > 2
                await engine.call(lambda engine: engine.end_weights(count, version))
                scores.append(await engine.call(lambda engine: engine.score(IDS)))
            return scores
        finally:
            await runtime.close()

    loaded, changed, back = asyncio.run(main())
    assert np.abs(first[1] - second[1]).max() > 0.1
    for scores, expected in ((loaded, first[1]), (changed, second[1]), (back, first[1])):
        np.testing.assert_allclose(
            [score for score in scores if score is not None][-len(expected) :], expected, atol=1e-3
        )
