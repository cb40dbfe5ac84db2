"""Pre-training text mixed into RL updates: its samples, their order, and the roles that are trained on them."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.config.resolve import resolve
from envgym.config.schema import PretrainConfig
from envgym.engine import SamplingParams
from envgym.env import TaskList
from envgym.errors import ConfigError, DataError
from envgym.learner import LearnerConfig, RoleSpec
from envgym.render import load_tokenizer, make_renderer
from envgym.run_folder import RunFolder
from envgym.training.components import Components
from envgym.training.pretraining import Pretraining
from envgym.training.step import deal_out
from envgym.training.trainer import Trainer
from envgym.types import Objective, Row, Task
from envgym.workers.config import WorkersConfig

DOCUMENTS = [f"the answer is {number}." for number in range(10)]


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return make_renderer("auto", load_tokenizer(str(tiny_model)))


@pytest.fixture
def file(tmp_path):
    """file(rows, name): the path of a JSONL file with these rows."""

    def write(rows, name="text.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def texts(renderer, samples):
    return [renderer.tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]


def steps_of(pretraining, n_steps):
    """The samples of the next training steps."""
    return [asyncio.run(pretraining.next()) for _ in range(n_steps)]


def test_several_sources_are_mixed_by_their_weights(renderer, file):
    first = file([{"text": f"one {n}."} for n in range(5)])
    second = file([{"body": f"two {n}."} for n in range(3)], "other.jsonl")
    sources = {"one": {"path": first, "weight": 3}, "two": {"path": second, "text": "body"}}
    config = PretrainConfig.model_validate({"sources": sources, "rows": 8})
    steps = [texts(renderer, samples) for samples in steps_of(Pretraining(config, renderer, 0), 2)]
    assert [sum(text.startswith("two") for text in step) for step in steps] == [2, 2]
    assert len({text for step in steps for text in step}) == 8  # all are used before one is used again


def test_one_source_or_several(file):
    with pytest.raises(ValueError, match=r"give pretrain\.path, or pretrain\.sources"):
        PretrainConfig.model_validate({"path": "a", "sources": {"b": {"path": "b"}}})


def test_a_sample_has_the_documents_tokens_with_loss_weights_on_all_but_the_first(renderer, file):
    text = "what is 12 + 34?"
    [[sample]] = steps_of(Pretraining(PretrainConfig(path=file([{"text": text}]), rows=1), renderer, 0), 1)
    ids = renderer.tokenizer(text)["input_ids"]
    assert sample.token_ids.tolist() == [*ids, renderer.tokenizer.eos_token_id]
    assert sample.loss_weights.tolist() == [0.0] + [1.0] * len(ids)
    assert sample.objective == Objective.CROSS_ENTROPY
    assert np.isnan(sample.old_logprobs).all()
    assert (sample.loss_weights.dtype, sample.old_logprobs.dtype) == (np.float32, np.float32)
    assert not sample.is_on_policy


def test_a_truncated_document_has_no_end_token(renderer, file):
    config = PretrainConfig(path=file([{"text": DOCUMENTS[0]}]), rows=1, max_tokens=5)
    [[sample]] = steps_of(Pretraining(config, renderer, 0), 1)
    assert sample.token_ids.tolist() == renderer.tokenizer(DOCUMENTS[0])["input_ids"][:5]


def test_microbatch_keys_and_episodes_differ_from_those_of_other_samples(renderer, file):
    path = file([{"text": text} for text in DOCUMENTS])
    [samples] = steps_of(Pretraining(PretrainConfig(path=path, rows=4), renderer, 0), 1)
    assert [sample.microbatch_key for sample in samples] == [-1, -2, -3, -4]
    assert [sample.episode_index for sample in samples] == [-1, -2, -3, -4]


def test_each_pass_has_every_document_once_in_an_order_by_the_seed(renderer, file):
    path = file([{"text": text} for text in DOCUMENTS])

    def orders(seed):
        steps = steps_of(Pretraining(PretrainConfig(path=path, rows=5), renderer, seed), 4)
        order = texts(renderer, [sample for step in steps for sample in step])
        return order[:10], order[10:]

    first, second = orders(0)
    assert sorted(first) == sorted(second) == DOCUMENTS
    assert len({tuple(first), tuple(second), tuple(orders(1)[0]), tuple(DOCUMENTS)}) == 4
    assert orders(0) == (first, second)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_run_continues_with_the_next_document(through_a_checkpoint, renderer, file, stop):
    config = PretrainConfig(path=file([{"text": text} for text in DOCUMENTS]), rows=3)
    uninterrupted = [texts(renderer, samples) for samples in steps_of(Pretraining(config, renderer, 0), 6)]
    killed = Pretraining(config, renderer, 0)
    steps_of(killed, stop)
    state = through_a_checkpoint(killed.cursor.state())
    steps_of(killed, 1)
    resumed = Pretraining(config, renderer, 0)
    resumed.cursor.load_state(state)
    assert [texts(renderer, samples) for samples in steps_of(resumed, 6 - stop)] == uninterrupted[stop:]


def test_a_text_file_has_one_document_per_line(renderer, tmp_path):
    (tmp_path / "text.txt").write_text("\ufeffthe first\n\nthe second\r\n", encoding="utf-8")
    [samples] = steps_of(Pretraining(PretrainConfig(path=str(tmp_path / "text.txt"), rows=2), renderer, 0), 1)
    assert sorted(texts(renderer, samples)) == ["the first", "the second"]


def test_a_parquet_folder_and_another_field(renderer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "corpus").mkdir()
    for part in range(2):
        table = pa.table({"content": DOCUMENTS[part * 5 : part * 5 + 5]})
        pq.write_table(table, tmp_path / "corpus" / f"part-{part}.parquet")
    config = PretrainConfig(path=str(tmp_path / "corpus"), text="content", rows=10)
    [samples] = steps_of(Pretraining(config, renderer, 0), 1)
    assert sorted(texts(renderer, samples)) == DOCUMENTS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"txt": "a"}], r"text.jsonl:1: the row has no field 'text', only txt: .*pretrain.text=FIELD. Did you mean"),
        ([{"text": " "}], r"text.jsonl:1: field 'text' holds no text"),
        ([{"text": ["a"]}], r"text.jsonl:1: field 'text' holds no text"),
    ],
)
def test_the_error_of_a_bad_file_names_the_line(renderer, file, rows, message):
    with pytest.raises(DataError, match=message):
        steps_of(Pretraining(PretrainConfig(path=file(rows)), renderer, 0), 1)


def test_bytes_that_are_not_text(renderer, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(DataError, match=r"text.txt:2: not UTF-8 text"):
        steps_of(Pretraining(PretrainConfig(path=str(tmp_path / "text.txt"), rows=2), renderer, 0), 1)


@given(st.integers(0, 20), st.integers(1, 8))
def test_samples_are_dealt_out_evenly(count, n_steps):
    ids = np.zeros(1, np.int64)
    samples = [
        Row.from_arrays(ids, ids, ids, Objective.CROSS_ENTROPY, microbatch_key=number) for number in range(count)
    ]
    steps = deal_out(samples, n_steps)
    assert len(steps) == n_steps
    assert sorted(sample.microbatch_key for step in steps for sample in step) == list(range(count))
    assert max(map(len, steps)) - min(map(len, steps)) <= 1


# -- settings ---------------------------------------------------------------------------------------------


def config_of(learner, **pretrain):
    return resolve({"env": "math_verify", "learner": learner, "pretrain": pretrain})


def test_a_learner_that_gives_text_no_weight_is_an_error(file):
    path = file([{"text": "a"}])
    assert config_of("grpo", path=path).stages[0].pretrain.path == path
    for learner in ("sft", {"name": "grpo", "pretrain_coef": 0.0}):
        with pytest.raises(ConfigError, match=r"learner (sft|grpo) would give no weight: .* pretrain_coef above 0"):
            config_of(learner, path=path)


def test_a_missing_file_is_reported_before_anything_starts():
    with pytest.raises(DataError, match=r"there is no file nowhere\.jsonl"):
        config_of("grpo", path="nowhere.jsonl")


# -- in the loop ------------------------------------------------------------------------------------------


class Worker:
    """Records the objectives and normalizers of each optimizer step."""

    info, settings = SimpleNamespace(flops=lambda samples: 0.0, peak_flops=None), WorkersConfig()

    def __init__(self):
        self.steps = []

    async def forward(self, samples):
        return [np.zeros(len(sample), np.float32) for sample in samples]

    async def accumulate(self, samples, normalizers):
        self.steps.append(([sample.objective for sample in samples], normalizers))
        return {"loss": float(len(self.steps))}

    async def accumulated_outputs(self):
        return []

    async def step(self, lr):
        return {"grad_norm": 1.0}


def sample_of(key):
    weights = np.array([0, 1, 1], np.float32)
    return Row.from_arrays(np.arange(3), weights, -weights, Objective.POLICY_GRADIENT, microbatch_key=key)


def test_only_the_policy_is_trained_on_text_which_is_dealt_out_to_the_optimizer_steps(renderer, file, tmp_path):
    """Four samples and three documents in two mini-batches, for two epochs; the critic never gets a document."""
    run = resolve({"env": "math_verify", "learner": "grpo"})
    config = PretrainConfig(path=file([{"text": text} for text in DOCUMENTS]), rows=3)
    learner = SimpleNamespace(
        needs_policy_samples=False,
        min_group_size=2,
        roles={"actor": RoleSpec(trained=True), "critic": RoleSpec(trained=True)},
        config=LearnerConfig(name="any", minibatches=2, update_epochs=2),
        prepare=lambda groups: [sample_of(key) for key in range(4)],
        metrics=lambda samples: {"rows": len(samples)},
        loss_normalizers=lambda samples: {name: len(samples) for name in {sample.objective for sample in samples}},
        end_step=lambda rows: None,
        state_dict=dict,
    )
    spec = SimpleNamespace(tasks=lambda split: TaskList([Task("t")]))
    runner = SimpleNamespace(spec=spec, agent=SimpleNamespace(uses_policy=True), envs_without_scores=set())
    workers = {"actor": Worker(), "critic": Worker()}
    pretraining = Pretraining(config, renderer, 0)
    components = Components(learner, runner, workers, SamplingParams(max_tokens=4), pretraining=pretraining)
    trainer = Trainer(run, run.stages[0], components, RunFolder(tmp_path), None)
    asyncio.run(trainer.update.learn([]))
    policy, text = Objective.POLICY_GRADIENT, Objective.CROSS_ENTROPY
    assert [kinds for kinds, _ in workers["actor"].steps] == [[policy] * 2 + [text] * n for n in (2, 1, 2, 1)]
    assert [kinds for kinds, _ in workers["critic"].steps] == [[policy] * 2] * 4
    assert workers["critic"].steps[0][1] == workers["actor"].steps[0][1] == {policy: 4, text: 4}
    record = trainer.progress.record
    assert record["rows"] == 4  # the learner's metrics cover the rollout only
    assert (record["loss"], record["critic/loss"]) == (2.5, 2.5)
    [documents] = steps_of(Pretraining(config, renderer, 0), 1)
    n_text = 2 * sum(len(sample.token_ids) - 1 for sample in documents)
    assert record["tokens/pretrain"] == n_text
    assert record["tokens/trained"] == trainer.progress.tokens["trained"] == 2 * 8 + n_text
    assert record["tokens/processed"] == 2 * (12 + 3) + n_text
    assert trainer.checkpoints.state()["pretraining"] == pretraining.cursor.state()
