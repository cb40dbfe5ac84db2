"""Batches of requests in lockstep, and the sampler of one episode."""

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.agent import OutOfBudget
from envgym.engine import ChatEngine, Generation, Request, SamplingParams
from envgym.errors import ConfigError, InvalidStep, PromptTooLong, WorkerDied
from envgym.hashing import derived_seed
from envgym.transcript import EpisodeSampler, LockstepBatcher
from envgym.types import StopReason

SAMPLING = SamplingParams(max_tokens=8)


class RecordingEngine:
    """Answers with one token. `batches` holds the ids of the requests that arrived together, in order."""

    def __init__(self):
        self.batches = []
        self.requests = []
        self._open = False

    async def generate(self, request):
        self.requests.append(request)
        if not self._open:
            self.batches.append([])
            self._open = True
        self.batches[-1].append(request.id)
        await asyncio.sleep(0)
        self._open = False
        return Generation((7,), (-1.0,), StopReason.STOP, ())


def run_episodes(turns, concurrency):
    """Run episodes with these numbers of requests, at most `concurrency` concurrently; returns the batches."""
    engine = RecordingEngine()

    async def episode(index, n_turns, batcher, slots):
        async with slots:
            try:
                for turn in range(n_turns):
                    for _ in range(index % 3):  # episodes send their requests at different times
                        await asyncio.sleep(0)
                    await batcher.generate(Request(f"{index:03d}.{turn:04d}", (1,), SAMPLING))
            finally:
                batcher.leave()

    async def main():
        batcher, slots = LockstepBatcher(engine, len(turns), concurrency), asyncio.Semaphore(concurrency)
        await asyncio.gather(*(episode(i, n, batcher, slots) for i, n in enumerate(turns)))

    asyncio.run(asyncio.wait_for(main(), 60))
    return engine.batches


def test_a_batch_is_complete_and_sorted():
    assert run_episodes([2, 2, 2], concurrency=3) == [
        ["000.0000", "001.0000", "002.0000"],
        ["000.0001", "001.0001", "002.0001"],
    ]


def test_fewer_slots_than_episodes():
    assert run_episodes([1, 1, 1, 1, 1], concurrency=2) == [
        ["000.0000", "001.0000"],
        ["002.0000", "003.0000"],
        ["004.0000"],
    ]


def test_an_episode_that_ends_early_is_not_waited_for():
    assert run_episodes([1, 3, 0, 2], concurrency=4) == [
        ["000.0000", "001.0000", "003.0000"],
        ["001.0001", "003.0001"],
        ["001.0002"],
    ]


def test_an_episode_that_ends_early_leaves_its_slot_to_the_next():
    """The batch also waits for the new episode: two run concurrently as long as two are left."""
    assert run_episodes([1, 2, 1], concurrency=2) == [["000.0000", "001.0000"], ["001.0001", "002.0000"]]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 12))
def test_every_batch_is_sorted_and_complete_and_no_request_is_lost(turns, concurrency):
    batches = run_episodes(turns, concurrency)
    assert all(batch == sorted(batch) for batch in batches)
    assert all(len(batch) <= concurrency for batch in batches)
    ids = [id for batch in batches for id in batch]
    assert sorted(ids) == [f"{i:03d}.{turn:04d}" for i, n in enumerate(turns) for turn in range(n)]
    if concurrency >= len(turns):  # all start together: each batch has the next turn of every episode
        assert batches == [
            [f"{i:03d}.{turn:04d}" for i, n in enumerate(turns) if n > turn] for turn in range(max(turns))
        ]


