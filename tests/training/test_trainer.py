"""What the training loop keeps when it cannot go on, and that it goes on from there as if nothing had happened."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from envgym.config.schema import resolve
from envgym.engines.base import SamplingParams
from envgym.errors import InvalidOutcome, RolloutFailed, RunError, WorkerDied
from envgym.training.run_folder import RunFolder
from envgym.training.trainer import Parts, Trainer
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn, VersionSpan


class Loop(Trainer):
    """A loop whose third step meets `error` at a place of it, or, with `finish_step`, what comes after the second."""

    def __init__(self, error: Exception, where: str) -> None:
        self.error, self.where = error, where
        self.progress: Any = SimpleNamespace(step=0, recorded=True, record={})
        self.stage: Any = SimpleNamespace(steps=5)
        self.stop: Any = SimpleNamespace(is_set=lambda: False)
        self.kept: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"progress": {"step": self.progress.step, "best": None}}

    def meet(self, where: str) -> None:
        done = 3 if where == "sync" else 2
        if where == self.where and self.progress.step == done:
            raise self.error

    async def sync(self) -> None:
        self.meet("sync")

    async def roll_out(self) -> Any:
        self.meet("roll_out")

    async def score(self, groups: Any) -> None:
        self.meet("score")

    async def learn(self, groups: Any) -> None:
        self.meet("learn")

    async def finish_step(self) -> None:
        self.meet("finish_step")
        self.progress.recorded = True

    async def checkpoint(self, state: dict[str, Any]) -> Any:
        self.kept.append(state["progress"]["step"])


@pytest.mark.parametrize("where", ["roll_out", "finish_step"])
def test_tasks_that_cannot_be_read_any_more_cost_no_steps(where):
    loop = Loop(InvalidOutcome("server", "500 Internal Server Error", retryable=True), where)
    with pytest.raises(RolloutFailed, match="after step 2: 500 Internal Server Error"):
        asyncio.run(loop.run())
    assert loop.kept == [2]


@pytest.mark.parametrize(("where", "kept"), [("roll_out", 2), ("score", 2), ("finish_step", 2), ("sync", 3)])
def test_an_engine_that_died_costs_no_steps(where, kept):
    loop = Loop(WorkerDied("engine was killed by SIGKILL"), where)
    with pytest.raises(WorkerDied, match="engine was killed"):
        asyncio.run(loop.run())
    assert loop.kept == [kept]


def test_a_worker_that_died_while_it_learned_has_no_weights_to_keep():
    loop = Loop(WorkerDied("out of memory"), "learn")
    with pytest.raises(WorkerDied):
        asyncio.run(loop.run())
    assert loop.kept == []


def test_a_policy_that_died_before_it_could_be_kept_is_what_is_told():
    class Dead(Loop):
        async def checkpoint(self, state: dict[str, Any]) -> Any:
            raise WorkerDied("actor-0 has ended")

    with pytest.raises(WorkerDied, match="actor-0 was killed"):
        asyncio.run(Dead(WorkerDied("actor-0 was killed by SIGKILL"), "score").run())


def test_a_step_is_whole_once_its_episodes_are_on_the_disk():
    class Writes(Loop):
        async def roll_out(self) -> Any:
            self._writing = asyncio.ensure_future(self.write())

        async def write(self) -> None:
            await self.learned.wait()  # beside the learning, not before it
            raise OSError(28, "No space left on device")

        async def learn(self, groups: Any) -> None:
            self.learned.set()

    loop = Writes(OSError(), "")
    loop.learned = asyncio.Event()
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(loop.run())
    assert loop.progress.step == 0


# -- going on ---------------------------------------------------------------------------------------------


class Adapting:
    """A learner with a coefficient that follows what it observes."""

    min_group_size = 2
    roles: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.coefficient = 0.1

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: Any) -> None:
        self.coefficient = state["coefficient"]


def trainer_of(folder: RunFolder) -> Trainer:
    """The real loop over parts that play, sample and learn nothing."""
    config = resolve({"env": "math_verify", "rollout": {"tasks": 1, "group_size": 2}})
    tasks = SimpleNamespace(size=20, seeded=lambda seed: tasks)
    runner = SimpleNamespace(
        spec=SimpleNamespace(tasks=lambda split: tasks), agent=SimpleNamespace(samples=True), play=None, unscored=set()
    )
    parts: Any = Parts(Adapting(), runner, {}, SamplingParams(max_tokens=4))
    display: Any = SimpleNamespace(rollout=None, note=print)
    return Trainer(config, config.stages[0], parts, folder, display)


def played(id: str) -> Group:
    """A group as a rollout leaves it, with all that the learner may read of it."""
    task = Task(id, "how many?", answer=(1, "$tuple"), fields={"odd": {1: (2.5, None)}}, difficulty=0.3, seed=7)
    action = Segment("action", [5, 6], [1.0, 0.0], [-0.1, -1 / 3], (VersionSpan(2, 0, 2),), 0.7)
    row = Row([Segment("prompt", [3, 4]), action], turns=[Turn(1.0, StopReason.LENGTH)])
    return Group(
        id, task, [Episode(f"{id}:{n}", task, Outcome.completed(), [row], reward=n / 3, score=n / 3) for n in range(2)]
    )


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def test_a_loop_goes_on_with_all_that_it_knew(folder):
    trainer = trainer_of(folder)
    trainer.progress.step, trainer.progress.evals = 3, {"before": {"score": 1 / 3, "ci95": (0.1, 0.2)}}
    trainer.progress.seconds["rollout"] = 0.1 + 0.2
    trainer.parts.learner.coefficient = 1 / 7
    trainer.buffer.add([played("a"), played("b")])
    trainer.cursor._index()
    trainer.parts.runner.unscored.add("game")
    then = trainer.state()
    kept = asyncio.run(trainer.checkpoint(then))
    resumed = trainer_of(folder)
    asyncio.run(resumed.load(kept, folder.read_state(kept)))
    now = resumed.state()
    assert now["progress"]["seconds"].pop("total") >= then["progress"]["seconds"].pop("total")
    assert now == then
    assert resumed.buffer.take(1) == [played("a")]


def test_a_state_that_fits_no_loop_is_said_in_one_line(folder):
    trainer = trainer_of(folder)
    kept = asyncio.run(trainer.checkpoint(trainer.state()))
    for spoiled in ({"cursor": {}}, {"buffer": []}, {"progress": {"step": 1, "rounds": 2}}, {"learner": None}):
        with pytest.raises(RunError, match=r"the controller's state in .*step_000000 does not fit this version"):
            asyncio.run(trainer_of(folder).load(kept, {**folder.read_state(kept), **spoiled}))


def test_what_a_learner_keeps_must_be_plain_and_a_checkpoint_that_failed_leaves_nothing(folder):
    trainer = trainer_of(folder)
    trainer.parts.learner.coefficient = {1, 2}
    with pytest.raises(RunError, match=r"cannot be kept: it holds a set\. What a learner's state\(\) returns must"):
        asyncio.run(trainer.checkpoint(trainer.state()))
    assert list(folder.checkpoints.iterdir()) == []
