"""Which process goes where: pure, but for the last tests, where a worker says what it sees."""

import asyncio
import contextlib

import pytest

from envgym.config.resolve import resolve
from envgym.config.words import nest_keys
from envgym.errors import ConfigError
from envgym.jobs.components import start_engine
from envgym.monitoring.display import Display
from envgym.placement.memory import ModelSizes, engine_memory
from envgym.placement.plan import Node, PlacedRuntime, Plan, StagePart, nodes_of, place_parts, plan_of, this_machine
from envgym.processes import gpus
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime, Slot


def stage(**settings):
    return resolve(nest_keys({"env": "math_verify", "model": "some/model", **settings}.items())).stages[0]


def where(plan):
    return {name: (slot.node, slot.gpus) for name, slot in plan.slots.items()}


def machines(*gpus):
    return [Node(f"node{number}", count) for number, count in enumerate(gpus)]


def share_gpus(plan, one, other):
    return not set(plan.gpus_of(one)).isdisjoint(plan.gpus_of(other))


def test_every_part_has_gpus_of_its_own_where_there_are_enough():
    settings = {"learner": "ppo", "workers.ranks": 2, "engine.count": 2, "engine.tensor_parallel": 2}
    plan = plan_of(stage(**settings), {"service-reward": 1}, machines(16))
    assert where(plan) == {
        "engine-0": (0, (0, 1)), "engine-1": (0, (2, 3)),
        "actor-0": (0, (4,)), "actor-1": (0, (5,)), "critic-0": (0, (6,)), "critic-1": (0, (7,)),
        "service-reward": (0, (8,)),
    }  # fmt: skip
    assert plan.bundles() == [9]
    assert not share_gpus(plan, "actor", "engine")


def test_without_gpus_all_is_on_the_first_machine_but_for_what_is_to_be_spread():
    assert where(plan_of(stage(**{"workers.ranks": 2}), {}, machines(0, 0))) == {
        "engine": (0, ()), "actor-0": (0, ()), "actor-1": (0, ()),
    }  # fmt: skip
    spread = {"workers.ranks": 2, "engine.count": 2, "placement.actor.nodes": 2, "placement.engine.nodes": 2}
    assert where(plan_of(stage(**spread), {}, machines(0, 0))) == {
        "engine-0": (0, ()), "engine-1": (1, ()), "actor-0": (0, ()), "actor-1": (1, ()),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="engine needs 2 nodes, and there are 1"):
        plan_of(stage(**spread), {}, machines(0))


def test_where_there_are_too_few_gpus_all_share_them_unless_told_otherwise():
    shared = plan_of(stage(), {}, machines(1))
    assert where(shared) == {"engine": (0, (0,)), "actor-0": (0, (0,))}
    assert [slot.share for slot in shared.slots.values()] == [0.5, 0.5]
    assert share_gpus(shared, "actor", "engine")
    with pytest.raises(ConfigError, match=r"^actor needs 1 GPU; free are 0 of 1 on node0: lower .* colocate=all$"):
        plan_of(stage(colocate="none"), {}, machines(1))
    with pytest.raises(ConfigError, match=r"engine and actor need 2 GPUs; free are 1 of 1 on node0"):
        plan_of(stage(**{"workers.ranks": 2}), {}, machines(1))


def test_pairs_share_and_the_others_do_not():
    settings = {"learner": "ppo", "learner.kl.coef": 0.1, "workers.ranks": 2}
    chosen = stage(**settings, colocate=[["actor", "reference"], ["critic", "engine"]])
    plan = plan_of(chosen, {}, machines(4))
    assert where(plan) == {
        "actor-0": (0, (0,)), "actor-1": (0, (1,)), "reference-0": (0, (0,)), "reference-1": (0, (1,)),
        "critic-0": (0, (2,)), "critic-1": (0, (3,)), "engine": (0, (2,)),
    }  # fmt: skip
    assert (share_gpus(plan, "critic", "engine"), share_gpus(plan, "actor", "engine")) == (True, False)
    with pytest.raises(ConfigError, match=r"colocate: this stage has no part 'refrence'. Did you mean 'reference'"):
        plan_of(stage(**settings, colocate=[["actor", "refrence"]]), {}, machines(4))
    with pytest.raises(ConfigError, match="colocate: actor is in two sets"):
        plan_of(stage(**settings, colocate=[["actor", "reference"], ["actor", "critic"]]), {}, machines(4))
    with pytest.raises(ConfigError, match="placement: this stage has no part 'judge'"):
        plan_of(stage(**{"placement.judge.gpus": 1}), {}, machines(4))


