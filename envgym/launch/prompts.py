"""What a run trains on or an evaluation asks, looked at before the models are loaded."""

from __future__ import annotations

from envgym.env import EnvSpec
from envgym.errors import DataError, InvalidStep
from envgym.render import Renderer

LOOKED_AT = 50_000
"""Tasks of a split that are looked at: all of most sets, evenly spaced ones of others."""


async def check_conversations(spec: EnvSpec, split: str, renderer: Renderer) -> None:
    """Raise `DataError`, with the task's name, if the chat template leaves out a message of a recorded conversation."""
    if all(type(part).conversations is EnvSpec.conversations for part in spec.parts()):
        return  # no recordings, and tasks may be far away
    tasks, seen = spec.tasks(split), set[tuple[str, ...]]()
    for number in range(0, tasks.size or 0, 1 + (tasks.size or 0) // LOOKED_AT):
        task = await tasks.get(number)
        for conversation in spec.spec_for(task).conversations(task):
            roles = tuple(message.role for message in conversation)
            if roles in seen:
                continue
            seen.add(roles)
            try:
                renderer.check_roles(conversation)
            except InvalidStep as error:
                raise DataError(f"task {task.key}: {error}") from None
