"""The transcript of an episode: token budgets, its context, and its rows."""

import asyncio
from array import array

import pytest

from envgym.engine import Generation, SamplingParams
from envgym.transcript import EpisodeSampler, Transcript
from envgym.types import ImagePart, ImageSpan, Outcome, PlacedImage, StopReason, Task


class Engine:
    """Samples as many tokens as it may, at most `max_tokens`, and records limits and contexts."""

    def __init__(self, max_tokens=99):
        self.max_tokens = max_tokens
        self.limits = []
        self.contexts = []
        self.images = []

    async def generate(self, request):
        limit = request.sampling.max_tokens
        self.limits.append(limit)
        self.contexts.append(request.token_ids.tolist())
        self.images.append(request.images)
        await asyncio.sleep(0)  # so that other requests run meanwhile
        n = min(limit, self.max_tokens)
        return Generation((7,) * n, (-1.0,) * n, StopReason.STOP if n < limit else StopReason.LENGTH, ())


def sampler_of(engine, max_tokens=None):
    sampler = EpisodeSampler(engine, "e", SamplingParams(max_tokens=4, temperature=0.8), max_model_len=64)
    sampler.limit(max_tokens)
    return sampler


def sample(transcript, overrides=None):
    return asyncio.run(transcript.sample(overrides))


def transcript_of(engine, **settings):
    transcript = Transcript(sampler_of(engine, **settings))
    transcript.start_row([1, 2])
    return transcript


def test_a_turns_override_holds_within_the_budget():
    engine = Engine(max_tokens=1)
    transcript = transcript_of(engine, max_tokens=10)
    for limit in (3, 20, 20):
        sample(transcript, {"max_tokens": limit})
    assert engine.limits == [3, 9, 8]


def test_concurrent_requests_share_the_budget_and_return_unused_tokens():
    engine = Engine(max_tokens=3)
    sampler = sampler_of(engine, max_tokens=9)

    async def sample_concurrently():
        return await asyncio.gather(*(sampler.generate(array("i", [1])) for _ in range(4)), return_exceptions=True)

    *answers, last = asyncio.run(sample_concurrently())
    assert engine.limits == [4, 4, 3]  # the third waits for the others, which leave 9 - 3 - 3
    assert [len(answer.token_ids) for answer in answers] == [3, 3, 3]
    assert last.reason == "tokens"


def test_the_context_is_one_array_that_grows():
    engine = Engine(max_tokens=2)
    transcript = transcript_of(engine)
    sample(transcript)
    transcript.add_feedback([5])
    sample(transcript)
    assert engine.contexts == [[1, 2], [1, 2, 7, 7, 5]]
    assert transcript.context == array("i", transcript.rows[0].token_ids) == array("i", [1, 2, 7, 7, 5, 7, 7])
    transcript.start_row([9])
    assert transcript.context == array("i", [9])
    assert transcript.rows[1].segments[0].token_ids is not transcript.context


def test_a_row_without_sampled_tokens_is_not_part_of_the_episode():
    transcript = transcript_of(Engine(max_tokens=1))
    sample(transcript)
    transcript.add_reward(0.5, {})
    transcript.add_feedback([3])
    transcript.start_row([1, 2, 3])  # a new context, without a completion
    episode = transcript.episode(Task("t"), Outcome.finish())
    assert [[segment.role for segment in row.segments] for row in episode.rows] == [["prompt", "action"]]
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.finish(), "length"),
        (Outcome.truncate("turns"), "length"),
        (Outcome.truncate("context"), "context"),
    ],
)
def test_a_truncated_completion_is_the_reason_unless_the_episode_has_another(outcome, reason):
    transcript = transcript_of(Engine())
    sample(transcript)
    assert transcript.episode(Task("t"), outcome).outcome.reason == reason


def test_images_are_where_their_tokens_are_in_requests_and_in_rows():
    """A new row begins with the images of its own prompt alone."""
    engine = Engine(max_tokens=1)
    transcript = Transcript(sampler_of(engine))
    first, second = (ImagePart(letter * 64, 8, 8, "image/png") for letter in "ab")
    transcript.start_row([1, 5, 5, 2], [PlacedImage(first, 1, 2)])
    sample(transcript)
    transcript.add_feedback([5, 3], [PlacedImage(second, 0, 1)])
    sample(transcript)
    transcript.start_row([4, 5, 5], [PlacedImage(first, 1, 2)])
    sample(transcript)
    assert engine.contexts == [[1, 5, 5, 2], [1, 5, 5, 2, 7, 5, 3], [4, 5, 5]]
    both = (PlacedImage(first, 1, 2), PlacedImage(second, 5, 1))
    assert engine.images == [both[:1], both, both[:1]]
    episode = transcript.episode(Task("t"), Outcome.finish())
    assert [row.images for row in episode.rows] == [
        tuple(image.span for image in images) for images in engine.images[1:]
    ]
    assert [segment.images for segment in episode.rows[0].segments] == [
        (ImageSpan("a" * 64, 1, 2),), (), (ImageSpan("b" * 64, 0, 1),), ()
    ]  # fmt: skip
    assert [list(segment.loss_weights) for segment in episode.rows[0].segments[::2]] == [[0.0] * 4, [0.0] * 2]


def test_a_sampler_of_text_alone_is_given_no_images():
    class Sampler:
        record = None
        sampling = SamplingParams(4)

        async def generate(self, token_ids, overrides=None):
            return Generation((7,), (-1.0,), StopReason.STOP, ())

    transcript = Transcript(Sampler())
    transcript.start_row([1, 2])
    assert list(sample(transcript).token_ids) == [7]
