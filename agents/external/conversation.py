"""One episode's conversation between an external program and the policy, as rows of exact tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.agent import OutOfBudget, Sampler
from envgym.agents.token_level import extend
from envgym.engine import Generation
from envgym.errors import InvalidOutcome, TurnRefused
from envgym.render import Renderer
from envgym.render.spelling import after_prompt
from envgym.rollout.transcript import Transcript
from envgym.types import Episode, Limit, Message, Observation, Outcome, Row, Task, ToolSpec, Turn

Answer = tuple[Message, Generation, list[int]]
"""The policy's message, what was sampled, and the tokens it was sampled after."""


class Branch:
    """One growing conversation: requests that repeat it and add to it continue it."""

    def __init__(self, renderer: Renderer, transcript: Transcript, tools: tuple[ToolSpec, ...]) -> None:
        self.dialogue = renderer.dialogue()
        self.transcript = transcript
        self.tools = tools
        self.known: list[Message] = []
        self.busy = False

    def continues(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> bool:
        """Tell whether a request repeats this conversation up to the policy's last turn and adds what others said."""
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
    request could not be answered (the engine broke, say), unless a later one was: whatever the program made of that
    says nothing about the policy. `refusal` is why the last request that was refused was. `missing_calls` counts the
    turns without a tool call for which the program required one; None where it never did.
    """

    def __init__(
        self, renderer: Renderer, engine: Sampler, sampling: Mapping[str, Any] | None, max_tokens: int | None
    ) -> None:
        self.limit: Limit | None = None
        self.error: Exception | None = None
        self.refusal = ""
        self.missing_calls: int | None = None
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._renderer = renderer
        self._engine = engine
        self._sampling = dict(sampling or {})
        engine.limit(max_tokens)
        self._branches: list[Branch] = []
        self._last: tuple[str, Generation] | None = None

    async def complete(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None
    ) -> Answer:
        """Sample the assistant's next message.

        Raises `OutOfBudget` where the episode may say no more, `PromptTooLong` where a first prompt leaves no room.
        """
        before = self.error
        try:
            answer = await self._complete(messages, tools, max_tokens)
        except (TurnRefused, OutOfBudget) as error:
            self.limit = error.reason if isinstance(error, OutOfBudget) else Limit.TEMPLATE
            raise OutOfBudget(self.limit) from None
        except Exception as error:
            self.error = error
            raise
        if self.error is before:  # else another request has failed meanwhile
            self.error = None
        return answer

    async def _complete(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None
    ) -> Answer:
        branch = next((branch for branch in self._branches if branch.continues(messages, tools)), None)
        if branch is None:
            branch = Branch(self._renderer, Transcript(self._engine), tools)
            branch.transcript.begin(branch.dialogue.begin(Observation(after_prompt(messages), tools=tools)))
            self._branches.append(branch)
        else:
            extend(
                branch.transcript, branch.dialogue.add_observation(Observation(tuple(messages[len(branch.known) :])))
            )
        branch.busy = True
        try:
            context = branch.transcript.context.tolist()
            generation = await self._sample(branch.transcript, max_tokens)
        except BaseException:
            branch.known = []  # it ends with words that nobody answered: the request, sent again, begins anew
            raise
        finally:
            branch.busy = False
        message = branch.dialogue.add_policy_turn(generation.token_ids)
        # A malformed call has no form in the API: the program gets it as the text it is.
        calls = () if any(call.error for call in message.tool_calls) else message.tool_calls
        content = branch.dialogue.content if calls else message.text
        reply = replace(Message.of("assistant", content), tool_calls=calls)
        branch.known = [*messages, reply]
        self.turns.append(branch.transcript.rows[-1].turns[-1])
        self.messages = list(branch.dialogue.messages)
        self._last = reply.text, generation
        return reply, generation, context

    async def _sample(self, transcript: Transcript, max_tokens: int | None) -> Generation:
        """Sample under the run's sampling parameters, so that what is trained is what explores; a program may ask for
        fewer tokens."""
        most = self._sampling.get("max_tokens", self._engine.sampling.max_tokens)
        most = most if max_tokens is None else min(most, max_tokens)
        return await transcript.sample({**self._sampling, "max_tokens": most})

    def check_turns(self, program: str) -> None:
        """Raise `InvalidOutcome` where `program` has had no turn of the policy's."""
        if not self.turns and self.refusal:
            raise InvalidOutcome("agent", f"every call of {program} was refused, the last one so: {self.refusal}")
        if not self.turns:
            raise InvalidOutcome("agent", f"{program} made no call to the policy")

    def token_ids_of(self, text: str) -> Sequence[int]:
        """The token ids of the program's answer, where it is the policy's last turn unchanged; else none."""
        assert self._last is not None, "the policy has said nothing"
        last, generation = self._last
        return generation.token_ids if last.strip() == text.strip() else ()

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
        """The episode as a whole, truncated where the policy could say no more. The reward is the turn's that was
        sampled last."""
        whole = Transcript(None)
        whole.rows, whole.messages = self.rows, messages
        whole.add_reward(reward, info)
        whole.metrics["calls"] = float(len(self.turns))
        if self.missing_calls is not None:
            whole.metrics["missing_tool_calls"] = float(self.missing_calls)
        return whole.episode(task, outcome if self.limit is None else Outcome.truncated(self.limit))


def _same(one: Message, other: Message) -> bool:
    """Tell whether a program repeats a message. It may drop what it does not need, and add spaces at the ends."""
    calls = [[(call.name, dict(call.arguments)) for call in message.tool_calls] for message in (one, other)]
    return one.role == other.role and one.text.strip() == other.text.strip() and calls[0] == calls[1]
