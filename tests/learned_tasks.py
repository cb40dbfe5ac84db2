"""The tasks that an asynchronous run of seed 0 has learned from: none twice, and none left out."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

from envgym.config.resolve import resolve
from envgym.env import EnvSpec
from envgym.episodes.files import read_episodes
from envgym.tasks.task_set import TaskCursor


def check_learned_once(run: Path, env: str, *, steps: int, tasks: int, max_staleness: int) -> int:
    """Check the record and the tasks of a run of `steps` steps of `tasks` tasks, in groups of two. Returns the number
    of the tasks."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps + 1))
    assert max(record.get("staleness/max", 0) for record in records) <= max_staleness
    learned = Counter(episode.task.id for episode in read_episodes(run))
    assert set(learned.values()) == {2}  # none twice
    spec = resolve({"env": env}).stages[0].make_spec()
    order = asyncio.run(drawn_tasks(spec, tasks * (steps + max_staleness + 1)))
    assert set(learned) <= set(order)
    assert set(order[: tasks * (steps - max_staleness)]) <= set(learned)  # none left out
    return len(learned)


async def drawn_tasks(spec: EnvSpec, count: int) -> list[str]:
    """The ids of the first tasks, in the order in which a run of seed 0 draws them."""
    async with spec:
        return [task.id for task in await TaskCursor(spec.tasks("train"), 0).next(count)]
