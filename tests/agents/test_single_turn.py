"""The single-turn agent: how a turn ends, what it is worth, and what is written down."""

import asyncio
from dataclasses import replace

import pytest

from envgym import Env, EnvSpec
from envgym.agents.token_level import SingleTurn
from envgym.engine import Generation, SamplingParams
from envgym.render import load_tokenizer, make_renderer
from envgym.transcript import EpisodeSampler
from envgym.types import Message, Observation, Status, StopReason, Task, VersionSpan


def said(renderer, text):
    """The tokens of a policy's whole turn."""
    dialogue = renderer.dialogue()
    dialogue.start(Observation(messages=(Message("user", "?"),)))
    return dialogue.add_demonstration(text)


def play(tiny_model, result=("", 1.0, True, False, {}), observation=None, stop=StopReason.STOP):
    """One episode; returns it and the requests that the engine saw."""
    renderer = make_renderer("auto", load_tokenizer(str(tiny_model)))
    answer = (*said(renderer, "the answer is 46"),)
    requests = []

    class Asks(Env):
        async def reset(self, *, seed=None, options=None):
            return observation or [Message("user", "12 + 34?")], {}

        async def step(self, action):
            assert (action.text, tuple(action.token_ids), action.stop_reason) == ("the answer is 46", answer, stop)
            return result

    class Engine:
        async def generate(self, request):
            requests.append(replace(request, token_ids=request.token_ids[:]))  # the context grows
            return Generation(answer, (-0.5,) * len(answer), stop, (VersionSpan(3, 0, len(answer)),))

    async def main():
        sampler = EpisodeSampler(Engine(), "e", SamplingParams(max_tokens=9, temperature=0.8), 512)
        env = EnvSpec("Asks-v0", Asks).make()
        return await SingleTurn(renderer, SingleTurn.Config()).run(env, Task("t"), sampler, seed=0)

    return asyncio.run(main()), requests


def test_an_answered_question(tiny_model):
    episode, [request] = play(tiny_model, ("", 0.5, True, False, {"metrics": {"boxed": 1}}))
    [row] = episode.rows
    assert episode.outcome.status is Status.COMPLETED
    assert (episode.reward, episode.score, episode.metrics) == (0.5, 0.5, {"boxed": 1.0})
    assert [message.text for message in episode.messages] == ["12 + 34?", "the answer is 46"]
    assert row.token_ids[: len(request.token_ids)].tolist() == list(request.token_ids)
    assert row.segments[1].versions == (VersionSpan(3, 0, len(row.segments[1].token_ids)),)
    assert row.segments[1].temperature == 0.8


@pytest.mark.parametrize(
    ("stop", "terminated", "status", "reason"),
    [
        (StopReason.STOP, True, Status.COMPLETED, ""),
        (StopReason.LENGTH, True, Status.TRUNCATED, "length"),
        (StopReason.STOP, False, Status.TRUNCATED, "turns"),  # the environment would go on
    ],
)
def test_how_it_ended(tiny_model, stop, terminated, status, reason):
    episode, _ = play(tiny_model, ("more?", 0.0, terminated, False, {}), stop=stop)
    assert (episode.outcome.status, episode.outcome.reason) == (status, reason)
    assert episode.rows[0].turns[0].stop_reason is stop


@pytest.mark.parametrize(
    ("reward", "info", "score"),
    [(0.25, {}, 0.25), (3.0, {}, None), (-1.0, {}, None), (None, {}, None), (3.0, {"score": 1}, 1.0)],
)
def test_score_is_the_environments_or_a_reward_between_0_and_1(tiny_model, reward, info, score):
    episode, _ = play(tiny_model, ("", reward, True, False, info))
    assert (episode.reward, episode.score) == (reward, score)