def test_a_cancelled_request_neither_completes_a_batch_nor_is_sampled():
    """An episode is retried after a deadline while it waits: one request of it is sampled, once."""
    engine = RecordingEngine()

    async def main():
        batcher = LockstepBatcher(engine, episodes=2, concurrency=2)
        cancelled = asyncio.create_task(batcher.generate(Request("a.0", (1,), SAMPLING)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        retry = asyncio.create_task(batcher.generate(Request("a.1", (1,), SAMPLING)))
        await asyncio.sleep(0)
        assert engine.batches == []
        await asyncio.gather(retry, batcher.generate(Request("b.0", (1,), SAMPLING)))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.batches == [["a.1", "b.0"]]


def test_an_error_of_the_engine_reaches_each_episode_of_the_batch():
    class Dead:
        async def generate(self, request):
            raise WorkerDied(f"the engine died before {request.id}")

    async def main():
        batcher = LockstepBatcher(Dead(), episodes=2, concurrency=2)
        requests = (batcher.generate(Request(name, (1,), SAMPLING)) for name in "ab")
        return await asyncio.gather(*requests, return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(main(), 60))
    assert [(type(error), str(error)) for error in errors] == [
        (WorkerDied, "the engine died before a"),
        (WorkerDied, "the engine died before b"),
    ]


# -- the sampler of one episode ---------------------------------------------------------------------------


def sample(*turns, seed=None, sampling=SAMPLING, max_model_len=100, episode="e"):
    """The requests of an episode for these (prompt, overrides) turns."""
    engine = RecordingEngine()

    async def main():
        sampler = EpisodeSampler(engine, episode, sampling, max_model_len, seed)
        for prompt, overrides in turns:
            await sampler.generate(prompt, overrides)

    asyncio.run(main())
    return engine.requests


def test_each_turn_has_its_own_id():
    first, second = sample(([1, 2], None), ([1, 2, 3], None))
    assert (first.id, second.id) == ("e.0000", "e.0001")
    assert (list(first.token_ids), list(second.token_ids)) == ([1, 2], [1, 2, 3])


def test_seeds_are_derived_from_the_episode_and_the_turn():
    def seeds(seed):
        return [request.sampling.seed for request in sample(([1], None), ([1], None), seed=seed)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4
    assert seeds(None) == [None, None]


def test_derived_seeds_are_distinct_and_the_same_in_every_process():
    assert derived_seed(0, "task", 3) == 1734749606
    assert derived_seed("a", "bc") != derived_seed("ab", "c")
    seeds = {derived_seed(0, task, member) for task in range(100) for member in range(100)}
    assert len(seeds) > 10_000 - 5  # 31 bits: a handful of birthdays at most
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_overrides_hold_for_their_turn_only():
    first, second = sample(([1], {"max_tokens": 3, "temperature": 0.5}), ([1], None))
    assert (first.sampling.max_tokens, first.sampling.temperature) == (3, 0.5)
    assert second.sampling == SAMPLING


def test_an_unknown_override_suggests_the_closest_name():
    with pytest.raises(ConfigError, match=r"'max_token'. Did you mean 'max_tokens'\?"):
        sample(([1], {"max_token": 3}))


@pytest.mark.parametrize(
    "overrides",
    [
        *({"temperature": value} for value in (math.nan, math.inf, -math.inf, -1, True, "warm", None, [0.5], {})),
        *({"top_p": value} for value in (0, 1.5, -0.1, math.nan, False, "all")),
        *({"top_k": value} for value in (-2, 1.5, 2**63, True, math.inf)),
        *({"max_tokens": value} for value in (0, -1, 2.5, math.nan, True, None, "many", 2**70)),
        *({"seed": value} for value in (2**70, -(2**70), 1.5, math.inf, True, "x", [1])),
        *({"stop_token_ids": value} for value in (5, None, "ab", [0.5], [True], ["a"], [2**70], [2**31], [-4], [[1]])),
    ],
    ids=str,
)
def test_an_override_that_no_setting_could_have_is_the_environments_mistake(overrides):
    [name] = overrides
    with pytest.raises(
        InvalidStep, match=rf"^the environment's sampling parameters: key '{name}.*(: | holds )"
    ) as failure:
        sample(([1], overrides))
    assert len(str(failure.value)) <= 1000


def test_a_long_name_or_value_makes_no_long_message():
    with pytest.raises(ConfigError) as failure:
        sample(([1], {"\x1b[31m" * 10**5: 1}))
    assert len(str(failure.value)) == 1000
    assert "\x1b" not in str(failure.value)
    with pytest.raises(InvalidStep) as failure:
        sample(([1], {"seed": list(range(10**5))}))
    assert len(str(failure.value)) < 200


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"temperature": 1}, 1.0),
        ({"temperature": "0.5"}, 0.5),
        ({"temperature": 0}, 0.0),
        ({"max_tokens": 4.0}, 4),
        ({"top_p": 0.5}, 0.5),
        ({"top_k": -1}, -1),
        ({"seed": -1}, -1),
        ({"seed": None}, None),
        ({"seed": 2**63 - 1}, 2**63 - 1),
        ({"stop_token_ids": [1, 2]}, (1, 2)),
    ],
    ids=str,
)
def test_overrides_arrive_as_the_settings_types(overrides, expected):
    [(name, _)] = overrides.items()
    [request] = sample(([1], overrides))
    value = getattr(request.sampling, name)
    assert (value, type(value)) == (expected, type(expected))
    assert replace(request.sampling, **{name: getattr(SAMPLING, name)}) == SAMPLING


def test_a_turn_is_limited_to_the_rest_of_the_context():
    assert [r.sampling.max_tokens for r in sample(([1] * 90, None), ([1] * 95, None), ([1] * 99, None))] == [8, 5, 1]


@pytest.mark.parametrize("length", [100, 101])
def test_a_prompt_that_fills_the_context_is_an_error_with_its_length(length):
    with pytest.raises(PromptTooLong, match=f"{length} tokens .* context of 100"):
        sample(([1] * length, None))


def test_concurrent_requests_take_their_common_time_once():
    class Slow:
        async def generate(self, request):
            await asyncio.sleep(0.2)
            return Generation((7,), (-1.0,), StopReason.STOP, ())

    async def main():
        sampler = EpisodeSampler(Slow(), "e", SAMPLING, max_model_len=64, seconds_left=10.0)
        await asyncio.gather(*(sampler.generate([1]) for _ in range(5)))
        await asyncio.sleep(0.2)
        await sampler.generate([1])
        return sampler.seconds_left

    assert 9.4 < asyncio.run(main()) < 9.61


def test_an_api_that_takes_longer_than_the_policy_may_ends_the_episode():
    class Hangs(ChatEngine):
        async def chat(self, request):
            await asyncio.sleep(30)

    async def main():
        sampler = EpisodeSampler(Hangs(), "e", SAMPLING, max_model_len=64, seconds_left=0.1)
        with pytest.raises(OutOfBudget) as error:
            await sampler.chat([])
        return error.value.reason

    assert asyncio.run(main()) == "time"
