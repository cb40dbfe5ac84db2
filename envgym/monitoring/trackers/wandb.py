"""Weights & Biases. `WANDB_MODE=offline` keeps everything in the run folder; its other variables hold as well."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from envgym.errors import EnvgymError

from .tracker import Story, Tracker

START_SECONDS = 60


class WandB(Tracker):
    """A resumed run goes on with the run it was. Steps that it takes again are not told again: W&B takes no step
    twice."""

    def open(self, story: Story) -> str:
        import wandb

        online = os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
        if online and not wandb.login(prompt=False):  # it would ask for a key, on a terminal where nobody may be
            raise EnvgymError("no API key is known: type `wandb login` once, or set WANDB_MODE=offline")
        settings = wandb.Settings(silent=True, console="off", init_timeout=START_SECONDS)
        self._run: Any = wandb.init(
            id=story.id,
            resume="allow",
            name=story.name,
            group=story.group,
            project=os.environ.get("WANDB_PROJECT", story.project),
            dir=str(story.folder),
            config=dict(story.config),
            settings=settings,
        )
        self._told = self._run.step - 1 if self._run.resumed else -1
        return str(self._run.url) if online else f"offline; send it with: wandb sync {story.folder}/wandb/offline-run-*"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._told:
            self._run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "completed" else 1)


TRACKER = WandB
