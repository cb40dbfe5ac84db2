"""Checkpoints of the training loop after an error, and resuming from them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import envgym.learner
from envgym.config.resolve import resolve
from envgym.engine import SamplingParams
from envgym.env import TaskList
from envgym.errors import InvalidOutcome, RolloutFailed, RunError, WorkerDied
from envgym.learner import LearnerConfig, RoleSpec
from envgym.monitoring.display import Display
from envgym.processes.runtime import message_of
from envgym.render import NoRenderer
from envgym.run_folder import RunFolder
from envgym.training import step as training_step
from envgym.training.components import Components
from envgym.training.trainer import Stopped, Trainer
from envgym.training.weight_sync import GpuTimeshare
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn, VersionSpan


class Learner:
    """Trains on every sample, and has one coefficient as its state."""

    min_group_size = 2
    needs_policy_samples = False
    roles: ClassVar[dict[str, Any]] = {
        "actor": RoleSpec(trained=True, scored=False),
        "reference": RoleSpec(trained=False),
    }
    config = LearnerConfig(name="any")
    rows_to_score = envgym.learner.Learner.rows_to_score

    def __init__(self) -> None:
        self.coefficient = 0.1

    def prepare(self, groups: Any) -> list[Row]:
        return [row for group in groups for episode in group.episodes for row in episode.rows]

    def loss_normalizers(self, samples: Any) -> dict[str, float]:
        return {}

    def metrics(self, samples: Any) -> dict[str, float]:
        return {}

    def end_step(self, rows: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Any) -> None:
        self.coefficient = state["coefficient"]


class World:
    """Runner, workers and sync of a loop. `error` is raised in phase `failing` of the third training step: `roll_out`,
    `score`, `learn` or `sync`; or in the second `evaluate`, after the second step."""

    info = SimpleNamespace(flops=lambda samples: 0.0, peak_flops=None)
    settings = SimpleNamespace(ranks=1)

    def __init__(self, error: Exception | None = None, failing: str = "") -> None:
        self.error, self.failing = error, failing
        self.counts: dict[str, int] = {}
        tasks = TaskList([Task(f"t{n}") for n in range(20)])
        self.spec = SimpleNamespace(tasks=lambda split: tasks, recordings_per_task=1)
        self.spec.spec_for = lambda task: SimpleNamespace(scores_groups=False)
        self.agent = SimpleNamespace(uses_policy=True, renderer=NoRenderer())
        self.attempts = SimpleNamespace(write=asyncio.to_thread)
        self.envs_without_scores: set[str] = set()
        self.has_learned = threading.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()

    def enter(self, phase: str) -> None:
        self.counts[phase] = self.counts.get(phase, 0) + 1
        if phase == self.failing and self.counts[phase] == {"sync": 4, "evaluate": 2}.get(phase, 3):
            assert self.error is not None
            raise self.error

    async def roll_out(
        self, tasks: Any, plan: Any, on_progress: Any, *, completed: Any, on_episode: Any
    ) -> list[Group]:
        self.enter("evaluate" if plan.purpose.startswith("eval") else "roll_out")
        return [finished_group(task.id) for task in tasks]

    async def forward(self, samples: Any) -> list[Any]:
        self.enter("score")
        return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]

    async def accumulate(self, samples: Any, normalizers: Any) -> dict[str, float]:
        self.enter("learn")
        self.has_learned.set()
        return {"loss": 1.0}

    async def accumulated_outputs(self) -> list[Any]:
        return []

    async def step(self, lr: float) -> dict[str, float]:
        return {"grad_norm": 1.0}

    async def on_all(self, call: Any) -> None:
        method, *_ = message_of(call)
        assert method in ("save_state", "finish_save", "load_state")
        if method == "finish_save":
            await self.may_write.wait()


class Sync:
    """The weight sync of a world, which sends nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weights_lock = asyncio.Lock()
        self.difference = None
        self.n_bytes = None
        self.timeshare = GpuTimeshare(None, {}, keeps_weights=False)

    async def __call__(self, version: int) -> float:
        self.world.enter("sync")
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {}

    def check_samples(self, difference: float | None) -> None:
        pass


def trainer_of(folder: RunFolder, world: World | None = None, *, engine: Any = None) -> Trainer:
    """The real loop over components that sample and train nothing."""
    world = world or World()
    rollout = {"tasks_per_step": 1, "group_size": 2}
    evals = {"every": 2, "tasks": 1, "greedy": False}
    config = resolve({"env": "math_verify", "steps": 5, "rollout": rollout, "eval": evals, "checkpoint": {"every": 0}})
    workers = {"actor": world, "reference": world}
    components: Any = Components(Learner(), world, workers, SamplingParams(max_tokens=4), engine, Sync(world))
    return Trainer(config, config.stages[0], components, folder, Display())