def test_parts_are_spread_over_machines():
    parts = [
        StagePart("actor", tuple(f"actor-{rank}" for rank in range(8)), nodes=2),
        StagePart("engine", ("engine",), gpus=4),
    ]
    plan = place_parts(parts, machines(8, 8), [])
    assert [plan.slots[f"actor-{rank}"] for rank in (0, 3, 4, 7)] == [
        Slot(0, (0,)),
        Slot(0, (3,)),
        Slot(1, (0,)),
        Slot(1, (3,)),
    ]
    assert plan.slots["engine"] == Slot(0, (4, 5, 6, 7))
    assert plan.bundles() == [8, 4]
    with pytest.raises(ConfigError, match=r"actor needs 8 GPUs on 2 nodes, 4 each; free are 8 of 8 on node0, 2"):
        place_parts(parts, machines(8, 2), [])
    with pytest.raises(ConfigError, match=r"placement.actor.nodes=2 does not divide its 3 processes"):
        plan_of(stage(**{"workers.ranks": 3, "placement.actor.nodes": 2}), {}, machines(8))


def test_what_no_machine_holds_alone_goes_over_several_but_no_engine_does():
    ranks = StagePart("actor", tuple(f"actor-{rank}" for rank in range(6)))
    plan = place_parts([ranks], machines(4, 4), [])
    assert [plan.slots[name].node for name in ranks.workers] == [0, 0, 0, 0, 1, 1]
    engines = StagePart("engine", ("engine-0", "engine-1"), gpus=3)
    plan = place_parts([engines], machines(4, 5), [])
    assert {slot.node for slot in plan.slots.values()} == {0, 1}
    with pytest.raises(ConfigError, match="engine needs 6 GPUs; free are 4 of 4 on node0, 2 of 2 on node1"):
        place_parts([engines], machines(4, 2), [])


def test_who_must_be_spread_chooses_first():
    settings = {"workers.ranks": 2, "placement.actor.nodes": 2, "engine.count": 2}
    assert where(plan_of(stage(**settings), {}, machines(2, 2))) == {
        "actor-0": (0, (0,)), "actor-1": (1, (0,)), "engine-0": (0, (1,)), "engine-1": (1, (1,)),
    }  # fmt: skip


def test_processes_may_share_a_gpu_or_have_none():
    settings = {"workers.ranks": 2, "placement.actor.gpus": 0.5, "placement.reward.gpus": 0}
    plan = plan_of(stage(**settings), {"service-reward": 1}, machines(2))
    assert where(plan) == {"engine": (0, (0,)), "actor-0": (0, (1,)), "actor-1": (0, (1,)), "service-reward": (0, ())}


