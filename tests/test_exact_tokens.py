"""An episode holds exactly the tokens the engine returned, with two real byte-pair vocabularies.

The policy has random weights, so that it samples what no tokenizer would ever write: text in pieces that encoding
would merge, halves of characters. Whoever decoded an answer and encoded it again would train on other tokens.
"""

import asyncio

import pytest
import torch

from envgym import Env, EnvSpec
from envgym.agent import AgentConfig
from envgym.agents.single_turn import SingleTurn
from envgym.config import RolloutConfig
from envgym.engines import TARGETS
from envgym.engines.base import SamplingParams
from envgym.engines.client import EngineClient
from envgym.learner import LearnRow
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout import Play, Runner
from envgym.types import Message, StopReason, Task
from envgym.workers.local import LocalRuntime

N_EPISODES = 32


class Echo(Env):
    """Asks a question and remembers the action as it came."""

    actions = []  # noqa: RUF012 - emptied by each test

    async def reset(self, *, seed=None, options=None):
        return [Message.of("user", options["task"].prompt)], {}

    async def step(self, action):
        self.actions.append(action)
        return [], 1.0, True, False, {}


class Recording:
    """An engine that remembers what it was asked and what it answered."""

    def __init__(self, engine):
        self.engine = engine
        self.answers = {}

    async def generate(self, request):
        generation = await self.engine.generate(request)
        self.answers[request.id] = (request.token_ids, generation)
        return generation


def policy_folder(folder, tokenizer):
    """A tiny model with random weights over the whole of a tokenizer's vocabulary, beside the tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def play(kind, folder, logs):
    """Episodes of a policy, and what its engine was asked and answered."""
    renderer = make_renderer("auto", load_tokenizer(str(folder)))
    runtime = LocalRuntime(logs)
    try:
        engine = Recording(
            await EngineClient.start(
                runtime, TARGETS[kind], {"model": str(folder), "max_model_len": 128}, {"OMP_NUM_THREADS": "1"}
            )
        )
        runner = Runner(
            EnvSpec("Echo-v0", Echo),
            SingleTurn(renderer, AgentConfig()),
            engine,
            RolloutConfig(retries=0),
            max_model_len=128,
            seed=0,
            deterministic=False,
        )
        sampling = SamplingParams(max_tokens=24, stop_token_ids=renderer.stop_token_ids)
        task = Task("t", prompt="What is 12 + 34, naïvely?")
        [group] = await runner.play([task], Play("exact", sampling, N_EPISODES))
    finally:
        await runtime.close()
    return renderer, group.episodes, engine.answers


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocabulary", ["tekken", "sentencepiece"])
def test_an_episode_is_what_the_engine_saw_and_said(kind, vocabulary, request, tmp_path):
    tokenizer = load_tokenizer(str(request.getfixturevalue(f"{vocabulary}_folder")))
    Echo.actions.clear()
    folder = policy_folder(tmp_path / "policy", tokenizer)
    renderer, episodes, answers = asyncio.run(play(kind, folder, tmp_path / "logs"))
    assert len(episodes) == len(answers) == N_EPISODES

    rewritten = 0
    for episode in episodes:
        [row] = episode.rows
        prompt, action = row.segments
        asked, said = answers[f"{episode.id}.0000"]
        # What the engine saw, then exactly what it returned.
        assert tuple(prompt.token_ids) == asked
        assert tuple(action.token_ids) == said.token_ids
        assert tuple(row.token_ids) == asked + said.token_ids
        assert tuple(action.logprobs) == said.logprobs
        assert action.versions == said.versions
        # Weight on the action alone, also in what the learner is given.
        assert (prompt.role, action.role) == ("prompt", "action")
        assert row.weights == [0.0] * len(asked) + [1.0] * len(said.token_ids)
        learned = LearnRow.of(row)
        assert learned.token_ids.tolist() == row.token_ids
        assert learned.weights.tolist() == row.weights
        assert [turn.stop_reason for turn in row.turns] == [said.stop_reason]
        body = list(said.token_ids[:-1] if said.stop_reason is StopReason.STOP else said.token_ids)
        rewritten += renderer.answer(renderer.text(said.token_ids))[:-1] != body
    assert {action.token_ids for action in Echo.actions} == {said.token_ids for _, said in answers.values()}
    # The test has teeth: for many of these, encoding the decoded text gives other ids.
    assert rewritten > N_EPISODES / 2