def finished_group(id: str) -> Group:
    """A group as a rollout returns it, with a value in every field that a learner may read."""
    task = Task(id, "how many?", answer=[1, "$tuple"], fields={"odd": {"1": [2.5, None]}}, difficulty=0.3, seed=7)
    action = Segment("action", [5, 6], [1.0, 0.0], [-0.1, -1 / 3], (VersionSpan(2, 0, 2),), 0.7)
    row = Row([Segment("prompt", [3, 4]), action], turns=[Turn(1.0, StopReason.LENGTH)])
    return Group(
        id, task, [Episode(f"{id}:{n}", task, Outcome.finish(), [row], reward=n / 3, score=n / 3) for n in range(2)]
    )


@pytest.fixture
def folder(tmp_path):
    run_folder = RunFolder(tmp_path / "run")
    run_folder.create()
    return run_folder


def checkpoint_steps(folder: RunFolder) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.checkpoints.iterdir())


@pytest.mark.parametrize("phase", ["roll_out", "evaluate"])
def test_tasks_that_can_no_longer_be_read_cost_no_steps(phase, folder):
    error = InvalidOutcome("server", "500 Internal Server Error", retryable=True)
    with pytest.raises(RolloutFailed, match="after step 2: 500 Internal Server Error"):
        asyncio.run(trainer_of(folder, World(error, phase)).run())
    assert checkpoint_steps(folder) == [2]


@pytest.mark.parametrize(("phase", "step"), [("roll_out", 2), ("score", 2), ("evaluate", 2), ("sync", 3)])
def test_an_engine_that_died_costs_no_steps(phase, step, folder):
    with pytest.raises(WorkerDied, match="engine was killed"):
        asyncio.run(trainer_of(folder, World(WorkerDied("engine was killed by SIGKILL"), phase)).run())
    assert checkpoint_steps(folder) == [step]


def test_no_checkpoint_is_saved_of_a_worker_that_died_while_it_learned(folder):
    with pytest.raises(WorkerDied):
        asyncio.run(trainer_of(folder, World(WorkerDied("out of memory"), "learn")).run())
    assert checkpoint_steps(folder) == []


def test_the_first_death_is_reported_if_the_policy_cannot_be_saved(folder):
    class Dead(World):
        async def on_all(self, call: Any) -> None:
            raise WorkerDied("actor-0 has ended")

    with pytest.raises(WorkerDied, match="actor-0 was killed"):
        asyncio.run(trainer_of(folder, Dead(WorkerDied("actor-0 was killed by SIGKILL"), "score")).run())


def test_a_step_is_complete_once_its_episodes_are_on_the_disk(folder, monkeypatch):
    world = World()

    def write(path: Any, episodes: Any) -> None:
        assert world.has_learned.wait(60)  # written while the step trains, not before
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_step, "write_rollouts", write)
    trainer = trainer_of(folder, world, engine=object())
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(trainer.run())
    assert trainer.progress.step == 0


def test_steps_are_taken_while_a_checkpoint_is_written_and_the_run_ends_once_it_is(folder):
    async def main() -> None:
        world = World()
        world.may_write.clear()
        trainer = trainer_of(folder, world)
        trainer.stage.checkpoint.every = 2
        trainer.checkpoints._keep = 9
        running = asyncio.create_task(trainer.run())
        for _ in range(100):  # the second checkpoint waits for the first
            await asyncio.sleep(0.01)
        assert (trainer.progress.step, folder.saved_checkpoints()) == (4, [])
        world.may_write.set()
        await running

    asyncio.run(main())
    assert checkpoint_steps(folder) == [2, 4, 5]


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step(folder):
    class Full(World):
        async def on_all(self, call: Any) -> None:
            if message_of(call)[0] == "finish_save":
                raise RunError("no space left on device")

    trainer = trainer_of(folder, Full())
    trainer.stage.checkpoint.every = 1
    with pytest.raises(RunError, match="no space left"):
        asyncio.run(trainer.run())
    assert trainer.progress.step in (1, 2)
    assert list(folder.checkpoints.iterdir()) == []


