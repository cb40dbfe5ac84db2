"""An episode holds exactly the tokens the engine returned, with two real byte-pair vocabularies.

The policy has random weights, so that it samples tokens that no tokenizer would write: pieces that encoding would
merge, halves of characters. Decoding a completion and encoding it again would train on other tokens.
"""

import asyncio

import pytest
import torch

from envgym import Env, EnvSpec
from envgym.agents.token_level import MultiTurn, MultiTurnConfig
from envgym.engine import SamplingParams
from envgym.engines import choose_engine
from envgym.engines.pool import EngineClient
from envgym.engines.spec import EngineSpec
from envgym.processes.local import LocalRuntime
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Message, Task

N_EPISODES = 32


class Echo(Env):
    """Asks three questions and records the actions."""

    actions = []  # noqa: RUF012 - emptied by each test

    async def reset(self, *, seed=None, options=None):
        self.n_asked = 1
        return [Message("user", options["task"].prompt)], {}

    async def step(self, action):
        self.actions.append(action)
        self.n_asked += 1
        return [Message("user", f"Ça va, {self.n_asked}?")], 1.0, self.n_asked > 3, False, {}


def policy_folder(folder, tokenizer):
    """Save a tiny model with random weights over a tokenizer's whole vocabulary, and the tokenizer."""
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


async def roll_out(kind, folder, logs, recording):
    """The renderer and episodes of a policy, and the requests and answers of its engine."""
    renderer = make_renderer("auto", load_tokenizer(str(folder)))
    runtime = LocalRuntime(logs)
    arguments = {"spec": EngineSpec(str(folder), max_model_len=256)}
    try:
        engine = recording(
            EngineClient(
                await runtime.start(choose_engine(kind)[0], arguments, name="engine", environ={"OMP_NUM_THREADS": "1"})
            )
        )
        runner = Runner(
            EnvSpec("Echo-v0", Echo),
            MultiTurn(renderer, MultiTurnConfig()),
            engine,
            RolloutConfig(retries=0),
            max_model_len=256,
            seed=0,
            deterministic=False,
        )
        sampling = SamplingParams(max_tokens=24, stop_token_ids=renderer.stop_token_ids)
        task = Task("t", prompt="What is 12 + 34, naïvely?")
        [group] = await runner.roll_out([task], SamplingPlan("exact", sampling, N_EPISODES))
    finally:
        await runtime.close()
    return renderer, group.episodes, engine.answers


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocabulary", [pytest.param("tekken", marks=pytest.mark.slow), "sentencepiece"])
def test_an_episode_has_exactly_the_engines_tokens(kind, vocabulary, request, tmp_path, recording, check_episode):
    tokenizer = load_tokenizer(str(request.getfixturevalue(f"{vocabulary}_folder")))
    Echo.actions.clear()
    folder = policy_folder(tmp_path / "policy", tokenizer)
    renderer, episodes, answers = asyncio.run(roll_out(kind, folder, tmp_path / "logs", recording))
    assert (len(episodes), len(answers)) == (N_EPISODES, 3 * N_EPISODES)

    rewritten = 0
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, answers)
        assert [turn.reward for row in episode.rows for turn in row.turns] == [1.0, 1.0, 1.0]
        actions = [segment.token_ids for row in episode.rows for segment in row.segments if segment.role == "action"]
        for token_ids in actions:
            body = token_ids[:-1] if token_ids[-1] in renderer.stop_token_ids else token_ids
            rewritten += renderer.tokenizer.encode(renderer.text(body), add_special_tokens=False) != list(body)
    assert sorted(tuple(action.token_ids) for action in Echo.actions) == sorted(
        tuple(generation.token_ids) for _, generation in answers.values()
    )
    # The test is not trivial: for many actions, encoding the decoded text gives other ids.
    assert rewritten > N_EPISODES
