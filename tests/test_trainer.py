"""What the training loop keeps when it cannot go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from envgym.errors import InvalidOutcome, RolloutFailed, WorkerDied
from envgym.trainer import Trainer


class Loop(Trainer):
    """A loop whose third step, or what comes after it, meets `error`."""

    def __init__(self, error: Exception, *, in_step: bool = True) -> None:
        self.error, self.in_step = error, in_step
        self.progress: Any = SimpleNamespace(step=0, recorded=True)
        self.stage: Any = SimpleNamespace(steps=5)
        self.stop: Any = SimpleNamespace(is_set=lambda: False)
        self.kept: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"progress": {"step": self.progress.step, "best": None}}

    async def sync(self) -> None:
        pass

    async def take_step(self) -> None:
        if self.in_step and self.progress.step == 2:
            raise self.error
        self.progress.step += 1
        self.progress.recorded = False

    async def finish_step(self) -> None:
        if not self.in_step and self.progress.step == 2:
            raise self.error
        self.progress.recorded = True

    async def checkpoint(self, state: dict[str, Any]) -> Any:
        self.kept.append(state["progress"]["step"])


@pytest.mark.parametrize("in_step", [True, False])
def test_tasks_that_cannot_be_read_any_more_cost_no_steps(in_step):
    loop = Loop(InvalidOutcome("server", "500 Internal Server Error", retryable=True), in_step=in_step)
    with pytest.raises(RolloutFailed, match="after step 2: 500 Internal Server Error"):
        asyncio.run(loop.run())
    assert loop.kept == [2]


def test_a_worker_that_died_has_no_weights_to_keep():
    loop = Loop(WorkerDied("out of memory"))
    with pytest.raises(WorkerDied):
        asyncio.run(loop.run())
    assert loop.kept == []
