"""What an agent asks the engine for, turn by turn, and what becomes of the rows it records."""

import asyncio

import pytest

from envgym.engine import Generation, SamplingParams
from envgym.rollout.transcript import OutOfBudget, Transcript
from envgym.types import Outcome, StopReason, Task


class Sampler:
    """Says as many tokens as it may, at most `says`, and keeps what it was asked for."""

    sampling = SamplingParams(max_tokens=4, temperature=0.8)
    max_model_len = 64

    def __init__(self, says=99):
        self.says = says
        self.asked = []

    async def generate(self, token_ids, overrides=None):
        limit = (overrides or {}).get("max_tokens", self.sampling.max_tokens)
        self.asked.append(limit)
        n = min(limit, self.says)
        return Generation((7,) * n, (-1.0,) * n, StopReason.STOP if n < limit else StopReason.LENGTH, ())


def sample(transcript, overrides=None):
    return asyncio.run(transcript.sample(overrides))


def begun(sampler, **settings):
    transcript = Transcript(sampler, **settings)
    transcript.begin([1, 2])
    return transcript


def test_an_episodes_budget_lets_a_turn_have_no_more_than_a_turn_may():
    sampler = Sampler()
    transcript = begun(sampler, max_tokens=10)
    for _ in range(3):
        sample(transcript)
    assert sampler.asked == [4, 4, 2]
    with pytest.raises(OutOfBudget) as over:
        sample(transcript)
    assert over.value.reason == "tokens"


def test_a_turns_own_limit_holds_within_the_budget():
    sampler = Sampler(says=1)
    transcript = begun(sampler, max_tokens=10)
    for limit in (3, 20, 20):
        sample(transcript, {"max_tokens": limit})
    assert sampler.asked == [3, 9, 8]


def test_a_row_that_nothing_was_sampled_in_is_no_part_of_the_episode():
    transcript = begun(Sampler(says=1))
    sample(transcript)
    transcript.add_reward(0.5, {})
    transcript.feedback([3])
    transcript.begin([1, 2, 3])  # a context that was begun anew, and never answered
    episode = transcript.episode(Task("t"), Outcome.completed())
    assert [[segment.role for segment in row.segments] for row in episode.rows] == [["prompt", "action"]]
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.completed(), "length"),
        (Outcome.truncated("turns"), "length"),
        (Outcome.truncated("context"), "context"),
    ],
)
def test_an_answer_that_was_cut_is_what_ended_the_episode_unless_something_else_did(outcome, reason):
    transcript = begun(Sampler())
    sample(transcript)
    assert transcript.episode(Task("t"), outcome).outcome.reason == reason
