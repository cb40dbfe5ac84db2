"""The prompts of a run or an evaluation: checked before the models are loaded, and reported with the first of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import indent

from envgym.config.schema import StageConfig
from envgym.env import EnvSpec
from envgym.env.data import DataEnvSpec
from envgym.errors import DataError, InvalidStep, printable_line
from envgym.render import NoRenderer, Renderer, TextRenderer
from envgym.types import Observation, Task, as_messages

LOOKED_AT = 50_000
"""Tasks of a split that are looked at: all of most sets, evenly spaced ones of others."""
SHOWN = 2_000
"""Characters of the first prompt that are shown."""


@dataclass(slots=True)
class PromptSummary:
    """Notes on the prompts of a split."""

    longest: Task | None = None
    """The task with the longest prompt in characters."""
    notes: list[str] = field(default_factory=list)
    """The columns of the data, and prompts with a message that the chat template leaves out."""


async def survey(spec: EnvSpec, split: str, renderer: Renderer) -> PromptSummary:
    """A look at the tasks of data alone: others may be far away, or have no end. Raises `DataError`, with the task's
    name, if the chat template leaves out a message of a recorded conversation."""
    summary, length = PromptSummary(), 0
    parts = [part for part in spec.parts() if isinstance(part, DataEnvSpec)]
    summary.notes += filter(None, (part.columns for part in parts))
    if len(parts) < len(spec.parts()):
        return summary
    tasks, role_orders = spec.tasks(split), set[tuple[str, ...]]()
    for number in range(0, tasks.size or 0, 1 + (tasks.size or 0) // LOOKED_AT):
        task = await tasks.get(number)
        prompt = as_messages(task.prompt)
        if (size := sum(len(message.text) for message in prompt)) > length:
            summary.longest, length = task, size
        recorded = spec.spec_for(task).conversations(task)
        for conversation in recorded or [prompt]:
            if (roles := tuple(message.role for message in conversation)) in role_orders:
                continue
            role_orders.add(roles)
            try:
                renderer.check_roles(conversation)
            except InvalidStep as error:
                if recorded:
                    raise DataError(f"task {task.key}: {error}") from None
                # The environment may change the messages of its tasks.
                summary.notes.append(f"task {task.key}, as it is in the data: {error}")
    return summary


def announce(
    stage: StageConfig, renderer: Renderer, summary: PromptSummary, context: int | None, note: Callable[[str], None]
) -> None:
    """Say once, with the first prompt as the model gets it, what is trained on or asked; `context` is the engine's, in
    tokens."""
    lines, longest = [*summary.notes], summary.longest
    with suppress(InvalidStep):  # the environment may change the messages of its tasks
        if longest is not None and not isinstance(renderer, NoRenderer):
            n_tokens = len(renderer.prompt(Observation(messages=as_messages(longest.prompt))))
            lines.append(
                f"longest prompt in the data: {n_tokens} tokens (task {longest.key})"
                + (f", context {context}" if context else "")
            )
            if context and n_tokens >= context:
                lines[-1] += ": no room to answer, so that such tasks fail; raise engine.max_model_len"

    def say(observation: Observation, text: str) -> None:
        renderer.on_opening = None
        excerpt = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"
        receiver = "API" if isinstance(renderer, NoRenderer) else "model"
        note(f"first prompt, as the {receiver} gets it:\n{indent(excerpt, '  ')}")
        tools = ", ".join(tool.name for tool in observation.tools) or "none"
        for line in (printable_line(f"template: {_template(stage, renderer, observation)}; tools: {tools}"), *lines):
            note(line)

    renderer.on_opening = say


def _template(stage: StageConfig, renderer: Renderer, observation: Observation) -> str:
    if isinstance(renderer, NoRenderer):
        return "the API's own"
    if observation.text is not None or (isinstance(renderer, TextRenderer) and not renderer.separator):
        return "none, plain text"
    if isinstance(renderer, TextRenderer):
        reason = "" if renderer.tokenizer.chat_template else ", since this model has no chat template"
        return f"none, lines from `User:` to `Assistant:`{reason}"
    return "render.template" if stage.render.template else "the tokenizer's chat template"
