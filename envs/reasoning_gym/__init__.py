"""The puzzles of reasoning-gym, by dataset name: one question, one answer, scored by the dataset's own scorer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult, TaskSet
from envgym.errors import CallTimeout, ConfigError, InvalidOutcome
from envgym.processes.pool import Processes
from envgym.settings import as_list
from envgym.tasks import GeneratedTasks
from envgym.types import Action, Message, Task, add_instruction

from .datasets import TEST_START, Datasets

DATASETS_CLASS = "envgym.envs.reasoning_gym.datasets:Datasets"
GENERATE_SECONDS = 120.0
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of the processes: some datasets write text in the order of sets of strings."""
_OPEN, _CLOSE = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)


class ReasoningGymConfig(EnvConfig):
    """Settings of the environment."""

    dataset: str | list[str] | dict[str, float] = "chain_sum"
    """Name of a dataset, several, or several with weights."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the dataset (`{min_terms: 2}`); of several datasets by name (`{chain_sum: {min_terms: 2}}`)."""
    level: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(as_list)] = Field(default_factory=list)
    """Level of the datasets' curricula, from 0, or several to draw from. It becomes the tasks' difficulty. Unset: the
    datasets' own parameters."""
    attributes: dict[str, int] = Field(default_factory=dict)
    """Levels of single attributes of the curriculum, over `level`."""
    size: int | None = Field(None, ge=1)
    """Number of train tasks, repeated without end. Unset: endlessly many."""
    seed: int = Field(0, ge=0, lt=2**30)
    """Seed of the puzzles. Close seeds share them: in most datasets item N of a seed is item N - 1 of the next."""
    exact: bool = False
    """Reward 1 for a perfect score and 0 for less. False: the score of the dataset's scorer, possibly in between."""
    instruction: str = "Give the final answer, and nothing else, between <answer> and </answer>."
    """Added to every question; empty for none."""
    score_timeout: float = Field(20.0, gt=0)
    """Seconds to score one answer; then it counts as wrong."""
    processes: int = Field(2, ge=1)
    """Processes that make and score puzzles."""

    @model_validator(mode="after")
    def _check(self) -> ReasoningGymConfig:
        if not self.weights:
            raise ValueError("dataset names no dataset")
        if any(weight <= 0 for weight in self.weights.values()):
            raise ValueError("the weights in dataset must be positive")
        for name, params in self.params_of.items():
            if name not in self.weights:
                raise ValueError(f"params are of several datasets by name, and {name!r} is none of them")
            if not isinstance(params, dict):
                raise ValueError(f"params of {name} are names to values")
            if reserved := {"seed", "size"} & set(params):
                raise ValueError(f"{reserved.pop()} is a setting of its own, not one of params")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weight by dataset name."""
        if isinstance(self.dataset, dict):
            return self.dataset
        return dict.fromkeys([self.dataset] if isinstance(self.dataset, str) else self.dataset, 1.0)

    @property
    def params_of(self) -> dict[str, Any]:
        """Parameters by dataset name."""
        return {self.dataset: self.params} if isinstance(self.dataset, str) else self.params


class ReasoningGymEnv(Env):
    """Presents a puzzle of reasoning-gym; the reward is the score by its dataset's scorer."""

    spec: ReasoningGym
    config: ReasoningGymConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        return add_instruction(str(self.task.prompt), self.config.instruction), {}

    async def step(self, action: Action) -> StepResult:
        answer = extract_answer(action.text)
        score, failure = await self.spec.score(self.task, answer)
        metrics = {
            "answered": float(tagged_answer(action.text) is not None),
            "scorer_timeout": float(failure == "timeout"),
            "scorer_crash": float(failure == "crash"),
        }
        if len(self.config.weights) > 1:
            metrics[f"score_{self.task.fields['dataset']}"] = score
        return None, score, True, False, {"score": score, "answer": answer or None, "metrics": metrics}


class ReasoningGym(EnvSpec):
    """The datasets, in processes that make items and score answers."""

    env_class = ReasoningGymEnv
    Config = ReasoningGymConfig
    config: ReasoningGymConfig

    processes: Processes[Datasets]

    async def setup(self) -> None:
        settings, count = {"config": self.config}, self.config.processes
        self.processes = Processes(DATASETS_CLASS, settings, count=count, name="reasoning_gym", environ=SAME_HASHES)
        await self.processes.start()
        self.closing.push_async_callback(self.processes.close)

    def tasks(self, split: str) -> TaskSet:
        """Task N is item N of the datasets; `test` counts from `TEST_START`. No question is in both splits."""
        if split == "train":
            return GeneratedTasks(self.task, self.config.size)
        return GeneratedTasks(lambda index: self.task(TEST_START + index))

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The right answer, tagged. A few datasets have none."""
        if task.answer is None:
            raise ConfigError(f"dataset {task.fields['dataset']} has no answers to demonstrate")
        return [f"<answer>{task.answer}</answer>"]

    async def task(self, number: int) -> Task:
        """Item `number` as a task."""
        item = await self.processes.run(lambda datasets: datasets.item(number), timeout=GENERATE_SECONDS)
        return Task(
            id=f"{item.dataset}-{number}",
            prompt=item.question,
            answer=item.answer,
            fields={"dataset": item.dataset, "number": number},
            difficulty=None if item.level is None else float(item.level),
        )

    async def score(self, task: Task, answer: str) -> tuple[float, str]:
        """The score of an answer, and the scorer's failure: "", or with a score of 0 `timeout` or `crash`."""
        number = task.fields["number"]
        try:
            score = await self.processes.run(
                lambda datasets: datasets.score(number, answer), timeout=self.config.score_timeout, tries=2
            )
        except CallTimeout:
            return 0.0, "timeout"
        except InvalidOutcome as failure:
            if failure.kind != "crash":
                raise
            return 0.0, "crash"
        score = without_length_ratio(score, answer, task.answer)
        return (float(score >= 1) if self.config.exact else score), ""


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`, or None where there is none."""
    for piece in reversed(_CLOSE.split(text)[:-1]):  # one pattern for both would take the square of the text's length
        if len(parts := _OPEN.split(piece, maxsplit=1)) == 2:
            return parts[1].strip()
    return None


def extract_answer(text: str) -> str:
    """The answer in a completion: the tagged text, or without tags the last line that is not empty."""
    answer = tagged_answer(text)
    if answer is not None:
        return answer
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def without_length_ratio(score: float, answer: str, gold: str | None) -> float:
    """The score, or 0 if it is only the reference answer's share of the answer's characters.

    The library gives this score to every answer that contains the reference answer, so that a policy would be rewarded
    for padding, or for listing all possible answers.
    """
    if not gold or not 0 < score < 1:
        return score
    for comma in (",", ""):
        reference, text = gold.replace(comma, ""), answer.replace(comma, "")
        if reference in text and abs(score - len(reference) / len(text)) < 1e-9:
            return 0.0
    return score