@pytest.mark.parametrize(
    ("shown", "count"), [("81559\n81559\n", 2), ("", 0), ("No devices were found\n", 0), (None, 3)]
)
def test_gpus_are_those_that_the_program_of_the_driver_shows(tmp_path, monkeypatch, shown, count):
    """Not those of `/proc`, which in a container are the host's, or missing; unless there is no such program."""
    for number in range(3):
        (tmp_path / "driver" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{shown}'\n")
        program.chmod(0o755)
    gpus._gpu_sizes.cache_clear()
    try:
        machine = this_machine()
    finally:
        gpus._gpu_sizes.cache_clear()
    assert (machine.gpus, machine.gpu_bytes) == (count, 81559 * 2**20 if count == 2 else None)


def test_a_worker_sees_the_gpus_of_its_slot(tmp_path, monkeypatch):
    """And only those, by the names that the controller's own environment gives them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7,9")
    assert this_machine().gpus == 3
    assert nodes_of(InlineRuntime())[0].gpus == 1  # where all are one process, they share what it takes first
    plan = Plan((), (), {"placed": Slot(0, (1, 2)), "alone": Slot(0, ())})

    async def main():
        runtime = PlacedRuntime(LocalRuntime(tmp_path), plan)
        try:
            seen = []
            for name in ("placed", "alone", "unknown"):
                worker = await runtime.start("os:getenv", {"key": "CUDA_VISIBLE_DEVICES"}, name=name)
                seen.append(await worker.call(lambda value: value.strip()))  # the worker is the variable's value
            return seen
        finally:
            await runtime.close()

    assert asyncio.run(main()) == ["GPU-7,9", "", "4,GPU-7,9"]


REWARD = {"service-reward": 1}
SHARES = [
    ({}, {}, 8, 0.9),
    ({}, {}, 1, 0.5),
    ({"colocate": "none"}, {}, 2, 0.9),
    ({"colocate": "all"}, {}, 1, 0.85),
    ({"colocate": "all", "engine.tensor_parallel": 2}, {}, 2, 0.85),
    ({"colocate": [["actor", "engine"]]}, {}, 1, 0.85),
    ({"learner": "ppo", "colocate": [["actor", "critic"]]}, {}, 2, 0.9),
    ({"engine.count": 2, "placement.engine.gpus": 0.5}, {}, 2, 0.45),
    ({"colocate": "all"}, REWARD, 1, 0.5),  # which stays where it is
    ({"colocate": [["engine", "reward"]]}, REWARD, 2, 0.5),
    ({"colocate": "all", "placement.reward.gpus": 0}, REWARD, 1, 0.85),
]


class Refusing:
    """A runtime that keeps what it is to start, and starts nothing."""

    async def start(self, target, kwargs, *, name, environ=None):
        self.kwargs = kwargs
        raise ConfigError("enough")


@pytest.mark.parametrize(("settings", "services", "gpus", "share"), SHARES, ids=str)
@pytest.mark.parametrize("given", [None, 0.3])
def test_the_engine_takes_the_share_of_a_gpu_that_is_planned(settings, services, gpus, share, given):
    own = {} if given is None else {"engine.args": {"gpu_memory_utilization": given}}
    config = resolve(nest_keys({"env": "math_verify", "model": "some/model", **settings, **own}.items()))
    chosen, runtime = config.stages[0], Refusing()
    plan = plan_of(chosen, services, [Node("node", gpus, 80 * 2**30)])
    planned = engine_memory(ModelSizes(10**9, 1, 1, 1, 1, 1), chosen, plan, 80 * 2**30).total / (80 * 2**30)
    assert planned == pytest.approx(given or share)
    with contextlib.suppress(ConfigError):
        asyncio.run(start_engine(config, chosen, "model", PlacedRuntime(runtime, plan), Display()))
    spec = runtime.kwargs["spec"]
    assert spec.engine_args.get("gpu_memory_utilization", spec.gpu_share) == pytest.approx(planned)


def test_a_way_for_weights_that_these_gpus_have_not_is_refused_with_the_plan():
    nccl, ipc = {"sync.transfer": "nccl"}, {"sync.transfer": "cuda_ipc"}
    with pytest.raises(ConfigError, match=r"^sync\.transfer=nccl: the engine and the actor share a GPU.*colocate=none"):
        plan_of(stage(**nccl), {}, machines(1))
    with pytest.raises(ConfigError, match="share a GPU"):
        plan_of(stage(**nccl, colocate="all"), {}, machines(2))
    plan_of(stage(**nccl), {}, machines(2))
    plan_of(stage(**nccl), {}, machines(1, 1))
    with pytest.raises(ConfigError, match=r"^sync\.transfer=cuda_ipc: the engine has a GPU without .*colocate=all"):
        plan_of(stage(**ipc), {}, machines(2))
    with pytest.raises(ConfigError, match="has a GPU without a rank"):
        plan_of(stage(**ipc, **{"engine.tensor_parallel": 2}, colocate="all"), {}, machines(2))
    plan_of(stage(**ipc), {}, machines(1))
    plan_of(stage(**ipc, **{"workers.ranks": 2, "engine.count": 2}, colocate="all"), {}, machines(2))
    for without in (nccl, ipc):  # what has no GPU is refused once it is known
        plan_of(stage(**without), {}, machines(0))


def test_parameters_on_the_host_for_good_take_no_turns():
    offloaded = {"workers.zero_stage": 3, "workers.offload_parameters": True}
    with pytest.raises(
        ConfigError, match=r"^workers\.offload_parameters of the actor, which shares GPUs with the engine in turns"
    ):
        stage(**offloaded, colocate="all")
    reference = {"learner.kl.coef": 0.1, "roles.reference.workers.offload_parameters": True}
    stage(**reference, colocate="all")  # a model that only scores stays on the host
    stage(**offloaded)
    stage(**offloaded, learner="ppo", colocate=[["actor", "critic"]])


def test_a_reward_model_beside_the_engine_takes_no_turns():
    plan = plan_of(stage(colocate=[["engine", "reward"]]), {"service-reward": 1}, machines(2))
    assert not any(part.in_turns for part in plan.parts)
    plan = plan_of(stage(colocate="all", learner="ppo"), {"service-reward": 1}, machines(1))
    assert [part.name for part in plan.parts if part.in_turns] == ["actor", "critic"]
    stage(colocate=[["engine", "reward"]], **{"rollout.max_staleness": 1})
