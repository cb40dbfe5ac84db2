"""Waves of requests, and the sampler an episode is given."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.engine import Generation, Request, SamplingParams
from envgym.errors import ConfigError, PromptTooLong, WorkerDied
from envgym.hashing import derived_seed
from envgym.rollout.sampler import EpisodeSampler, LockstepBatcher
from envgym.types import StopReason

SAMPLING = SamplingParams(max_tokens=8)


class RecordingEngine:
    """Answers at once with one token. `waves` holds the ids of the requests that arrived in one go, in order."""

    def __init__(self):
        self.waves = []
        self.requests = []
        self._open = False

    async def generate(self, request):
        self.requests.append(request)
        if not self._open:
            self.waves.append([])
            self._open = True
        self.waves[-1].append(request.id)
        await asyncio.sleep(0)
        self._open = False
        return Generation((7,), (-1.0,), StopReason.STOP, ())


def play(turns, concurrency):
    """Episodes of `turns` requests each, at most `concurrency` at once, as the runner plays them."""
    engine = RecordingEngine()

    async def episode(index, n_turns, waves, slots):
        async with slots:
            try:
                for turn in range(n_turns):
                    for _ in range(index % 3):  # they reach their requests at different times
                        await asyncio.sleep(0)
                    await waves.generate(Request(f"{index:03d}.{turn:04d}", (1,), SAMPLING))
            finally:
                waves.leave()

    async def main():
        waves, slots = LockstepBatcher(engine, len(turns), concurrency), asyncio.Semaphore(concurrency)
        await asyncio.gather(*(episode(i, n, waves, slots) for i, n in enumerate(turns)))

    asyncio.run(asyncio.wait_for(main(), 60))
    return engine.waves


def test_a_wave_is_complete_and_sorted():
    assert play([2, 2, 2], concurrency=3) == [
        ["000.0000", "001.0000", "002.0000"],
        ["000.0001", "001.0001", "002.0001"],
    ]


def test_fewer_slots_than_episodes():
    assert play([1, 1, 1, 1, 1], concurrency=2) == [["000.0000", "001.0000"], ["002.0000", "003.0000"], ["004.0000"]]


def test_an_episode_that_ends_early_is_not_waited_for():
    assert play([1, 3, 0, 2], concurrency=4) == [
        ["000.0000", "001.0000", "003.0000"],
        ["001.0001", "003.0001"],
        ["001.0002"],
    ]


def test_an_episode_that_ends_early_leaves_its_slot_to_the_next():
    """The wave waits for the newcomer, too: two are in play whenever two are left."""
    assert play([1, 2, 1], concurrency=2) == [["000.0000", "001.0000"], ["001.0001", "002.0000"]]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 12))
def test_every_wave_is_sorted_and_complete_and_nothing_is_lost(turns, concurrency):
    waves = play(turns, concurrency)
    assert all(wave == sorted(wave) for wave in waves)
    assert all(len(wave) <= concurrency for wave in waves)
    asked = [id for wave in waves for id in wave]
    assert sorted(asked) == [f"{i:03d}.{turn:04d}" for i, n in enumerate(turns) for turn in range(n)]
    if concurrency >= len(turns):  # all are in play from the start: each wave is everybody's next turn
        assert waves == [[f"{i:03d}.{turn:04d}" for i, n in enumerate(turns) if n > turn] for turn in range(max(turns))]


def test_a_request_given_up_neither_completes_a_wave_nor_is_sampled():
    """An episode's deadline passes while it waits, and it is played again: one request of it is sampled, once."""
    engine = RecordingEngine()

    async def main():
        waves = LockstepBatcher(engine, episodes=2, concurrency=2)
        late = asyncio.create_task(waves.generate(Request("a.0", (1,), SAMPLING)))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        again = asyncio.create_task(waves.generate(Request("a.1", (1,), SAMPLING)))
        await asyncio.sleep(0)
        assert engine.waves == []
        await asyncio.gather(again, waves.generate(Request("b.0", (1,), SAMPLING)))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.waves == [["a.1", "b.0"]]


def test_what_the_engine_raises_reaches_each_episode_that_asked():
    class Dead:
        async def generate(self, request):
            raise WorkerDied(f"the engine died before {request.id}")

    async def main():
        waves = LockstepBatcher(Dead(), episodes=2, concurrency=2)
        asked = (waves.generate(Request(name, (1,), SAMPLING)) for name in "ab")
        return await asyncio.gather(*asked, return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(main(), 60))
    assert [(type(error), str(error)) for error in errors] == [
        (WorkerDied, "the engine died before a"),
        (WorkerDied, "the engine died before b"),
    ]


# -- the sampler of one episode ---------------------------------------------------------------------------


def sample(*turns, seed=None, sampling=SAMPLING, max_model_len=100, episode="e"):
    """The requests an episode makes of these (prompt, overrides) turns."""
    engine = RecordingEngine()

    async def main():
        sampler = EpisodeSampler(engine, episode, sampling, max_model_len, seed)
        for prompt, overrides in turns:
            await sampler.generate(prompt, overrides)

    asyncio.run(main())
    return engine.requests


def test_each_turn_has_an_id_of_its_own():
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


def test_an_unknown_override_names_its_neighbour():
    with pytest.raises(ConfigError, match=r"'max_token'. Did you mean 'max_tokens'\?"):
        sample(([1], {"max_token": 3}))


def test_a_turn_is_cut_to_what_fits_the_context():
    assert [r.sampling.max_tokens for r in sample(([1] * 90, None), ([1] * 95, None), ([1] * 99, None))] == [8, 5, 1]


@pytest.mark.parametrize("length", [100, 101])
def test_a_prompt_that_leaves_no_room_is_refused_with_its_length(length):
    with pytest.raises(PromptTooLong, match=f"{length} tokens .* context of 100"):
        sample(([1] * length, None))
