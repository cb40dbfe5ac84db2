"""The prompts of a run or an evaluation: checked before the models are loaded, and reported with the first of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from textwrap import indent

from envgym.config.schema import StageConfig
from envgym.env import EnvSpec
from envgym.errors import DataError, InvalidStep
from envgym.render import Renderer, TextRenderer
from envgym.tasks import DataEnvSpec
from envgym.types import Observation, Task, as_messages

LOOKED_AT = 50_000
"""Tasks of a split that are looked at: all of most sets, evenly spaced ones of others."""
SHOWN = 2_000
"""Characters of the first prompt that are shown."""


async def survey(spec: EnvSpec, split: str, renderer: Renderer) -> Task | None:
    """The task of a split with the longest prompt in characters, of data alone: other tasks may be far away, or have no
    end. Raises `DataError`, with the task's name, if the chat template leaves out a message of a recorded
    conversation."""
    if not all(isinstance(part, DataEnvSpec) for part in spec.parts()):
        return None
    tasks, role_orders = spec.tasks(split), set[tuple[str, ...]]()
    longest, length = None, 0
    for number in range(0, tasks.size or 0, 1 + (tasks.size or 0) // LOOKED_AT):
        task = await tasks.get(number)
        if (size := sum(len(message.text) for message in as_messages(task.prompt))) > length:
            longest, length = task, size
        for conversation in spec.spec_for(task).conversations(task):
            if (roles := tuple(message.role for message in conversation)) in role_orders:
                continue
            role_orders.add(roles)
            try:
                renderer.check_roles(conversation)
            except InvalidStep as error:
                raise DataError(f"task {task.key}: {error}") from None
    return longest


def announce(
    stage: StageConfig, renderer: Renderer, longest: Task | None, context: int | None, note: Callable[[str], None]
) -> None:
    """Say once, with the first prompt as the model gets it, what is trained on or asked; `context` is the engine's, in
    tokens."""
    lines = []
    with suppress(InvalidStep):  # the environment may change the messages of its tasks
        if longest is not None:
            n_tokens = len(renderer.prompt(Observation(messages=as_messages(longest.prompt))))
            lines.append(
                f"longest prompt in the data: {n_tokens} tokens (task {longest.key})"
                + (f", context {context}" if context else "")
            )
            if context and n_tokens >= context:
                lines[0] += ": no room to answer, so that such tasks fail; raise engine.max_model_len"

    def say(observation: Observation, text: str) -> None:
        renderer.on_opening = None
        excerpt = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"
        note(f"first prompt, as the model gets it:\n{indent(excerpt, '  ')}")
        tools = ", ".join(tool.name for tool in observation.tools) or "none"
        # Data sources add their columns here, the used ones and the others.
        for line in (f"template: {_template(stage, renderer, observation)}; tools: {tools}", *lines):
            note(line)

    renderer.on_opening = say


def _template(stage: StageConfig, renderer: Renderer, observation: Observation) -> str:
    if observation.text is not None or (isinstance(renderer, TextRenderer) and not renderer.separator):
        return "none, plain text"
    if isinstance(renderer, TextRenderer):
        reason = "" if renderer.tokenizer.chat_template else ", since this model has no chat template"
        return f"none, lines from `User:` to `Assistant:`{reason}"
    return "render.template" if stage.render.template else "the tokenizer's chat template"
