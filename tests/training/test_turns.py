"""Turns of engines and models on shared GPUs: the order in which memory changes hands."""

import asyncio

from envgym.training.turns import GpuTimeshare


class Side:
    """Engines, or a role's ranks, that write down what they are told."""

    def __init__(self, name, told):
        self.name, self.told = name, told

    async def on_all(self, method, *args):
        self.told.append((self.name, method, *args))

    async def call(self, *call):
        self.told.append(("engines", *call))


def begun(*roles, **settings):
    told = []
    return GpuTimeshare(Side("engines", told), {role: Side(role, told) for role in roles}, **settings), told


def test_a_step_in_which_no_two_hold_more_than_weights_at_once():
    timeshare, told = begun("actor", "reference", keeps_weights=False)

    async def send():
        told.append("weights")

    async def main():
        await timeshare.hand_over(send)  # before the first step, when the models have just been loaded
        told.clear()
        await timeshare.give_to_engines()  # it is theirs
        await timeshare.give_to_models(for_new_weights=True)
        await timeshare.give_to_models()
        await timeshare.hand_over(send)

    asyncio.run(main())
    assert told == [
        ("engines", "sleep", 2), ("actor", "onload"), ("reference", "onload"),
        ("actor", "offload", True), ("reference", "offload", False), ("engines", "wake", "weights"),
        "weights",
        ("actor", "offload", False), ("engines", "wake", "cache"),
    ]  # fmt: skip


def test_a_checkpoint_in_between_leaves_the_engines_their_weights():
    timeshare, told = begun("actor", keeps_weights=False)

    async def main():
        await timeshare.give_to_engines()
        told.clear()
        await timeshare.give_to_models()
        await timeshare.give_to_engines()

    asyncio.run(main())
    assert told == [
        ("engines", "sleep", 1), ("actor", "onload"),
        ("actor", "offload", True), ("engines", "wake", "weights"),
        ("actor", "offload", False), ("engines", "wake", "cache"),
    ]  # fmt: skip


def test_engines_that_get_adapters_keep_their_weights():
    timeshare, told = begun("actor", keeps_weights=True)

    async def main():
        await timeshare.give_to_engines()
        await timeshare.give_to_models(for_new_weights=True)

    asyncio.run(main())
    assert ("engines", "sleep", 1) in told


def test_an_engine_that_joins_gets_the_weights_of_an_actor_that_has_gone():
    timeshare, told = begun("actor", keeps_weights=False)

    async def main():
        await timeshare.give_to_engines()
        told.clear()
        async with timeshare.actor_on_device():
            told.append("weights")
        assert told == [("actor", "onload"), "weights", ("actor", "offload", False)]
        await timeshare.give_to_models()
        told.clear()
        async with timeshare.actor_on_device():
            pass
        assert told == []

    asyncio.run(main())


def test_where_nothing_is_shared_nothing_moves():
    timeshare, told = begun(keeps_weights=False)

    async def send():
        told.append("weights")

    async def main():
        await timeshare.hand_over(send)
        await timeshare.give_to_models(for_new_weights=True)
        await timeshare.give_to_engines()

    asyncio.run(main())
    assert told == ["weights"]
