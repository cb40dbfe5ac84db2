"""Answers in one turn, graded by a language model: each separately, or the group's answers ranked."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.services import Chat, ChatClient, Service
from envgym.types import Action, Episode, Message, Reward, Task, TextPart, as_messages
from envgym.types.messages import images_in

from .prompts import Question, ranking_prompt, scoring_prompt
from .replies import ranking_in, score_in

Parsed = TypeVar("Parsed")


class JudgeConfig(DataEnvConfig):
    judge: Chat | None = None
    """The model that grades: `env.judge.base_url`, `env.judge.model`, `env.judge.api_key_env`, …"""
    mode: Literal["score", "rank"] = "score"
    """`score`: grade each answer separately. `rank`: rank the answers of a group, the best 1 and the worst 0."""
    rubric: str = "Grade how correct, complete and helpful the answer is."
    """The criteria of the grade."""
    lowest: float = Field(0.0, allow_inf_nan=False)
    """The worst grade: a reward of 0."""
    highest: float = Field(10.0, allow_inf_nan=False)
    """The best grade: a reward of 1."""
    orders: int = Field(2, ge=1)
    """Orders in which to show the answers to rank, each in its own request, so that no position is favoured."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of the judge. Above 0 it gets a seed, so that grades can be repeated if the API honours it."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum tokens of the judge's reply."""
    asks: int = Field(2, ge=1)
    """Requests to the judge before an unreadable reply fails the episode."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds an answer may wait for its grade, including the queue."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError("lowest must be below highest")
        return self


class JudgeEnv(Env):
    """Presents the task. The reward is the judge's grade, from 0 to 1; a ranked answer's comes once the group ends."""

    spec: JudgeSpec
    config: JudgeConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        return list(as_messages(self.task.prompt)), {}

    async def step(self, action: Action) -> StepResult:
        if self.config.mode == "rank":
            return (), None, True, False, {}
        score = await self.spec.grade(self.task, action.text)
        return (), score, True, False, {"score": score}


class JudgeSpec(DataEnvSpec):
    """Answers in one turn, graded by a language model: each separately, or the answers of a group ranked."""

    env_class = JudgeEnv
    Config = JudgeConfig
    config: JudgeConfig
    answer_required = False

    @property
    def services(self) -> Mapping[str, Service]:
        return {"judge": self.config.judge} if self.config.judge is not None else {}

    async def setup(self) -> None:
        if self.config.judge is None:
            raise ConfigError(
                f"environment {self.id}: which judge? Give env.judge.base_url=http://HOST:PORT/v1 and env.judge.model=M"
            )
        await super().setup()

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The reference answer, if the data has one."""
        if not isinstance(task.answer, str):
            return super().demonstrations(task, seed)
        return [task.answer]

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward] | None:
        if self.config.mode == "score":
            return None
        answers = [_last_answer(episode) for episode in episodes]
        distinct = sorted(set(answers))  # equal answers share a rank; the order of arrival does not count
        if len(distinct) == 1:  # nothing to compare it with: a grade, so that single answers get a score too
            score = await self.grade(task, distinct[0])
            return [Reward(score)] * len(answers)
        standings, order_agreement = await self.rank(task, distinct)
        reward_of = dict(zip(distinct, standings, strict=True))
        return [Reward(reward_of[answer], metrics={"order_agreement": order_agreement}) for answer in answers]

    async def grade(self, task: Task, answer: str) -> float:
        """The judge's grade of one answer, from 0 to 1. Raises `InvalidOutcome` of kind `judge` without one."""
        config = self.config
        question = _question(task, config.rubric)
        prompt = [scoring_prompt(question, answer, config.lowest, config.highest), *question.images]
        form = f'{{"score": N}}, where N is a number from {config.lowest:g} to {config.highest:g}'
        grade = await self._ask(prompt, lambda reply: score_in(reply, config.lowest, config.highest), form, seed=0)
        return (grade - config.lowest) / (config.highest - config.lowest)

    async def rank(self, task: Task, answers: Sequence[str]) -> tuple[list[float], float]:
        """Each answer's reward by rank, from 1 (always best) to 0 (always worst), and the share of pairs whose order is
        the same in all rankings (1 with one ranking)."""
        form = f'{{"ranking": [N, …]}} with the numbers 1 to {len(answers)}, best first, each once'
        rankings, question = [], _question(task, self.config.rubric)
        for number in range(self.config.orders):
            order = presentation_order(task.key, answers, number)
            prompt = [ranking_prompt(question, [answers[index] for index in order]), *question.images]
            best_first = await self._ask(prompt, lambda reply: ranking_in(reply, len(answers)), form, seed=number)
            rankings.append([order[position - 1] for position in best_first])
        return mean_standings(rankings), agreement(rankings)

    async def _ask(self, prompt: list[Any], read: Callable[[str], Parsed | None], form: str, seed: int) -> Parsed:
        """Ask the judge until `read` can parse its reply, and return the result. An unreadable reply is answered with a
        reminder of its `form`. Raises `InvalidOutcome` after `asks` of them, or if the judge fails."""
        client: ChatClient = self.clients["judge"]
        messages = [Message("user", prompt)]
        reminder = f"That cannot be read. Reply with nothing but one line of JSON: {form}."
        config = self.config
        for _ in range(config.asks):
            try:
                reply = await client.complete(
                    messages,
                    max_tokens=config.max_tokens,
                    temperature=config.temperature,
                    seed=seed if config.temperature else None,
                )
            except InvalidOutcome as error:
                raise InvalidOutcome("judge", str(error), retryable=error.retryable) from None
            if (result := read(reply)) is not None:
                return result
            messages += [Message("assistant", reply), Message("user", reminder)]
        raise InvalidOutcome("judge", f"the judge's reply cannot be read: {reply.strip()[-120:]!r}")


def _question(task: Task, rubric: str) -> Question:
    messages = as_messages(task.prompt)
    images = images_in(messages)
    numbers = itertools.count(1)

    def text_of(message: Message) -> str:
        parts = [part.text if isinstance(part, TextPart) else f"[image {next(numbers)}]" for part in message.content]
        return "".join(parts) if len(messages) == 1 else f"{message.role}: {''.join(parts)}"

    text = "\n\n".join(map(text_of, messages))
    return Question(text, "" if task.answer is None else str(task.answer), rubric, images)


def _last_answer(episode: Episode) -> str:
    return next((message.text for message in reversed(episode.messages) if message.role == "assistant"), "")


def presentation_order(key: str, answers: Sequence[str], number: int) -> list[int]:
    """The order of the answers in request `number`: a shuffle seeded by the question, then its reverse, then another
    shuffle, and so on. So a judge that favours a position favours both answers of every pair."""
    text = "\x1f".join([key, str(number // 2), *answers])
    rng = random.Random(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())
    order = rng.sample(range(len(answers)), len(answers))
    return order[::-1] if number % 2 else order


def mean_standings(rankings: Sequence[Sequence[int]]) -> list[float]:
    """Each item's mean position over rankings (best first), from 1 for always first to 0 for always last."""
    count = len(rankings[0])
    ranks = [[ranking.index(item) for ranking in rankings] for item in range(count)]
    return [1 - sum(positions) / len(positions) / (count - 1) for positions in ranks]


def agreement(rankings: Sequence[Sequence[int]]) -> float:
    """The share of pairs of items that all rankings put in the same order."""
    pairs = list(combinations(range(len(rankings[0])), 2))
    return sum(len({r.index(a) < r.index(b) for r in rankings}) == 1 for a, b in pairs) / len(pairs)
