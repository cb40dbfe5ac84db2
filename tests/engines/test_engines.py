"""What every engine promises, held against the model itself in float32. Each engine is one process for all tests."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from envgym.engine import Generation, Request, SamplingParams
from envgym.engines import choose_engine, make_engine
from envgym.engines.spec import EngineSpec
from envgym.errors import ConfigError, InvalidOutcome, NameNotFound, WorkerError
from envgym.loading import entry_points
from envgym.models.weights_file import write_weights
from envgym.processes.local import LocalRuntime
from envgym.types import StopReason, VersionSpan
from envgym.workers.export import split_into_buckets, write_bucket
from tests.weight_files import bucket_of, load

CONTEXT = 256
END = 0  # <|im_end|>


class EngineProcess:
    """An engine in a process of its own, with an event loop that outlives the tests' coroutines."""

    def __init__(self, kind: str, model: Path, logs: Path) -> None:
        self.runner = asyncio.Runner()
        self.runtime = LocalRuntime(logs)
        kwargs = {"spec": EngineSpec(str(model), max_model_len=CONTEXT)}
        start = self.runtime.start(choose_engine(kind)[0], kwargs, name=kind, environ={"OMP_NUM_THREADS": "1"})
        self.worker = self.runner.run(start)

    def call(self, call):
        return self.runner.run(self.worker.call(call))

    def generate(self, requests) -> list[Generation]:
        async def wave():
            calls = [self.worker.call(lambda engine: engine.generate(request)) for request in requests]
            return await asyncio.gather(*calls)

        return self.runner.run(wave())

    def close(self):
        self.runner.run(self.runtime.close())
        self.runner.close()


