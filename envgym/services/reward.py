"""The clients of reward models: in a worker process, and behind HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import InvalidOutcome, WorkerDied, WorkerError
from envgym.net.client import JsonCaller, RequestRejected
from envgym.net.tokens import read_token
from envgym.processes.runtime import Runtime
from envgym.render.spelling import escape_for_api, mark_after_prompt, rewrite
from envgym.types import Message, as_messages, refuse_images
from envgym.workers.group import Ranks

from .batches import Batcher
from .client import Assessment, Conversation, RewardClient, Scored, Text, preference
from .declarations import RewardEndpoint, RewardModel

if TYPE_CHECKING:
    from .reward_worker import RewardWorker

BATCHES_PER_ROUND = 8
"""Batches of a reward model per call of its worker, which sorts them by length."""


class RewardModelClient(RewardClient):
    """Scores the conversations of concurrent episodes in batches, in a worker that starts at the first call.

    The worker runs in `runtime` and is named `name`.
    """

    def __init__(self, declared: RewardModel, name: str, runtime: Runtime, *, deterministic: bool = False) -> None:
        super().__init__()
        self._declared = declared
        self._name = name
        self._runtime = runtime
        self._deterministic = deterministic
        self._starting: asyncio.Task[Ranks[RewardWorker]] | None = None
        self._batcher: Batcher[Text, Assessment] = Batcher(self._send, size=BATCHES_PER_ROUND * declared.batch_size)

    async def assess(self, conversation: Conversation, *, label: Any = None) -> Assessment:
        text = conversation if isinstance(conversation, str) else _dicts(as_messages(conversation))
        return await self._submit(text)

    async def assess_step(self, prompt: Conversation, steps: Sequence[str], *, is_last: bool) -> float:
        text: Text = {"before": _dicts(as_messages(prompt)), "steps": [*steps], "is_last": is_last}
        return preference((await self._submit(text)).reward)

    async def _submit(self, text: Text) -> Assessment:
        """The assessment of a text. Raises `InvalidOutcome` for one that cannot be sent: an error in the call itself
        would end the worker for all others."""
        try:
            pickle.dumps([[[text]]], protocol=5)  # as deep as it is among a call's arguments
        except Exception as error:
            message = f"reward model {self._declared.model} cannot be sent the conversation ({type(error).__name__})"
            raise InvalidOutcome("service", message) from None
        return await self._in_home_loop(self._batcher.submit(text))

    async def start(self) -> None:
        await self._in_home_loop(self._ranks())

    async def close(self) -> None:
        await self._batcher.close()
        if self._starting is not None:
            self._starting.cancel()
            [ranks] = await asyncio.gather(self._starting, return_exceptions=True)
            if not isinstance(ranks, BaseException):
                await ranks.close()

    async def _ranks(self) -> Ranks[RewardWorker]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Ranks[RewardWorker]:
        """Start the ranks, one after the other: each looks for the device with the most free memory."""
        count = self._declared.ranks
        # Sampling waits for rewards, so each may use every core.
        environ = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // count or 1))
        }
        ranks: Ranks[RewardWorker] = Ranks(self._name, [])
        try:
            for rank in range(count):
                arguments = {"declared": self._declared, "deterministic": self._deterministic, "rank": rank}
                name = self._name if count == 1 else f"{self._name}-{rank}"
                target = "envgym.services.reward_worker:RewardWorker"
                ranks.add(await self._runtime.start(target, arguments, name=name, environ=environ))
            if count > 1:
                address = await ranks.on_first(lambda rank: rank.address())
                await ranks.on_all(lambda rank: rank.join(address))
        except BaseException:
            await ranks.close()
            raise
        return ranks

    async def _send(self, texts: list[Text]) -> list[Assessment | Exception]:
        """Score texts in the worker; an error is returned in place of each text that cannot be scored. Raises
        `InvalidOutcome` if the call fails."""
        ranks = await self._ranks()
        self.counters["requests"] += len(texts)
        self.counters["rounds"] += 1
        try:
            async with asyncio.timeout(self._declared.timeout):
                scored = await ranks.on_all(lambda rank: rank.score(texts))
        except WorkerDied:
            raise  # the run cannot continue without it
        except TimeoutError:
            self.counters["failures"] += len(texts)
            seconds = self._declared.timeout
            raise InvalidOutcome(
                "service", f"reward model {self._declared.model} took longer than {seconds:g} s", retryable=True
            ) from None
        except WorkerError as error:
            self.counters["failures"] += len(texts)
            raise InvalidOutcome("service", str(error), retryable=True) from None
        # Each conversation is scored by one rank; to the others its reward is None. All give the same reason for none.
        results = [max(parts, key=lambda part: part[0] is not None) for parts in zip(*scored, strict=True)]
        return [self._assessment(result) for result in results]

    def _assessment(self, result: Scored) -> Assessment | Exception:
        """The assessment of a reward, or the error (returned) of a text that could not be scored."""
        label = f"reward model {self._declared.model}"
        if isinstance(result, str):
            return InvalidOutcome("service", f"{label} cannot render the conversation ({result})")
        reward, tokens, cut = result
        if reward is None and not tokens:
            return InvalidOutcome("service", f"{label}: there is nothing to score, the text is empty")
        if reward is None:
            return InvalidOutcome(
                "too_long",
                f"{label}: {tokens} tokens are more than it can score: raise max_length, lower rollout.max_tokens, or "
                "let it lose the beginning with too_long=cut",
            )
        if not math.isfinite(reward):
            return InvalidOutcome("service", f"{label} gives {reward}")
        self.counters["cut"] += cut
        metrics = {"cut": float(cut)} if self._declared.too_long == "cut" else {}
        return Assessment(reward, preference(reward), metrics)


@dataclass(frozen=True, slots=True)
class Query:
    """A conversation in the form for an endpoint."""

    query: Text
    prompt: str
    label: Any


class RewardEndpointClient(RewardClient):
    """Sends the conversations of concurrent episodes, in batches, to `/get_reward` servers in turn.

    Raises `ConfigError` where the token file cannot be read.
    """

    def __init__(self, declared: RewardEndpoint) -> None:
        super().__init__()
        self._declared = declared
        secret = "" if declared.token_file is None else read_token(Path(declared.token_file))
        self._callers = {
            url: JsonCaller(
                f"reward endpoint {url}",
                self.counters,
                secret=secret,
                timeout=declared.timeout,
                tries=declared.tries,
                concurrency=declared.concurrency,
            )
            for url in declared.urls
        }
        self._next_url = cycle(declared.urls)
        self._batcher: Batcher[Query, Assessment] = Batcher(
            self._send, size=declared.batch_size, in_flight=declared.concurrency * len(declared.urls)
        )

    async def assess(self, conversation: Conversation, *, label: Any = None) -> Assessment:
        return await self._in_home_loop(self._batcher.submit(self._query(conversation, label)))

    async def close(self) -> None:
        await self._batcher.close()
        await asyncio.gather(*(caller.close() for caller in self._callers.values()))

    def _query(self, conversation: Conversation, label: Any) -> Query:
        """The query for a conversation: a text unmodified; messages as they are or, with a template, as one text."""
        template = self._declared.template
        if isinstance(conversation, str):
            return Query(conversation, "", label)
        marked = mark_after_prompt(as_messages(conversation))
        messages = _dicts([rewrite(message, escape_for_api) for message in marked])
        answer = str(messages[-1]["content"])
        prompt = "\n".join(str(message["content"]) for message in messages[:-1])
        if template is None:
            return Query(messages, prompt, label)
        prefix, _, suffix = template.partition("{answer}")
        return Query(prefix.replace("{prompt}", prompt) + answer + suffix.replace("{prompt}", prompt), prompt, label)

    async def _send(self, queries: list[Query]) -> Sequence[Assessment | Exception]:
        """Send queries to the next server. If it rejects several together, each is sent alone."""
        url = next(self._next_url)
        try:
            return await self._ask(url, queries)
        except RequestRejected as refusal:
            if refusal.status not in (400, 413, 422) or len(queries) == 1:
                raise
        # The server rejects one of them (too long, say): the others must not fail with it.
        return await asyncio.gather(*(self._ask_single(url, query) for query in queries))

    async def _ask_single(self, url: str, query: Query) -> Assessment | Exception:
        try:
            [assessment] = await self._ask(url, [query])
        except InvalidOutcome as failure:
            return failure
        return assessment

    async def _ask(self, url: str, queries: Sequence[Query]) -> list[Assessment]:
        body = {
            "query": [query.query for query in queries],
            "prompts": [query.prompt for query in queries],
            "labels": [query.label for query in queries],
        }
        return _assessments(await self._callers[url].post(url, body), len(queries), url)


def _assessments(answer: Any, count: int, url: str) -> list[Assessment]:
    """The assessments in a server's answer. Raises `InvalidOutcome` unless it has one finite number for each."""
    body = answer if isinstance(answer, Mapping) else {}
    rewards = _numbers(body.get("rewards", body.get("scores")), count)
    if rewards is None:
        raise InvalidOutcome(
            "service", f'reward endpoint {url} does not answer {{"rewards": […]}} with {count} finite numbers'
        )
    scores = _numbers(body.get("scores"), count)
    logs = body.get("extra_logs")
    metrics = {}
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        numbers = _numbers(value if isinstance(value, list) else [value] * count, count)
        if numbers is not None:
            metrics[str(name)] = numbers
    return [
        Assessment(
            reward,
            score=scores[index] if scores is not None and 0 <= scores[index] <= 1 else None,
            metrics={name: numbers[index] for name, numbers in metrics.items()},
        )
        for index, reward in enumerate(rewards)
    ]


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a reward model takes them. Raises `InvalidStep` for an image."""
    refuse_images(messages, "a reward model")
    return [message.as_dict() for message in messages]


def _numbers(value: Any, count: int) -> list[float] | None:
    """`count` finite numbers, else None. Each may be in a list of one, and a single number needs no list."""
    values = value if isinstance(value, list) else [value]
    values = [entry[0] if isinstance(entry, list) and len(entry) == 1 else entry for entry in values]
    if len(values) != count or not all(isinstance(item, int | float) and math.isfinite(item) for item in values):
        return None
    return [float(number) for number in values]
