"""The arguments that vLLM is started with, on a CPU and on a GPU. Nothing is started."""

import json

import pytest

from envgym.engines import vllm
from envgym.engines.spec import LONGEST_DEFAULT, EngineSpec


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
