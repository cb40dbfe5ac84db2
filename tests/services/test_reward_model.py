"""The reward model as a service: a real worker process, asked by many episodes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

import envgym
from envgym.errors import ConfigError, InvalidOutcome, WorkerDied
from envgym.processes.runtime import InlineRuntime
from envgym.services import RewardModel, start_services


class Spec(envgym.EnvSpec):
    """An environment that only declares services, and knows whether they were there when it was set up."""

    def __init__(self, **services):
        super().__init__("declaring")
        self._services = services
        self.seen = None

    @property
    def services(self):
        return self._services

    async def setup(self):
        self.seen = set(self.clients)


def pids():
    """The worker processes that this one has."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_episodes_share_a_worker_and_its_batches_and_a_run_ends_with_it(tiny_reward_model):
    texts = [f"what is {number} + 34?" for number in range(40)]

    async def main():
        before = pids()
        declared = RewardModel(model=str(tiny_reward_model), batch_size=8, max_length=64)
        spec = Spec(helpful=declared, again=RewardModel(**declared.model_dump()))
        async with start_services(spec):
            assert spec.seen == {"helpful", "again"}
            [pid] = set(pids()) - set(before)
            client = spec.clients["helpful"]
            assert spec.clients["again"] is client
            rewards = await asyncio.gather(*(client.score_one(text) for text in texts))
            assert client.counters["requests"] == 40
            assert client.counters["rounds"] == 1
            assert [await client.score_one(text) for text in texts[:3]] == pytest.approx(rewards[:3], abs=1e-5)
            # From the thread of a blocking environment:
            there = await asyncio.to_thread(lambda: asyncio.run(client.score_one(texts[0])))
            assert there == pytest.approx(rewards[0], abs=1e-5)
            with pytest.raises(InvalidOutcome, match=r"more than it can score: raise max_length") as failure:
                await client.score_one("12 + 34 " * 100)
            assert (failure.value.kind, failure.value.retryable) == ("too_long", False)
            assert await client.score_one(texts[0]) == pytest.approx(rewards[0], abs=1e-5)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"service-helpful was killed by SIGKILL .*log: "):
                await asyncio.wait_for(client.score_one("late"), 30)
        return rewards

    assert len(set(asyncio.run(main()))) == 40


def test_in_a_deterministic_run_rewards_do_not_depend_on_timing(tiny_reward_model):
    texts = [f"what is {number} + 34? " + "so " * (number % 7) for number in range(20)]

    async def main(pause):
        spec = Spec(reward=RewardModel(model=str(tiny_reward_model), batch_size=8))

        async def late(index, text):
            await asyncio.sleep(pause * index)
            return await spec.clients["reward"].score_one(text)

        async with start_services(spec, InlineRuntime(), deterministic=True):
            return await asyncio.gather(*(late(index, text) for index, text in enumerate(texts)))

    try:
        assert asyncio.run(main(0)) == asyncio.run(main(0.02))
    finally:
        import torch

        torch.use_deterministic_algorithms(False)


def test_the_environment_is_set_up_before_a_model_is_loaded(tmp_path):
    class Broken(Spec):
        async def setup(self):
            raise ConfigError("the data file is missing")

    async def main():
        with pytest.raises(ConfigError, match="the data file is missing"):
            async with start_services(Broken(reward=RewardModel(model=str(tmp_path / "nothing")))):
                pass
        with pytest.raises(ConfigError, match="there is no reward model folder"):
            async with start_services(Spec(reward=RewardModel(model=str(tmp_path / "nothing"))), InlineRuntime()):
                pass

    asyncio.run(main())


def conversations_that_cannot_be_scored():
    """Each by a word of the message that refuses it."""
    nested = "x"
    for _ in range(600):
        nested = [nested]
    called = [{"function": {"name": "f", "arguments": {"a": nested}}}]
    return {
        "not valid Unicode": "\ud800",
        "cannot render the conversation": [{"role": "user", "content": "half: \udfff"}],
        "RecursionError": [{"role": "assistant", "content": "x", "tool_calls": called}],
    }


def test_several_ranks_give_the_rewards_of_one_a_conversation_fails_alone_and_a_rank_that_dies_ends_the_run(
    tiny_reward_model,
):
    sys.setrecursionlimit(1000)  # packages that other tests import raise it
    texts = [f"what is {number} + {'3' * (number % 5)}?" for number in range(19)]
    wrong = conversations_that_cannot_be_scored()

    async def rewards(client):
        """Of the texts, with others between them that cannot be scored, twice."""
        for _ in range(2):
            asked = [client.assess(text) for text in [*wrong.values(), "", *texts]]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            failures, answers = answers[: len(wrong) + 1], answers[len(wrong) + 1 :]
            for reason, failure in zip([*wrong, ""], failures, strict=True):
                assert isinstance(failure, InvalidOutcome), failure
                assert (failure.kind, failure.retryable) == ("service", False) or not reason
                assert reason in str(failure)
            yield [answer.reward for answer in answers]

    async def main():
        declared = RewardModel(model=str(tiny_reward_model), batch_size=4, max_length=64)
        alone, spec = Spec(judge=declared), Spec(judge=declared.model_copy(update={"ranks": 2}))
        async with start_services(alone, InlineRuntime()):
            expected = [each async for each in rewards(alone.clients["judge"])]
            assert expected[1] == pytest.approx(expected[0], abs=1e-6)
        before = set(pids())
        async with start_services(spec):
            async for each in rewards(spec.clients["judge"]):
                assert each == pytest.approx(expected[0], abs=1e-6)
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in set(pids()) - before}
            ranks = [pid for pid, command in commands.items() if b"envgym.processes.child" in command]
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            await spec.clients["judge"].assess("a question")

    with pytest.raises(WorkerDied):
        asyncio.run(main())