def test_a_step_that_has_its_record_is_recorded_in_the_checkpoint_that_an_error_leaves(folder):
    """The error of an earlier checkpoint, which was still being written."""

    class Full(World):
        n_failures = 0

        async def on_all(self, call: Any) -> None:
            await super().on_all(call)
            if message_of(call)[0] == "finish_save" and not self.n_failures:
                self.n_failures += 1
                raise WorkerDied("rank 0 has ended")

    async def main() -> None:
        world = Full()
        world.may_write.clear()
        trainer = trainer_of(folder, world)
        trainer.stage.checkpoint.every = 1
        write = trainer.recorder.write

        def write_record(record: Any) -> None:
            write(record)
            if record["step"] == 2:
                world.may_write.set()

        trainer.recorder.write = write_record  # type: ignore[method-assign]
        with pytest.raises(WorkerDied, match="rank 0"):
            await trainer.run()

    asyncio.run(main())
    [checkpoint] = folder.checkpoints.iterdir()
    progress = folder.read_state(checkpoint)["progress"]
    assert (progress["step"], progress["recorded"]) == (2, True)


class Endless(TaskList):
    """`size` tasks that are made when they are drawn; drawing the 50th stops the loop."""

    def __init__(self, size: int) -> None:
        super().__init__([Task("t")] * 2)
        self.stop: Any = None
        self._size, self._drawn = size, 0

    @property
    def size(self) -> int:
        return self._size

    async def get(self, index: int) -> Task:
        self._drawn += 1
        if self._drawn == 50:
            asyncio.get_running_loop().call_soon(self.stop.set)
        return Task(f"t{index}")


@pytest.mark.parametrize(("part", "setting"), [("rollout", "tasks_per_step"), ("eval", "tasks")])
def test_a_stop_takes_effect_while_tasks_are_drawn(part, setting, folder):
    """A billion tasks, in a loop that never waits."""
    trainer = trainer_of(folder)
    tasks = Endless(10**9 if part == "eval" else 20)
    trainer.components.runner.spec.tasks = lambda split: tasks
    trainer.groups.cursor._tasks = tasks
    tasks.stop = trainer.stop
    setattr(getattr(trainer.stage, part), setting, 10**9)
    trainer.stage.eval.every = 2 if part == "eval" else 0
    with pytest.raises(Stopped):
        asyncio.run(trainer.run())
    assert checkpoint_steps(folder) == [0]


# -- resuming ---------------------------------------------------------------------------------------------


def save_checkpoint(trainer: Trainer, state: Any = None) -> Path:
    """Save a checkpoint and wait until it is written."""

    async def save() -> None:
        await trainer.checkpoints.save(state)
        await trainer.checkpoints.wait_for_writes()

    asyncio.run(save())
    last = trainer.folder.last_checkpoint()
    assert last is not None
    return last


def test_a_loop_resumes_with_its_whole_state(folder):
    trainer = trainer_of(folder)
    trainer.progress.step, trainer.progress.evals = 3, {"before": {"score": 1 / 3, "ci95": [0.1, 0.2]}}
    trainer.progress.seconds["rollout"] = 0.1 + 0.2
    trainer.components.learner.coefficient = 1 / 7
    trainer.groups.buffer.add([finished_group("a"), finished_group("b")])
    asyncio.run(trainer.groups.cursor.next(1))
    trainer.components.runner.envs_without_scores.add("game")
    state = trainer.checkpoints.state()
    checkpoint = save_checkpoint(trainer, state)
    resumed = trainer_of(folder)
    asyncio.run(resumed.checkpoints.load(checkpoint, folder.read_state(checkpoint)))
    restored = resumed.checkpoints.state()
    assert restored["progress"]["seconds"].pop("total") >= state["progress"]["seconds"].pop("total")
    assert restored == state
    assert resumed.groups.buffer.take(1) == [finished_group("a")]


def test_a_state_that_does_not_fit_raises_a_one_line_error(folder):
    trainer = trainer_of(folder)
    checkpoint = save_checkpoint(trainer)
    for wrong in ({"cursor": {}}, {"buffer": []}, {"progress": {"step": 1, "rounds": 2}}, {"learner": None}):
        with pytest.raises(RunError, match=r"the controller's state in .*step_000000 does not fit this version"):
            asyncio.run(trainer_of(folder).checkpoints.load(checkpoint, {**folder.read_state(checkpoint), **wrong}))


def test_a_learners_state_must_be_plain_and_a_failed_checkpoint_leaves_nothing(folder):
    trainer = trainer_of(folder)
    trainer.components.learner.coefficient = {1, 2}
    with pytest.raises(RunError, match=r"cannot be saved: it holds a set\. A learner's state_dict\(\) may hold"):
        asyncio.run(trainer.checkpoints.save())
    assert list(folder.checkpoints.iterdir()) == []
