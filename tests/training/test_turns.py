"""Timesharing of GPUs between engines and models: the order of calls."""

import asyncio

from envgym.processes.runtime import message_of
from envgym.training.weight_sync import GpuTimeshare


class Side:
    """A role's ranks, or engines, that record their calls."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def on_all(self, call):
        method, args, _ = message_of(call)
        self.calls.append((self.name, method, *args))
        return asyncio.sleep(0)

    async def sleep(self, level):
        self.calls.append((self.name, "sleep", level))

    async def wake(self, part):
        self.calls.append((self.name, "wake", part))


def make_timeshare(*roles, **settings):
    calls = []
    return GpuTimeshare(Side("engines", calls), {role: Side(role, calls) for role in roles}, **settings), calls


def test_a_step_never_has_two_sides_that_hold_more_than_weights():
    timeshare, calls = make_timeshare("actor", "reference", keeps_weights=False)

    async def send():
        calls.append("weights")

    async def main():
        await timeshare.hand_over(send)  # before the first step, after loading the models
        calls.clear()
        await timeshare.give_to_engines()  # they have it already
        await timeshare.give_to_models(for_new_weights=True)
        await timeshare.give_to_models()
        await timeshare.hand_over(send)

    asyncio.run(main())
    assert calls == [
        ("engines", "sleep", 2), ("actor", "onload"), ("reference", "onload"),
        ("actor", "offload", True), ("reference", "offload", False), ("engines", "wake", "weights"),
        "weights",
        ("actor", "offload", False), ("engines", "wake", "cache"),
    ]  # fmt: skip


def test_a_checkpoint_in_between_leaves_the_engines_their_weights():
    timeshare, calls = make_timeshare("actor", keeps_weights=False)

    async def main():
        await timeshare.give_to_engines()
        calls.clear()
        await timeshare.give_to_models()
        await timeshare.give_to_engines()

    asyncio.run(main())
    assert calls == [
        ("engines", "sleep", 1), ("actor", "onload"),
        ("actor", "offload", True), ("engines", "wake", "weights"),
        ("actor", "offload", False), ("engines", "wake", "cache"),
    ]  # fmt: skip


def test_engines_that_get_adapters_keep_their_weights():
    timeshare, calls = make_timeshare("actor", keeps_weights=True)

    async def main():
        await timeshare.give_to_engines()
        await timeshare.give_to_models(for_new_weights=True)

    asyncio.run(main())
    assert ("engines", "sleep", 1) in calls


def test_an_offloaded_actor_is_loaded_while_an_engine_joins():
    timeshare, calls = make_timeshare("actor", keeps_weights=False)

    async def main():
        await timeshare.give_to_engines()
        calls.clear()
        async with timeshare.actor_on_device():
            calls.append("weights")
        assert calls == [("actor", "onload"), "weights", ("actor", "offload", False)]
        await timeshare.give_to_models()
        calls.clear()
        async with timeshare.actor_on_device():
            pass
        assert calls == []

    asyncio.run(main())


def test_nothing_moves_if_no_gpu_is_shared():
    timeshare, calls = make_timeshare(keeps_weights=False)

    async def send():
        calls.append("weights")

    async def main():
        await timeshare.hand_over(send)
        await timeshare.give_to_models(for_new_weights=True)
        await timeshare.give_to_engines()

    asyncio.run(main())
    assert calls == ["weights"]
