"""Ranks that share layers (AutoTP) or rows (sequence parallelism) do what one rank does. Real processes, on gloo."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from envgym.errors import ConfigError
from envgym.learner import LearnerConfig, RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime, WorkerHandle
from envgym.workers import zero
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup
from envgym.workers.sequence_parallel import Slices
from tests.weight_files import export_group

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "sliding_window": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)


@pytest.fixture
def with_group(tmp_path, learner, run_group):
    """with_group(body, model, …) -> what the coroutine `body(group)` returns, run on a started group."""

    def run(body, model, *, ranks=1, role="actor", trained=True, head="lm", learner_config=None, **settings):
        settings = WorkersConfig(ranks=ranks, dtype="float32", **{"tokens_per_microbatch": 60, **settings})
        config = {**learner, **(learner_config or {})}

        runtime = InlineRuntime() if ranks == 1 else LocalRuntime(tmp_path / "logs")
        spec = WorkerSpec(role, model, RoleSpec(trained=trained, head=head), config, settings)
        return run_group(runtime, spec, body)

    return run


@pytest.fixture
def take_step(make_rows, normalizers, tmp_path):
    """A body: score, take a step of plain gradient descent, score again, hand out the weights.

    No size divides the lengths of the rows; there are several micro-batches, and more of them on some ranks.
    """
    rows = make_rows(7, longest=21)
    for row in rows:
        row.old_logprobs[2:] = -3.0

    async def body(group):
        initial = await group.forward(rows)
        metrics = await group.accumulate(rows, normalizers(rows)) | await group.step(1.0)
        final = await group.forward(rows[:1])  # fewer rows than ranks
        await export_group(group, tmp_path / "weights")
        return initial + final, metrics, load_file(tmp_path / "weights"), group.info.n_parameters

    return body


@pytest.fixture
def expected_step(with_group, take_step, plain_gradient_descent):
    """one_rank(model, …) -> what `one_step` gives with a single rank."""
    return lambda model, **settings: with_group(take_step, model, deepspeed=plain_gradient_descent, **settings)


def assert_equal(result, expected):
    """What `one_step` gave twice. The weights have moved by the gradient: it is equal to 1e-5."""
    for score, expected_score in zip(result[0], expected[0], strict=True):
        np.testing.assert_allclose(score, expected_score, atol=1e-5, rtol=1e-5)
    assert result[1].keys() == expected[1].keys() >= {"loss", "grad_norm"}
    for name in expected[1].keys() - {"memory/max"}:
        assert result[1][name] == pytest.approx(expected[1][name], rel=1e-4), name
    assert result[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        torch.testing.assert_close(result[2][name], tensor, atol=1e-5, rtol=1e-5)
    assert result[3] == expected[3]


HOW = pytest.mark.parametrize("split", ["tensor_parallel", "sequence_parallel"])


@pytest.mark.parametrize("split", [pytest.param("tensor_parallel", marks=pytest.mark.slow), "sequence_parallel"])
def test_two_ranks_do_what_one_does(with_group, take_step, expected_step, plain_gradient_descent, tied_model, split):
    settings = {"ranks": 2, "deepspeed": plain_gradient_descent, split: 2}
    assert_equal(with_group(take_step, tied_model, **settings), expected_step(tied_model))


@pytest.mark.parametrize("split", ["tensor_parallel", pytest.param("sequence_parallel", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_adam_learns_the_same_and_goes_on_from_its_state_and_what_is_saved_is_whole(
    with_group, make_rows, normalizers, untied_model, tmp_path, split
):
    async def body(group):
        async def steps(*seeds):
            for seed in seeds:
                rows = make_rows(6, seed)
                await group.accumulate(rows, normalizers(rows))
                await group.step(1e-2)
            await export_group(group, tmp_path / "weights")
            return load_file(tmp_path / "weights")

        await steps(0, 1)
        await group.on_all(lambda rank: rank.save_state(str(tmp_path / f"state-{group.settings.ranks}")))
        straight = await steps(2)
        await group.on_all(lambda rank: rank.load_state(str(tmp_path / f"state-{group.settings.ranks}")))
        resumed = await steps(2)
        await group.on_all(lambda rank: rank.save(str(tmp_path / "model")))
        await group.on_all(lambda rank: rank.save_average(str(tmp_path / "average")))
        return straight, resumed, *(load_file(tmp_path / name / "model.safetensors") for name in ("model", "average"))

    averaged = {"learner_config": {"ema_decay": 0.5}}
    expected, _, _, expected_average = with_group(body, untied_model, **averaged)
    straight, resumed, saved, average = with_group(body, untied_model, ranks=2, zero_stage=2, **{split: 2}, **averaged)
    assert straight.keys() == expected.keys() == saved.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(straight[name], tensor, atol=2e-4, rtol=0)  # Adam divides noise by its own size
        torch.testing.assert_close(average[name], expected_average[name], atol=2e-4, rtol=0)
        assert torch.equal(resumed[name], straight[name]), name
        assert torch.equal(saved[name], straight[name]), name


@pytest.mark.slow
@HOW
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_two_ranks_do_what_one_does_with_zero(
    with_group, take_step, expected_step, plain_gradient_descent, untied_model, split, zero_stage
):
    settings = {"ranks": 2, "zero_stage": zero_stage, "deepspeed": plain_gradient_descent, split: 2}
    assert_equal(with_group(take_step, untied_model, **settings), expected_step(untied_model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared",
    [{"tensor_parallel": 2}, {"sequence_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": 2}],
    ids=["tensor and data", "sequence and data", "tensor and sequence"],
)
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_four_ranks_do_what_one_does(
    with_group, take_step, expected_step, plain_gradient_descent, tied_model, shared, zero_stage
):
    settings = {"ranks": 4, "zero_stage": zero_stage, "deepspeed": plain_gradient_descent, **shared}
    assert_equal(with_group(take_step, tied_model, **settings), expected_step(tied_model))


@pytest.mark.slow
@HOW
def test_values_are_learned_alike(with_group, take_step, expected_step, plain_gradient_descent, tied_model, split):
    critic = {"role": "critic", "head": "scalar"}
    settings = {"ranks": 2, "zero_stage": 1, "deepspeed": plain_gradient_descent, split: 2}
    assert_equal(with_group(take_step, tied_model, **settings, **critic), expected_step(tied_model, **critic))


@pytest.mark.slow
@HOW
def test_a_model_that_only_scores_is_shared_too(with_group, make_rows, tied_model, split):
    rows = make_rows(5)

    async def score(group):
        return await group.forward(rows)

    expected = with_group(score, tied_model, role="reference", trained=False)
    scores = with_group(score, tied_model, ranks=2, role="reference", trained=False, **{split: 2})
    for score, expected_score in zip(scores, expected, strict=True):
        np.testing.assert_allclose(score, expected_score, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@HOW
def test_frozen_parameters_stay(with_group, take_step, expected_step, plain_gradient_descent, tied_model, split):
    frozen = {"learner_config": {"freeze": ["q_norm", "layers.0.mlp"]}}
    settings = {"ranks": 2, "zero_stage": 2, "deepspeed": plain_gradient_descent, split: 2}
    assert_equal(with_group(take_step, tied_model, **settings, **frozen), expected_step(tied_model, **frozen))


@pytest.fixture
def make_model(tmp_path):
    """make_model(architecture, **config) -> folder of a small model of that architecture."""

    def make(architecture, **config):
        import transformers

        torch.manual_seed(2)
        config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **config})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / architecture)
        return str(tmp_path / architecture)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "architecture", "config"),
    [
        ("sequence_parallel", "gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("sequence_parallel", "llama", {"num_key_value_heads": 1}),
        ("sequence_parallel", "gpt2", GPT2),
        ("tensor_parallel", "qwen2", {"tie_word_embeddings": True}),
        ("tensor_parallel", "llama", {"vocab_size": VOCABULARY, "intermediate_size": 65}),
    ],
    ids=["windows", "fewer key and value heads", "learned positions", "biases", "sizes that two does not divide"],
)
def test_other_architectures(
    with_group, take_step, expected_step, plain_gradient_descent, make_model, split, architecture, config
):
    model = make_model(architecture, **config)
    settings = {"ranks": 2, "deepspeed": plain_gradient_descent, "gradient_checkpointing": True, split: 2}
    assert_equal(with_group(take_step, model, **settings), expected_step(model))


# -- what needs no processes --------------------------------------------------------------------------------


class Listed(WorkerHandle):
    """A handle that notes what it is asked, and answers with its own number."""

    def __init__(self, rank):
        self.rank = rank
        self.calls = []

    async def close(self):
        pass

    async def send(self, message):
        method, args, _ = message
        self.calls.append((method, args))
        if method == "forward":
            return [np.full(len(row.token_ids), self.rank, np.float32) for row in args[0]]
        return {"loss": (self.rank, 1.0), "memory/max": (self.rank, 1.0)}


def test_ranks_that_share_rows_get_the_same_and_are_counted_once(make_rows):
    rows = make_rows(6)
    handles = [Listed(rank) for rank in range(4)]
    settings = WorkersConfig(ranks=4, sequence_parallel=2, tokens_per_microbatch=10)

    async def main():
        group = WorkerGroup(WorkerSpec("actor", "any", RoleSpec(trained=True), settings=settings), handles)
        group.info = SimpleNamespace(layout_of=lambda samples: "padded")
        return await group.forward(rows), await group.accumulate(rows, {})

    scores, metrics = asyncio.run(main())
    assert {float(score[0]) for score in scores} == {0.0, 2.0}  # each share is answered for by its first rank
    for method in (0, 1):
        first_keys, second_keys = [
            [row.microbatch_key for row in _flat(handles[rank].calls[method][1][0])] for rank in (0, 2)
        ]
        assert first_keys == [row.microbatch_key for row in _flat(handles[1].calls[method][1][0])]
        assert second_keys == [row.microbatch_key for row in _flat(handles[3].calls[method][1][0])]
        assert set(first_keys).isdisjoint(second_keys)
        assert set(first_keys) | set(second_keys) == set(range(6))
    assert metrics == {"loss": 1.0, "memory/max": 3.0}  # of ranks 0 and 2; of all
    longest = max(len(row.token_ids) for row in rows)
    assert all(len(batch) * longest <= 40 for batch in handles[0].calls[1][1][0]), "a slice is half of a row"


def _flat(rows):
    return [row for batch in rows for row in (batch if isinstance(batch, list) else [batch])]


class Exchange:
    """What `all_to_all_single_autograd` does among threads that stand for ranks."""

    def __init__(self, size):
        self.barrier, self.pieces = threading.Barrier(size), [None] * size

    def __call__(self, pieces, output_sizes, input_sizes, group):
        rank = group
        self.barrier.wait(30)
        self.pieces[rank] = pieces
        self.barrier.wait(30)
        return torch.stack([pieces[rank] for pieces in self.pieces])


@pytest.mark.parametrize(("size", "heads", "shared"), [(2, 4, 2), (4, 4, 2), (4, 8, 2), (2, 6, 3), (2, 4, 1)])
def test_heads_are_exchanged_for_slices_and_each_query_meets_its_own_key(size, heads, shared, monkeypatch):
    """`shared` key and value heads, of which some sizes need copies: each is copied beside itself, not in turn."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    length, width = 2 * size, 8
    query, key, value = (torch.randn(1, n, length, width) for n in (heads, shared, shared))
    attention = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    expected, _ = sdpa_attention_forward(attention, query, key, value, None)

    monkeypatch.setattr("envgym.workers.sequence_parallel.all_to_all_single_autograd", Exchange(size))
    config = SimpleNamespace(_attn_implementation="sdpa", model_type="any", get_text_config=lambda: config)
    model = SimpleNamespace(config=config, modules=list)
    functions, mask = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    ranks = []
    for rank in range(size):
        slices = Slices(rank, size, rank)
        monkeypatch.setattr(slices, "_obstacle", lambda *_: "")
        try:
            slices.install(model, heads)
            ranks.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
        finally:
            ALL_ATTENTION_FUNCTIONS.register("sdpa", functions)
            ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", mask)

    def attend(rank):
        part = slice(rank * 2, rank * 2 + 2)
        module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
        return ranks[rank](module, query[:, :, part], key[:, :, part], value[:, :, part], None)[0]

    with ThreadPoolExecutor(size) as pool:
        outputs = list(pool.map(attend, range(size)))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_state_is_given_the_token_that_it_predicts_across_borders(size):
    ids = torch.arange(1, 8)[None]  # seven tokens: no size divides them
    part, ahead = [], []
    for rank in range(size):
        slices = Slices(None, size, rank)
        part += slices.local(ids)[0].tolist()
        ahead += slices.local(ids, ahead=1)[0].tolist()
    padding = len(part) - 7
    assert part == [*range(1, 8), *[0] * padding]
    assert ahead == [*range(2, 8), *[0] * (padding + 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "tensor_parallel": 2}, r"does not divide workers\.ranks=3"),
        ({"ranks": 4, "tensor_parallel": 2, "sequence_parallel": 4}, r"does not divide workers\.ranks=4"),
        ({"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, r"set workers\.tensor_parallel instead"),
        ({"ranks": 2, "sequence_parallel": 2, "packing": True}, "set only one of them"),
        ({"ranks": 2, "sequence_parallel": 2, "attention": "eager"}, r"not workers\.attention=eager"),
        ({"ranks": 2, "tensor_parallel": 2, "zero_stage": 1, "compile": True}, "cannot be combined"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        WorkersConfig(**settings).check("actor", None)
    assert "\n" not in str(caught.value)


def test_muon_needs_whole_matrices():
    with pytest.raises(ConfigError, match=r"set workers\.tensor_parallel=1"):
        WorkersConfig(ranks=2, tensor_parallel=2).check("actor", LearnerConfig(name="any", optimizer="muon"))


def model_of(architecture, **config):
    import transformers

    config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **config})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("architecture", "config", "size", "message"),
    [
        ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4, "does not divide the 6 attention heads"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 2, "dynamic rope"),
        ("llama", {"rope_parameters": LONG_ROPE, "max_position_embeddings": 64}, 2, "longrope rope"),
        (
            "jamba",
            {"num_experts": 1, "num_experts_per_tok": 1, "use_mamba_kernels": False},
            2,
            "by other means than transformers'",
        ),
    ],
)
def test_models_whose_rows_cannot_be_cut_are_refused(architecture, config, size, message):
    slices = Slices(object(), size, 0)
    with pytest.raises(ConfigError, match=message):
        slices.install(model_of(architecture, **config), config.get("num_attention_heads", 4))


def test_a_layer_that_mixes_tokens_without_attention_is_noticed(monkeypatch):
    for interface in (AttentionInterface, AttentionMaskInterface):  # what `install` wraps is the whole process's
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    model = model_of("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8).to_empty(device="cpu")
    slices = Slices(object(), 2, 0)
    slices._exchange = lambda states: states
    slices.install(model, 4)
    with pytest.raises(ConfigError, match="has 1 in 2 layers"):
        slices.outputs(model.base_model, torch.ones(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("architecture", "config", "size", "message"),
    [
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4, "6 attention heads"),
        ("llama", {"num_key_value_heads": 1}, 2, "does not divide the 1 key and value heads"),
        ("gpt2", GPT2, 2, "no plan for it"),
        (
            "qwen3_moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
            2,
            "cannot split layers",
        ),
    ],
)
def test_models_whose_layers_cannot_be_cut_are_refused(architecture, config, size, message):
    with pytest.raises(ConfigError, match=message) as caught:
        zero.check_split(model_of(architecture, **config), size)
    assert "\n" not in str(caught.value)
