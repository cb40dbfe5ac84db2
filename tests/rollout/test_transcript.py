"""What an agent asks the engine for, turn by turn, and what becomes of the rows it records."""

import asyncio
from array import array

import pytest

from envgym.agent import OutOfBudget
from envgym.engine import Generation, SamplingParams
from envgym.errors import PromptTooLong
from envgym.rollout.sampler import EpisodeSampler
from envgym.rollout.transcript import Transcript
from envgym.types import Outcome, StopReason, Task


class Engine:
    """Says as many tokens as it may, at most `says`, and keeps what it was asked for."""

    def __init__(self, says=99):
        self.says = says
        self.asked = []
        self.contexts = []

    async def generate(self, request):
        limit = request.sampling.max_tokens
        self.asked.append(limit)
        self.contexts.append(request.token_ids.tolist())
        await asyncio.sleep(0)  # as an engine, so that others ask meanwhile
        n = min(limit, self.says)
        return Generation((7,) * n, (-1.0,) * n, StopReason.STOP if n < limit else StopReason.LENGTH, ())


def sampler_of(engine, max_tokens=None):
    sampler = EpisodeSampler(engine, "e", SamplingParams(max_tokens=4, temperature=0.8), max_model_len=64)
    sampler.limit(max_tokens)
    return sampler


def sample(transcript, overrides=None):
    return asyncio.run(transcript.sample(overrides))


def begun(engine, **settings):
    transcript = Transcript(sampler_of(engine, **settings))
    transcript.start_row([1, 2])
    return transcript


def test_an_episodes_budget_lets_a_turn_have_no_more_than_a_turn_may():
    engine = Engine()
    transcript = begun(engine, max_tokens=10)
    for _ in range(3):
        sample(transcript)
    assert engine.asked == [4, 4, 2]
    with pytest.raises(OutOfBudget) as over:
        sample(transcript)
    assert over.value.reason == "tokens"


def test_a_turns_own_limit_holds_within_the_budget():
    engine = Engine(says=1)
    transcript = begun(engine, max_tokens=10)
    for limit in (3, 20, 20):
        sample(transcript, {"max_tokens": limit})
    assert engine.asked == [3, 9, 8]


def test_requests_in_parallel_share_the_budget_and_give_back_what_they_did_not_sample():
    engine = Engine(says=3)
    sampler = sampler_of(engine, max_tokens=9)

    async def together():
        return await asyncio.gather(*(sampler.generate(array("i", [1])) for _ in range(4)), return_exceptions=True)

    *answers, last = asyncio.run(together())
    assert engine.asked == [4, 4, 3]  # the third waits for what the others leave: 9 - 3 - 3
    assert [len(answer.token_ids) for answer in answers] == [3, 3, 3]
    assert last.reason == "tokens"


def test_the_context_is_one_array_that_grows_by_what_is_recorded():
    engine = Engine(says=2)
    transcript = begun(engine)
    sample(transcript)
    transcript.add_feedback([5])
    sample(transcript)
    assert engine.contexts == [[1, 2], [1, 2, 7, 7, 5]]
    assert transcript.context == transcript.rows[0].token_ids == array("i", [1, 2, 7, 7, 5, 7, 7])
    transcript.start_row([9])
    assert transcript.context == array("i", [9])
    assert transcript.rows[1].segments[0].token_ids is not transcript.context


def test_a_context_without_room_ends_the_episode_and_a_first_prompt_without_room_fails_it():
    transcript = Transcript(sampler_of(Engine()))
    transcript.start_row(range(64))
    with pytest.raises(PromptTooLong):
        sample(transcript)
    transcript.start_row(range(60))
    sample(transcript)
    with pytest.raises(PromptTooLong):  # of the first row nothing was sampled
        sample(transcript)
    transcript = begun(Engine())
    sample(transcript)
    transcript.add_feedback(range(60))
    with pytest.raises(OutOfBudget) as over:
        sample(transcript)
    assert over.value.reason == "context"


def test_a_row_that_nothing_was_sampled_in_is_no_part_of_the_episode():
    transcript = begun(Engine(says=1))
    sample(transcript)
    transcript.add_reward(0.5, {})
    transcript.add_feedback([3])
    transcript.start_row([1, 2, 3])  # a context that was begun anew, and never answered
    episode = transcript.episode(Task("t"), Outcome.complete())
    assert [[segment.role for segment in row.segments] for row in episode.rows] == [["prompt", "action"]]
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.complete(), "length"),
        (Outcome.truncate("turns"), "length"),
        (Outcome.truncate("context"), "context"),
    ],
)
def test_an_answer_that_was_cut_is_what_ended_the_episode_unless_something_else_did(outcome, reason):
    transcript = begun(Engine())
    sample(transcript)
    assert transcript.episode(Task("t"), outcome).outcome.reason == reason
