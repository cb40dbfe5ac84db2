"""Prompts with instructions that a program verifies, in one turn: the reward is 1 if all are followed, else 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import DataError, did_you_mean
from envgym.types import Action, Task, as_messages

from .instructions import CHECKS, are_followed, load_languages, loose_forms

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Fields of a task's instructions, by IFEval's names."""


class InstructionFollowingConfig(DataEnvConfig):
    """Settings of the prompts. `data` is needed."""

    reward: Literal["all", "share"] = "all"
    """1 if every instruction is followed, else 0; or the share of the instructions that are followed."""


class InstructionFollowingEnv(Env):
    """Presents a prompt: the reward is 1 if all its instructions are followed, else 0; or the share of them."""

    spec: InstructionFollowing
    config: InstructionFollowingConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.spec.check_task(self.task)
        return list(as_messages(self.task.prompt)), {}

    async def step(self, action: Action) -> StepResult:
        instructions = self.spec.instructions(self.task)
        followed, loosely = await asyncio.to_thread(_verdicts, action.text, instructions)
        metrics = {
            "followed": float(sum(followed)), "followed_loosely": float(sum(loosely)),
            "instructions": float(len(instructions)), "all_followed_loosely": float(all(loosely)),
        }  # fmt: skip
        score = float(all(followed))
        reward = score if self.config.reward == "all" else sum(followed) / len(followed)
        return (), reward, True, False, {"score": score, "metrics": metrics}


class InstructionFollowing(DataEnvSpec):
    """The prompts. A row lists the ids of its instructions in `instruction_id_list`, and the arguments of each, in the
    same order, in `kwargs`."""

    env_class = InstructionFollowingEnv
    Config = InstructionFollowingConfig
    config: InstructionFollowingConfig
    answer_required = False

    async def setup(self) -> None:
        await asyncio.to_thread(load_languages)
        await super().setup()

    def check_task(self, task: Task) -> None:
        ids, arguments = task.fields.get(IDS), task.fields.get(ARGUMENTS)
        if not (isinstance(ids, list) and isinstance(arguments, list) and ids and len(ids) == len(arguments)):
            raise DataError(
                f"task {task.key}: {IDS} and {ARGUMENTS} are lists of equal length, an item per instruction"
            )
        for id, values in self.instructions(task):
            if id not in CHECKS:
                raise DataError(f"task {task.key}: there is no instruction {id!r}.{did_you_mean(str(id), CHECKS)}")
            try:
                CHECKS[id]("A text.", values)
            except KeyError as error:
                raise DataError(f"task {task.key}: the instruction {id} lacks its argument {error}") from None
            except (TypeError, AttributeError, ValueError) as error:
                raise DataError(f"task {task.key}: arguments of the instruction {id} are wrong: {error}") from None

    def instructions(self, task: Task) -> list[tuple[str, dict[str, Any]]]:
        """The ids of a task's instructions, each with its arguments. Null is no argument."""
        pairs = zip(task.fields[IDS], task.fields[ARGUMENTS], strict=True)
        return [
            (id, {name: value for name, value in (values or {}).items() if value is not None}) for id, values in pairs
        ]


def _verdicts(text: str, instructions: list[tuple[str, dict[str, Any]]]) -> tuple[list[bool], list[bool]]:
    """Whether each instruction is followed by the text, and by any of its loose forms."""
    followed = are_followed(text, instructions)
    loosely = [
        verdict or any(are_followed(form, [instruction])[0] for form in loose_forms(text))
        for verdict, instruction in zip(followed, instructions, strict=True)
    ]
    return followed, loosely