@pytest.fixture(scope="session", params=["vllm", "transformers"])
def engine(request, tiny_model, tmp_path_factory):
    process = EngineProcess(request.param, tiny_model, tmp_path_factory.mktemp("logs"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def policy(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture
def new_policy(policy, tmp_path, engine):
    """Another policy, and a file of its weights; the engine has its own back afterwards."""
    torch.manual_seed(7)
    other = Qwen3ForCausalLM(policy.config).float().eval()
    for model, name in ((other, "new"), (policy, "old")):
        write_weights(tmp_path / f"{name}.safetensors", model.state_dict())
    yield other, str(tmp_path / "new.safetensors")
    engine.runner.run(load(engine.worker, tmp_path / "old.safetensors", 0))


def logprobs_of(policy, token_ids, temperature=1.0):
    """[T-1] log-probabilities of tokens 1 .. T-1 under the model itself."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = policy(ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def assert_exact(policy, request, generation, span=None):
    start, end = span or (0, len(generation.token_ids))
    n = len(request.token_ids)
    expected = logprobs_of(policy, [*request.token_ids, *generation.token_ids], request.sampling.temperature)
    expected = expected[n - 1 + start : n - 1 + end]
    assert (expected - torch.tensor(generation.logprobs[start:end])).abs().max() < 1e-4


def requests(n, sampling, prefix="r"):
    """Prompts of different lengths, some sharing a beginning."""
    return [Request(f"{prefix}{i}", tuple(range(3 + i % 2, 20 + i)), sampling) for i in range(n)]


def test_info(engine):
    info = engine.call(lambda engine: engine.info())
    assert info.kind.split()[0] in entry_points("envgym.engines")
    assert info.checkpoint_names == info.kind.startswith("vllm")
    assert info.max_model_len == CONTEXT


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, policy, temperature):
    wave = requests(24, SamplingParams(max_tokens=16, temperature=temperature))
    for request, generation in zip(wave, engine.generate(wave), strict=True):
        assert len(generation.token_ids) == len(generation.logprobs) <= 16
        assert generation.versions == (VersionSpan(0, 0, len(generation.token_ids)),)
        assert_exact(policy, request, generation)


def test_a_cut_support_is_renormalised(engine, policy):
    wave = requests(8, SamplingParams(max_tokens=4, top_k=3)) + requests(8, SamplingParams(4, top_p=0.5), "p")
    for request, generation in zip(wave, engine.generate(wave), strict=True):
        ids = [*request.token_ids, *generation.token_ids]
        with torch.no_grad():
            probabilities = policy(torch.tensor([ids])).logits[0].softmax(-1)[len(request.token_ids) - 1 :]
        for p, token, logprob in zip(probabilities, generation.token_ids, generation.logprobs, strict=False):
            ordered = p.sort(descending=True).values
            kept = 3 if request.sampling.top_k else int((ordered.cumsum(0) - ordered < 0.5).sum())
            assert p[token] >= ordered[kept - 1]
            assert logprob == pytest.approx(float((p[token] / ordered[:kept].sum()).log()), abs=1e-4)


def test_greedy(engine, policy):
    wave = requests(4, SamplingParams(max_tokens=8, temperature=0))
    for request, generation in zip(wave, engine.generate(wave), strict=True):
        ids = [*request.token_ids, *generation.token_ids]
        with torch.no_grad():
            best = policy(torch.tensor([ids])).logits[0].argmax(-1)
        assert best[len(request.token_ids) - 1 : -1].tolist() == list(generation.token_ids)


def test_stop_and_length(engine):
    stop = tuple(range(256))
    for generation in engine.generate(requests(8, SamplingParams(max_tokens=100, stop_token_ids=stop))):
        assert generation.stop_reason is StopReason.STOP
        assert generation.token_ids[-1] in stop
        assert not set(generation.token_ids[:-1]) & set(stop)
    full = tuple(range(3, CONTEXT - 3))  # leaves room for 6
    results = engine.generate([Request(f"f{i}", full, SamplingParams(max_tokens=6)) for i in range(8)])
    assert max(len(generation.token_ids) for generation in results) == 6
    for generation in results:
        ended = generation.token_ids[-1] == END  # the model's own end token stops it too
        assert generation.stop_reason is (StopReason.STOP if ended else StopReason.LENGTH)


def test_a_turn_ends_soon_after_its_seconds_with_the_tokens_that_it_has(engine, policy):
    """Of twenty long requests, those with a limit are shorter than the others, and exact."""
    prompt, sampling = tuple(range(3, 13)), SamplingParams(max_tokens=CONTEXT - 10)
    wave = [Request(f"t{i}", prompt, sampling, seconds=1e-3 if i % 2 else math.inf) for i in range(20)]
    results = engine.generate(wave)
    late, free = results[1::2], results[::2]
    assert max(len(generation.token_ids) for generation in late) < max(len(g.token_ids) for g in free)
    for request, generation in zip(wave[1::2], late, strict=True):
        assert generation.token_ids[-1] == END or generation.stop_reason is StopReason.LENGTH
        assert_exact(policy, request, generation)


def test_the_models_own_end_token_ends_a_turn(engine, policy):
    """One that the model's config names, and nobody else does. The prompt is one after which it is the likeliest."""
    prompts = torch.randint(3, 512, (2000, 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        best = policy(prompts).logits[:, -1].topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).masked_fill(best.indices[:, 0] != END, -1)
    assert margins.max() > 1e-3
    prompt = tuple(prompts[margins.argmax()].tolist())
    [generation] = engine.generate([Request("end", prompt, SamplingParams(max_tokens=5, temperature=0))])
    assert list(generation.token_ids) == [END]
    assert generation.stop_reason is StopReason.STOP


def test_a_seed_fixes_a_request_whatever_runs_beside_it(engine):
    one = Request("one", tuple(range(3, 30)), SamplingParams(max_tokens=16, seed=11))
    alone = engine.generate([one])[0]
    company = engine.generate([*requests(5, SamplingParams(max_tokens=12, seed=3)), one])[-1]
    assert alone.token_ids == company.token_ids
    other = replace(one, sampling=SamplingParams(max_tokens=16, seed=12))
    assert engine.generate([other])[0].token_ids != alone.token_ids


@pytest.mark.parametrize(
    "changes", [{"temperature": 3.0}, {"temperature": 1e300}, {"stop_token_ids": (2**40,)}, {"stop_token_ids": (-5,)}]
)
def test_what_an_engine_does_not_take_is_refused_alone_and_is_not_the_engines_fault(engine, changes):
    """vLLM's limits are narrower than those of a run's settings; transformers has none."""
    good = requests(4, SamplingParams(max_tokens=8, seed=5))
    bad = Request("bad", (5, 6, 7), replace(SamplingParams(max_tokens=8, seed=5), **changes))
    expected = engine.generate(good)

    async def wave():
        calls = [engine.worker.call(lambda engine: engine.generate(request)) for request in [*good, bad]]
        return await asyncio.gather(*calls, return_exceptions=True)

    *others, last = engine.runner.run(wave())
    assert [list(g.token_ids) for g in others] == [list(g.token_ids) for g in expected]
    if isinstance(last, InvalidOutcome):
        assert (last.kind, last.retryable) == ("engine", False)
        assert str(last).startswith("vLLM refuses a request: ")
    else:
        assert engine.call(lambda engine: engine.info()).kind.startswith("transformers")
        assert len(last.token_ids) >= 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-9])
def test_a_temperature_near_zero_leaves_the_others_of_its_batch(engine, temperature):
    [greedy] = engine.generate([Request("greedy", (5, 6, 7), SamplingParams(max_tokens=6, temperature=0.0))])
    cold = Request("cold", (5, 6, 7), SamplingParams(max_tokens=6, temperature=temperature))
    *others, last = engine.generate([*requests(3, SamplingParams(max_tokens=6)), cold])
    if engine.call(lambda engine: engine.info()).kind.startswith("transformers"):  # vLLM takes 0.01 for less
        assert list(last.token_ids) == list(greedy.token_ids)
    assert all(math.isfinite(logprob) for logprob in last.logprobs)
    assert all(generation.token_ids for generation in others)


@pytest.mark.parametrize("length", [2, 100, CONTEXT])
def test_score(engine, policy, length):
    token_ids = tuple((7 * i + 3) % 512 for i in range(length))
    scored = torch.tensor(engine.call(lambda engine: engine.score(token_ids)))
    assert scored.shape == (length - 1,)
    assert (scored - logprobs_of(policy, token_ids)).abs().max() < 1e-5


def test_new_weights_even_where_prefixes_were_cached(engine, new_policy):
    other, path = new_policy
    wave = requests(16, SamplingParams(max_tokens=8))
    engine.generate(wave)
    engine.runner.run(load(engine.worker, path, 1))
    for request, generation in zip(wave, engine.generate(wave), strict=True):
        assert_exact(other, request, generation)
        assert {span.version for span in generation.versions} == {1}
    token_ids = tuple(range(3, 40))
    assert (
        torch.tensor(engine.call(lambda engine: engine.score(token_ids))) - logprobs_of(other, token_ids)
    ).abs().max() < 1e-4


def test_new_weights_in_mid_flight(engine, policy, new_policy, tmp_path):
    other, path = new_policy
    wave = requests(8, SamplingParams(max_tokens=220), "flight")

    async def swap():
        flying = [asyncio.create_task(engine.worker.call(lambda engine: engine.generate(request))) for request in wave]
        await asyncio.sleep(0)
        # The engine has taken the wave up when it answers the next call.
        await engine.worker.call(lambda engine: engine.info())
        await load(engine.worker, path, 5)
        return await asyncio.gather(*flying)

    for _ in range(20):  # on a busy machine the wave may land before we are scheduled again
        results = engine.runner.run(swap())
        if any(len(generation.versions) == 2 for generation in results):
            break
        engine.runner.run(load(engine.worker, tmp_path / "old.safetensors", 0))
    assert any(len(generation.versions) == 2 for generation in results)
    for request, generation in zip(wave, results, strict=True):
        assert generation.versions[0].start == 0
        assert generation.versions[-1].end == len(generation.token_ids)
        for span in generation.versions:
            weights, others = (policy, other) if span.version == 0 else (other, policy)
            assert_exact(weights, request, generation, (span.start, span.end))
            with pytest.raises(AssertionError):  # labels that are exchanged do not pass
                assert_exact(others, request, generation, (span.start, span.end))


def test_weights_in_several_buckets_that_part_a_layer(engine, new_policy, tmp_path):
    """vLLM joins matrices of the files into one of its own, whose parts come in different buckets."""
    other, path = new_policy
    parts = [
        write_bucket(number, str(tmp_path / f"bucket-{number}"), bucket)
        for number, bucket in enumerate(split_into_buckets(load_file(path).items(), 2**14))
    ]
    assert len(parts) > 4

    async def main():
        await engine.worker.call(lambda engine: engine.begin_weights())
        for part in parts:
            await engine.worker.call(lambda engine: engine.load_bucket(part))
            Path(part.path).unlink()
        await engine.worker.call(lambda engine: engine.end_weights(len(parts), 2))
        return [
            await engine.worker.call(lambda engine: engine.generate(request))
            for request in requests(2, SamplingParams(max_tokens=8))
        ]

    for request, generation in zip(requests(2, SamplingParams(max_tokens=8)), engine.runner.run(main()), strict=True):
        assert_exact(other, request, generation)


def test_weights_that_are_not_those_that_were_sent_are_refused(engine, new_policy):
    _, path = new_policy
    good = bucket_of(path)

    async def attempt(*calls):
        await engine.worker.call(lambda engine: engine.begin_weights())
        for call in calls:
            await engine.worker.call(call)

    with pytest.raises(WorkerError, match="has changed on its way"):
        engine.runner.run(attempt(lambda engine: engine.load_bucket(replace(good, checksum=good.checksum ^ 1))))
    with pytest.raises(WorkerError, match="1 of 2 buckets of the weights came"):
        engine.runner.run(attempt(lambda engine: engine.load_bucket(good), lambda engine: engine.end_weights(2, 9)))


def test_nothing_is_sampled_while_weights_come(engine, new_policy):
    """They sample all there is."""
    other, path = new_policy
    request, token_ids = Request("paused", tuple(range(3, 20)), SamplingParams(max_tokens=8)), tuple(range(3, 40))

    async def main():
        await engine.worker.call(lambda engine: engine.begin_weights())
        before = await engine.worker.call(lambda engine: engine.steps())
        tasks = [asyncio.create_task(engine.worker.call(lambda engine: engine.generate(request)))]
        tasks += [asyncio.create_task(engine.worker.call(lambda engine: engine.score(token_ids)))]
        await asyncio.sleep(0)
        await engine.worker.call(lambda engine: engine.load_bucket(bucket_of(path)))
        assert await engine.worker.call(lambda engine: engine.steps()) == before
        await engine.worker.call(lambda engine: engine.end_weights(1, 3))
        results = await asyncio.gather(*tasks)
        assert await engine.worker.call(lambda engine: engine.steps()) > before
        return results

    generation, scored = engine.runner.run(main())
    assert {span.version for span in generation.versions} == {3}
    assert_exact(other, request, generation)
    assert (torch.tensor(scored) - logprobs_of(other, token_ids)).abs().max() < 1e-4


def test_a_cancelled_request_leaves_the_others(engine, policy):
    wave = requests(4, SamplingParams(max_tokens=60), "c")

    async def main():
        tasks = [asyncio.create_task(engine.worker.call(lambda engine: engine.generate(request))) for request in wave]
        await engine.worker.call(lambda engine: engine.info())
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    for request, generation in zip(wave[1:], engine.runner.run(main()), strict=True):
        assert_exact(policy, request, generation)


def test_nothing_is_sampled_for_requests_that_were_given_up(engine, new_policy):
    _, path = new_policy

    async def main():
        before = await engine.worker.call(lambda engine: engine.steps())
        await engine.worker.call(lambda engine: engine.begin_weights())
        wave = requests(4, SamplingParams(max_tokens=100), "g")
        tasks = [asyncio.create_task(engine.worker.call(lambda engine: engine.generate(request))) for request in wave]
        await engine.worker.call(lambda engine: engine.info())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.worker.call(lambda engine: engine.load_bucket(bucket_of(path)))
        await engine.worker.call(lambda engine: engine.end_weights(1, 1))
        await engine.worker.call(lambda engine: engine.generate(Request("after", (5, 6), SamplingParams(max_tokens=1))))
        return await engine.worker.call(lambda engine: engine.steps()) - before

    assert engine.runner.run(main()) < 10


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_a_model_that_does_not_load(kind, tmp_path):
    (tmp_path / "empty").mkdir()
    bert = '{"architectures": ["BertForSequenceClassification"]}'
    for folder, config in (("bad", "{"), ("list", "[]"), ("bert", bert)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(config)

    async def start(model):
        runtime = LocalRuntime(tmp_path / "logs")
        await runtime.start(choose_engine(kind)[0], {"spec": EngineSpec(str(model))}, name="e")

    for name, said in (
        ("absent", "no model folder"),
        ("empty", "no config.json"),
        ("bad", "not a JSON object"),
        ("list", "not a JSON object"),
        ("bert", "not a causal language model"),
    ):
        if kind == "vllm" or name == "absent":
            with pytest.raises(ConfigError, match=said):
                asyncio.run(start(tmp_path / name))


def test_choose_engine(monkeypatch):
    vllm, transformers = "envgym.engines.vllm:VLLMEngine", "envgym.engines.transformers:TransformersEngine"
    assert choose_engine("auto") == choose_engine("vllm") == (vllm, "")
    assert choose_engine("transformers") == (transformers, "")
    assert choose_engine("mine.py:Mine") == ("mine.py:Mine", "")
    monkeypatch.setattr("envgym.engines.find_spec", lambda name: None)
    target, note = choose_engine("auto")
    assert target == transformers
    assert "not installed" in note
    with pytest.raises(NameNotFound, match=r"no engine 'mine'. There is auto, openai, transformers, vllm\.$"):
        choose_engine("mine")


MINIMAL = """
class Minimal:
    def __init__(self, their_spec):
        self.spec = their_spec

    async def info(self): ...
    async def steps(self): ...
    async def generate(self, request): ...
    async def score(self, token_ids): ...
    async def can_read(self, path): ...
    async def begin_weights(self): ...
    async def load_bucket(self, bucket): ...
    async def end_weights(self, n_buckets, version): ...
    async def close(self): ...
"""


def test_an_engine_without_methods_that_it_needs_is_refused_with_all_of_them(tmp_path):
    file = tmp_path / "minimal.py"
    file.write_text(MINIMAL)
    spec = EngineSpec("model")
    assert make_engine(f"{file}:Minimal", spec).spec is spec
    line = f"^{file}:Minimal is not usable as engine: it does not define load_adapter, sleep, wake$"
    with pytest.raises(ConfigError, match=line):
        make_engine(f"{file}:Minimal", EngineSpec("model", sleeps=True, lora_rank=8))


def test_the_empty_methods_of_the_protocol_do_not_count_as_an_engines(tmp_path):
    file = tmp_path / "empty.py"
    lines = [line for line in MINIMAL.splitlines() if "score" not in line and "info" not in line]
    text = "\n".join(lines).replace("class Minimal", "class Minimal(HostedEngine)")
    file.write_text(f"from envgym.engine import HostedEngine\n{text}")
    with pytest.raises(ConfigError, match=r"it does not define info, score$"):
        make_engine(str(file), EngineSpec("model"))
