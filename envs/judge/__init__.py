"""Answers in one turn, graded by a language model: each by itself, or the group's answers ranked."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from envgym.env import Env, Info, StepResult
from envgym.errors import ConfigError, InvalidOutcome
from envgym.services import Chat, ChatClient, Service
from envgym.tasks import DataEnvConfig, DataEnvSpec
from envgym.types import Action, Episode, Judgement, Message, Task, as_messages

from .prompts import Question, ranking_prompt, scoring_prompt
from .replies import ranking_in, score_in

Found = TypeVar("Found")


class JudgeConfig(DataEnvConfig):
    judge: Chat | None = None
    """The model that grades: `env.judge.base_url`, `env.judge.model`, `env.judge.api_key_env`, …"""
    mode: Literal["score", "rank"] = "score"
    """`score`: each answer by itself. `rank`: the answers of a group against each other, best 1 and worst 0."""
    rubric: str = "Grade how correct, complete and helpful the answer is."
    """The criteria of the grade."""
    lowest: float = Field(0.0, allow_inf_nan=False)
    """The worst grade, worth 0."""
    highest: float = Field(10.0, allow_inf_nan=False)
    """The best grade, worth 1."""
    orders: int = Field(2, ge=1)
    """Orders in which answers to rank are shown, each asked for by itself, so that no place is favoured."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge. Above 0 it is given a seed, which makes its grades repeatable where the API honours it."""
    max_tokens: int = Field(1024, ge=1)
    """Longest reply of the judge, in tokens."""
    asks: int = Field(2, ge=1)
    """Times the judge is asked before a reply that cannot be read fails the episode."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds an answer may wait for its grade, the queue included."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError("lowest must be below highest")
        return self


class JudgeEnv(Env):
    """Poses the task and pays the judge's grade, from 0 to 1; ranked answers are paid once the group is finished."""

    spec: JudgeSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.task: Task = (options or {})["task"]
        return list(as_messages(self.task.prompt)), {}

    async def step(self, action: Action) -> StepResult:
        if self.spec.config.mode == "rank":
            return (), None, True, False, {}
        score = await self.spec.grade(self.task, action.text)
        return (), score, True, False, {"score": score}


class JudgeSpec(DataEnvSpec):
    """Answers in one turn, graded by a language model: each by itself, or the answers of a group ranked."""

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
        """The reference answer, where the data holds one."""
        if not isinstance(task.answer, str):
            return super().demonstrations(task, seed)
        return [task.answer]

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Judgement] | None:
        if self.config.mode == "score":
            return None
        answers = [_last_answer(episode) for episode in episodes]
        distinct = sorted(set(answers))  # equal answers share a place, and the order of arrival says nothing
        if len(distinct) == 1:  # nothing to compare it with: graded by itself, so that single answers are worth a score
            score = await self.grade(task, distinct[0])
            return [Judgement(score)] * len(answers)
        standings, agreed = await self.rank(task, distinct)
        worth = dict(zip(distinct, standings, strict=True))
        return [Judgement(worth[answer], metrics={"order_agreement": agreed}) for answer in answers]

    async def grade(self, task: Task, answer: str) -> float:
        """The judge's grade of one answer, from 0 to 1. Raises `InvalidOutcome` of kind `judge` where it gives none."""
        config = self.config
        prompt = scoring_prompt(_question(task, config.rubric), answer, config.lowest, config.highest)
        form = f'{{"score": N}}, where N is a number from {config.lowest:g} to {config.highest:g}'
        grade = await self._ask(prompt, lambda reply: score_in(reply, config.lowest, config.highest), form, seed=0)
        return (grade - config.lowest) / (config.highest - config.lowest)

    async def rank(self, task: Task, answers: Sequence[str]) -> tuple[list[float], float]:
        """Each answer's worth against the others, 1 (always best) to 0 (always worst), and the share of pairs that were
        put in the same order whichever way they were shown (1 with one order)."""
        form = f'{{"ranking": [N, …]}} with the numbers 1 to {len(answers)}, best first, each once'
        rankings = []
        for number in range(self.config.orders):
            shown = order_of(task.key, answers, number)
            prompt = ranking_prompt(_question(task, self.config.rubric), [answers[index] for index in shown])
            best_first = await self._ask(prompt, lambda reply: ranking_in(reply, len(answers)), form, seed=number)
            rankings.append([shown[place - 1] for place in best_first])
        return standing(rankings), agreement(rankings)

    async def _ask(self, prompt: str, read: Callable[[str], Found | None], form: str, seed: int) -> Found:
        """The content of the judge's reply; one that `read` returns None for is answered with the form it should
        have."""
        client: ChatClient = self.clients["judge"]
        messages = [Message.of("user", prompt)]
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
            if (found := read(reply)) is not None:
                return found
            messages += [Message.of("assistant", reply), Message.of("user", reminder)]
        raise InvalidOutcome("judge", f"the judge's reply cannot be read: {reply.strip()[-120:]!r}")


def _question(task: Task, rubric: str) -> Question:
    messages = as_messages(task.prompt)
    alone = len(messages) == 1
    text = "\n\n".join(message.text if alone else f"{message.role}: {message.text}" for message in messages)
    return Question(text, "" if task.answer is None else str(task.answer), rubric)


def _last_answer(episode: Episode) -> str:
    return next((message.text for message in reversed(episode.messages) if message.role == "assistant"), "")


def order_of(key: str, answers: Sequence[str], number: int) -> list[int]:
    """The order in which answers are shown for the `number`th time: shuffled by what is asked, then the same backwards,
    then shuffled anew, and so on. A judge that favours a place favours it for both ends of every pair."""
    text = "\x1f".join([key, str(number // 2), *answers])
    rng = random.Random(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())
    order = rng.sample(range(len(answers)), len(answers))
    return order[::-1] if number % 2 else order


def standing(rankings: Sequence[Sequence[int]]) -> list[float]:
    """Each item's mean place over rankings (best first), as 1 for always first down to 0 for always last."""
    count = len(rankings[0])
    places = [[ranking.index(item) for ranking in rankings] for item in range(count)]
    return [1 - sum(place) / len(place) / (count - 1) for place in places]


def agreement(rankings: Sequence[Sequence[int]]) -> float:
    """The share of pairs of items that all rankings put in the same order."""
    pairs = list(combinations(range(len(rankings[0])), 2))
    return sum(len({r.index(a) < r.index(b) for r in rankings}) == 1 for a, b in pairs) / len(pairs)
