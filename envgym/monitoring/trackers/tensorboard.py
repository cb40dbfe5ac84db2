"""TensorBoard: event files in the run folder, written by its own package, without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .tracker import Story, Tracker

FLUSH_SECONDS = 10
"""How old what TensorBoard shows may be."""


class TensorBoard(Tracker):
    """`tensorboard --logdir runs` shows all runs in a folder."""

    def open(self, story: Story) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = story.folder / "tensorboard"
        self._writer: Any = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        if story.step:  # forget the steps after the checkpoint that the run goes on from: they are taken again
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=story.step + 1, session_log=start))
        return f"tensorboard --logdir {story.folder.parent}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, status: str) -> None:
        self._writer.close()


TRACKER = TensorBoard
