"""SwanLab. `SWANLAB_MODE=offline` keeps everything in the run folder; its other variables hold as well."""

from __future__ import annotations

from collections.abc import Mapping

from .tracker import Story, Tracker

STATES = {"completed": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLab(Tracker):
    """A resumed run goes on with the run it was, online; offline it writes another folder of the same id."""

    def open(self, story: Story) -> str:
        import swanlab

        # Never ask on a terminal where nobody may be; what is printed there is the display's.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        swanlab.init(
            id=story.id,
            resume="allow",
            name=story.name,
            group=story.group,
            project=settings.project.name or story.project,
            log_dir=str(story.folder / "swanlab"),
            config=dict(story.config),
            settings=settings,
        )
        return ""  # it says so itself

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        import swanlab

        swanlab.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        import swanlab

        swanlab.finish(state=STATES[status], error=None if status == "completed" else f"the run {status}")


TRACKER = SwanLab
