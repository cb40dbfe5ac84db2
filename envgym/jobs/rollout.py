"""Rollouts into a file, for `envgym rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.processes import event_loop
from envgym.types import Episode

from .folder import UnfinishedFile
from .job import run_job
from .models import MakeModel
from .parts import Part

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


def roll_out_to_file(
    part: Part, path: Path, display: Display, make_model: MakeModel, *, best: bool = False, overwrite: bool = False
) -> tuple[dict[str, Any], list[Episode]]:
    """Roll out the part's tasks with its model, and write the episodes to `path`, or with `best` the best one per task.

    Returns the result of all episodes (see `run_evaluation`), and those that are in the file. Episodes of an earlier,
    interrupted call for the same part are reused. Raises `EnvgymError`; on Ctrl-C a `KeyboardInterrupt` that names the
    folder of the finished episodes.
    """
    folder = UnfinishedFile(path, part, overwrite=overwrite)
    with folder.open():
        result, groups = event_loop.run(run_job(folder, display, make_model))
        members = [group.episodes for group in groups[part.name]]
        if best:
            members = [[episode] for episodes in members if (episode := best_of(episodes))]
        saved = [episode for episodes in members for episode in episodes]
        folder.finish(saved)
    return {**result, "envs": {part.stage.env.name: result["envs"][part.name]}}, saved


def best_of(episodes: Sequence[Episode]) -> Episode | None:
    """The episode with the highest score, or the highest reward if none has a score; the first of equals. None if all
    failed."""
    finished = [episode for episode in episodes if not episode.failed]
    field = "reward" if all(episode.score is None for episode in finished) else "score"

    def rank(episode: Episode) -> float:
        value: float | None = getattr(episode, field)
        return -float("inf") if value is None else value

    return max(finished, key=rank, default=None)
