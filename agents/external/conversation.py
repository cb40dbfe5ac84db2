"""What an outside program and the policy say to each other in one episode, as rows of exact tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.agent import Sampler
from envgym.engines.base import Generation
from envgym.errors import TurnRefused
from envgym.render import Renderer
from envgym.rollout.transcript import OutOfBudget, Transcript
from envgym.types import Episode, Limit, Message, Observation, Outcome, Row, Task, ToolSpec, Turn


class Branch:
    """One growing conversation: requests that repeat it and add to it go on in it."""

    def __init__(self, renderer: Renderer, transcript: Transcript, tools: tuple[ToolSpec, ...]) -> None:
        self.dialogue = renderer.dialogue()
        self.transcript = transcript
        self.tools = tools
        self.known: list[Message] = []
        self.busy = False

    def continues(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> bool:
        """Whether a request repeats this conversation up to the policy's last turn and adds what others said."""
        old, new = messages[: len(self.known)], messages[len(self.known) :]
        return (
            not self.busy
            and tools == self.tools
            and bool(new)
            and all(message.role != "assistant" for message in new)
            and len(old) == len(self.known)
            and all(_same(one, other) for one, other in zip(old, self.known, strict=True))
        )


class Conversation:
    """An episode's requests, in branches. Sub-agents, rewritten histories and parallel calls are branches of their own.

    `limit` is why the policy may say no more (`context`, `tokens`, `template`), once that has happened; `error` why a
    request could not be answered (the engine broke, say) and none was since: whatever the program made of that says
    nothing about the policy.
    """

    def __init__(
        self, renderer: Renderer, engine: Sampler, sampling: Mapping[str, Any] | None, max_tokens: int | None
    ) -> None:
        self.limit: str | None = None
        self.error: Exception | None = None
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._renderer = renderer
        self._engine = engine
        self._sampling = dict(sampling or {})
        self._left = math.inf if max_tokens is None else float(max_tokens)
        self._reserving = 0
        self._freed = asyncio.Event()
        self._branches: list[Branch] = []
        self._generations: list[tuple[str, Generation]] = []

    async def complete(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None
    ) -> tuple[Message, Generation, list[int]]:
        """Sample the assistant's next message. Returns it, what was sampled, and the token ids it was sampled after.

        Raises `OutOfBudget` where the episode may say no more, `PromptTooLong` where a first prompt leaves no room.
        """
        before = self.error
        try:
            answer = await self._complete(messages, tools, max_tokens)
        except TurnRefused:
            self.limit = "template"
            raise OutOfBudget(Limit.TEMPLATE) from None
        except OutOfBudget:
            raise
        except Exception as error:
            self.error = error
            raise
        if self.error is before:  # else another request has failed meanwhile
            self.error = None
        return answer

    async def _complete(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None
    ) -> tuple[Message, Generation, list[int]]:
        branch = next((branch for branch in self._branches if branch.continues(messages, tools)), None)
        if branch is None:
            branch = Branch(self._renderer, Transcript(self._engine), tools)
            observation = Observation(tuple(messages), tools=tools)
            branch.transcript.begin(branch.dialogue.begin(observation))
            self._branches.append(branch)
        else:
            extension = branch.dialogue.add_observation(Observation(tuple(messages[len(branch.known) :])))
            if extension.fork:
                branch.transcript.begin(extension.token_ids)
            else:
                branch.transcript.feedback(extension.token_ids)
        branch.busy = True
        try:
            context = branch.transcript.context
            generation = await self._sample(branch.transcript, max_tokens)
        except BaseException as error:
            branch.known = []  # it holds words that nobody answered: the request, sent again, begins anew
            if isinstance(error, OutOfBudget):
                self.limit = error.reason
            raise
        finally:
            branch.busy = False
        message = branch.dialogue.add_policy_turn(generation.token_ids)
        # A malformed call has no form in the API: the program gets it as the text it is.
        calls = () if any(call.error for call in message.tool_calls) else message.tool_calls
        content = branch.dialogue.content if calls else message.text
        answer = replace(Message.of("assistant", content), tool_calls=calls)
        branch.known = [*messages, answer]
        self.turns.append(branch.transcript.rows[-1].turns[-1])
        self.messages = list(branch.dialogue.messages)
        self._generations.append((answer.text, generation))
        return answer, generation, context

    async def _sample(self, transcript: Transcript, max_tokens: int | None) -> Generation:
        """Sample within what the episode may still say. The run's sampling parameters hold, so that what is trained is
        what explores; a program may ask for less.

        Requests in parallel share the budget: each takes the most it may say out of it and gives back what it left. One
        that finds too little waits for the others, and is cut only where they have left no more.
        """
        most = self._sampling.get("max_tokens", self._engine.sampling.max_tokens)
        most = most if max_tokens is None else min(most, max_tokens)
        while self._left < most and self._reserving:
            self._freed.clear()
            await self._freed.wait()
        if self._left < 1:
            raise OutOfBudget(Limit.TOKENS)
        taken = most if self._left >= most else int(self._left)
        self._left -= taken
        self._reserving += 1
        try:
            generation = await transcript.sample({**self._sampling, "max_tokens": taken})
            taken -= len(generation.token_ids)
        finally:
            self._left += taken
            self._reserving -= 1
            self._freed.set()
        return generation

    def said(self, text: str) -> tuple[int, ...]:
        """The token ids of the program's answer, where it is the policy's last turn unchanged; else none."""
        last, generation = self._generations[-1]
        return tuple(generation.token_ids) if last.strip() == text.strip() else ()

    @property
    def rows(self) -> list[Row]:
        """In the order in which they were last sampled from, so that what the episode earned at its end is the last
        row's, and everything else came before it."""
        when = {id(turn): number for number, turn in enumerate(self.turns)}
        rows = [row for branch in self._branches for row in branch.transcript.rows if row.turns]
        return sorted(rows, key=lambda row: when[id(row.turns[-1])])

    def episode(
        self, task: Task, outcome: Outcome, reward: float | None, info: Mapping[str, Any], messages: list[Message]
    ) -> Episode:
        """The episode as a whole. The reward is the turn's that was sampled last."""
        self.turns[-1].reward = reward
        whole = Transcript(None)
        whole.rows = self.rows
        whole.score, whole.answer = info.get("score"), info.get("answer")
        whole.metrics = {**(info.get("metrics") or {}), "calls": float(len(self.turns))}
        whole.messages = messages
        return whole.episode(task, outcome)


def _same(one: Message, other: Message) -> bool:
    """Whether a program repeats a message. It may drop what it does not need, and add spaces at the ends."""
    calls = [[(call.name, dict(call.arguments)) for call in message.tool_calls] for message in (one, other)]
    return one.role == other.role and one.text.strip() == other.text.strip() and calls[0] == calls[1]
