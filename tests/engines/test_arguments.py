"""What vLLM is started and called with, on a CPU and on a GPU. Nothing is started."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from envgym.engines import vllm
from envgym.engines.spec import LONGEST_DEFAULT, EngineSpec
from envgym.workers.export import write_bucket


@pytest.fixture
def model(tmp_path):
    """model(length): the folder of a model's config with this context length."""

    def write(length):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": length}))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("own", "setting", "expected"),
    [(262144, None, LONGEST_DEFAULT), (4096, None, None), (262144, 100_000, 100_000), (4096, 512, 512)],
)
def test_a_long_context_is_taken_only_if_it_is_asked_for(model, own, setting, expected):
    assert vllm._arguments(EngineSpec(model(own), max_model_len=setting), cpu=False)["max_model_len"] == expected


@pytest.mark.parametrize(
    ("cpu", "in_flight", "overlap"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_steps_overlap_on_a_gpu_where_weights_never_change_in_between(model, cpu, in_flight, overlap):
    settings = vllm._arguments(EngineSpec(model(512), in_flight=in_flight), cpu=cpu)
    assert settings["async_scheduling"] is overlap


def test_on_a_gpu_decoding_is_launched_as_graphs_that_take_no_compiling(model):
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    settings = vllm._arguments(EngineSpec(model(512), cache_bytes=2**30), cpu=False)
    compiled = CompilationConfig(**settings["compilation_config"])
    assert compiled.mode == CompilationMode.NONE
    assert compiled.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert settings["kv_cache_memory_bytes"] == 2**30
    own = {"compilation_config": {"mode": 3}, "kv_cache_memory_bytes": 7}
    settings = vllm._arguments(EngineSpec(model(512), engine_args=own), cpu=False)
    assert {name: settings[name] for name in own} == own
    assert "compilation_config" not in vllm._arguments(EngineSpec(model(512)), cpu=True)


def test_an_engine_on_several_gpus_places_its_own_ranks(model):
    settings = vllm._arguments(EngineSpec(model(512), tensor_parallel=2), cpu=False)
    assert (settings["tensor_parallel_size"], settings["distributed_executor_backend"]) == (2, "mp")
    assert "tensor_parallel_size" not in vllm._arguments(EngineSpec(model(512)), cpu=False)


def test_ranks_of_an_engine_are_spawned(model, monkeypatch):
    """A fork would copy the event loop that runs."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    seen = []
    monkeypatch.setattr(vllm, "_build", lambda spec: seen.append(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]) or 1 / 0)
    monkeypatch.setattr(vllm, "check_model_folder", lambda path: None)
    with pytest.raises(ZeroDivisionError):
        vllm.VLLMEngine(EngineSpec(model(512)))
    assert seen == ["spawn"]


def test_weights_are_loaded_with_the_configuration_that_their_layers_read(monkeypatch, tmp_path):
    from vllm.config import VllmConfig, get_current_vllm_config
    from vllm.model_executor.model_loader import reload

    calls, reader = [], vllm.WeightReader()

    def note(name):
        return lambda *args: calls.append((name, get_current_vllm_config() is reader.vllm_config))

    model = SimpleNamespace(modules=tuple, load_weights=note("load"))
    reader.vllm_config = VllmConfig()
    reader.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None, reset_lora_state=lambda: None)
    monkeypatch.setattr(reload, "initialize_layerwise_reload", note("begin"))
    monkeypatch.setattr(reload, "finalize_layerwise_reload", note("end"))
    reader.begin_reload()
    reader.load_bucket(write_bucket(0, str(tmp_path / "bucket"), {"w": torch.zeros(1)}))
    reader.end_reload()
    assert calls == [("begin", True), ("load", True), ("end", True)]
