"""One episode's conversation between an external program and the policy, as rows of exact tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from envgym.agent import OutOfBudget, Sampler
from envgym.agents.token_level import extend
from envgym.engine import Generation
from envgym.env import EnvSpec
from envgym.errors import InvalidOutcome, TurnRefused
from envgym.render import Renderer
from envgym.render.spelling import mark_after_prompt
from envgym.transcript import Transcript
from envgym.types import (
    Episode,
    Limit,
    Message,
    Observation,
    Outcome,
    Row,
    StopReason,
    Task,
    ToolSpec,
    Turn,
    VersionSpan,
)


class PolicyAnswer(NamedTuple):
    """The policy's message, the sampled turn, its prompt tokens, and the requested text that ended it, if any: the turn
    has that text, the message ends before it."""

    message: Message
    generation: Generation
    context: list[int]
    stop: str | None


class Answering(Protocol):
    """A session's answers to a program's requests."""

    error: Exception | None = None
    """The error of the last request that failed (the engine broke, say); None after a later success."""
    refusal: str = ""
    """The reason of the last rejected request."""
    missing_calls: int | None = None
    """Number of turns without a tool call for which the program required one; None if it never did."""

    async def answer(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None, stop: tuple[str, ...]
    ) -> PolicyAnswer: ...

    def count(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> int: ...


class ConversationBranch:
    """One growing conversation: a request continues it by repeating and extending it."""

    def __init__(self, renderer: Renderer, transcript: Transcript, tools: tuple[ToolSpec, ...]) -> None:
        self.dialogue = renderer.dialogue()
        self.transcript = transcript
        self.tools = tools
        self.messages: list[Message] = []
        self.stopped: dict[int, Message] = {}
        """Messages that ended before a requested text, with that text, by their places: programs may add it again."""
        self.busy = False

    def continues(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> bool:
        """Tell whether a request repeats this conversation up to the policy's last turn and adds other messages."""
        old, new = messages[: len(self.messages)], messages[len(self.messages) :]
        return (
            not self.busy
            and bool(self.messages)
            and tools == self.tools
            and bool(new)
            and all(message.role != "assistant" for message in new)
            and len(old) == len(self.messages)
            and all(self._is_repeated(index, message) for index, message in enumerate(old))
        )

    def _is_repeated(self, index: int, sent: Message) -> bool:
        recorded = (self.messages[index], self.stopped.get(index))
        return any(message is not None and _is_repeated(sent, message) for message in recorded)


class Conversation(Answering):
    """An episode's requests, in branches. Sub-agents, rewritten histories and parallel calls form separate branches."""

    def __init__(
        self, renderer: Renderer, sampler: Sampler, sampling: Mapping[str, Any] | None, max_tokens: int | None,
        spec: EnvSpec | None = None,
    ) -> None:  # fmt: skip
        """`spec` reads the requests' images to the end and stores them."""
        self.limit: Limit | None = None
        """The limit that the policy has reached (`context`, `tokens`, `template`), if any."""
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._spec = spec
        self._renderer = renderer
        self._sampler = sampler
        self._sampling = dict(sampling or {})
        sampler.limit(max_tokens)
        sampler.record = lambda task, outcome: self.episode(task, outcome, None, {}, self.messages)
        self._branches: list[ConversationBranch] = []
        self._last: tuple[str, Generation] | None = None

    async def answer(
        self,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...],
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
    ) -> PolicyAnswer:
        """Sample the assistant's next message, up to the first of the texts in `stop`.

        Raises `OutOfBudget` if the episode has reached a limit, `PromptTooLong` if a first prompt fills the context,
        `InvalidStep` for an image that cannot be read.
        """
        previous_error = self.error
        try:
            if self._spec is not None:
                messages = await self._spec.checked_images(tuple(messages))
            answer = await self._answer(messages, tools, max_tokens, stop)
        except (TurnRefused, OutOfBudget) as error:
            self.limit = error.reason if isinstance(error, OutOfBudget) else Limit.TEMPLATE
            raise OutOfBudget(self.limit) from None
        except Exception as error:
            self.error = error
            raise
        if self.error is previous_error:  # otherwise a concurrent request has failed
            self.error = None
        return answer

    def count(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> int:
        """The number of tokens of these messages as a prompt. Raises `InvalidStep` if they cannot be rendered."""
        return len(self._renderer.prompt(Observation(mark_after_prompt(messages), tools=tools)))

    async def _answer(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None, stop: tuple[str, ...]
    ) -> PolicyAnswer:
        branch = next((branch for branch in self._branches if branch.continues(messages, tools)), None)
        observation: Observation | None = None
        if branch is None:
            branch = ConversationBranch(self._renderer, Transcript(self._sampler, is_whole=False), tools)
            extend(branch.transcript, branch.dialogue.begin(Observation(mark_after_prompt(messages), tools=tools)))
            self._branches.append(branch)
        else:
            observation = Observation(tuple(messages[len(branch.messages) :]))
        branch.busy = True
        try:
            if observation is not None:
                extend(branch.transcript, branch.dialogue.add_observation(observation))
            context = branch.transcript.context.tolist()
            generation = await self._sample(branch.transcript, max_tokens, stop)
        except BaseException:
            branch.messages = []  # the last message has no answer: a retried request starts a new branch
            raise
        finally:
            branch.busy = False
        message = branch.dialogue.add_policy_turn(generation.token_ids)
        ending = self._ending(generation.token_ids, stop)
        # The API has no form for a malformed call: the program gets its text.
        calls = () if any(call.error for call in message.tool_calls) else message.tool_calls
        content = branch.dialogue.content if calls else message.text
        text, ending_in_content, _ = content.partition(ending) if ending else (content, "", "")
        reply = Message("assistant", text, calls)
        if ending_in_content:
            branch.stopped[len(messages)] = Message("assistant", text + ending_in_content, calls)
        branch.messages = [*messages, reply]
        self.turns.append(branch.transcript.rows[-1].turns[-1])
        self.messages = list(branch.dialogue.messages)
        self._last = content, generation
        return PolicyAnswer(reply, generation, context, ending)

    async def _sample(self, transcript: Transcript, max_tokens: int | None, stop: tuple[str, ...]) -> Generation:
        """Sample under the run's sampling parameters, so that training matches exploration; a program may only ask for
        fewer tokens."""
        limit = self._sampler.sampling.with_overrides(self._sampling).max_tokens
        limit = limit if max_tokens is None else min(limit, max_tokens)
        overrides = {**self._sampling, "max_tokens": limit}
        if not stop:
            return await transcript.sample(overrides)
        return await transcript.sample({**overrides, "stop": stop}, partial(self._cut, stop))

    def _cut(self, stop: tuple[str, ...], generation: Generation) -> Generation:
        """The turn up to the token that completes a text in `stop`, after which an engine may have gone on."""
        ids = generation.token_ids
        length = bisect_left(range(len(ids)), True, key=lambda n: self._ending(ids[: n + 1], stop) is not None) + 1
        if length > len(ids):
            return generation
        versions = (
            VersionSpan(s.version, s.start, min(s.end, length)) for s in generation.versions if s.start < length
        )
        return Generation(ids[:length], generation.logprobs[:length], StopReason.STOP, tuple(versions))

    def _ending(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> str | None:
        """The text in `stop` that comes first in a turn; None without any."""
        text = self._renderer.text(token_ids)
        places = [(text.find(ending), ending) for ending in stop if ending in text]
        return min(places)[1] if places else None

    def check_turns(self, program: str) -> None:
        """Raise `InvalidOutcome` if the policy has answered no request of `program`."""
        if not self.turns and self.refusal:
            raise InvalidOutcome("agent", f"every call of {program} was refused, the last one so: {self.refusal}")
        if not self.turns:
            raise InvalidOutcome("agent", f"{program} made no call to the policy")

    def token_ids_of(self, text: str) -> Sequence[int]:
        """The token ids of the program's answer if it is the policy's last turn unchanged, else none."""
        assert self._last is not None, "the policy has answered no request"
        last, generation = self._last
        return generation.token_ids if last.strip() == text.strip() else ()

    @property
    def rows(self) -> list[Row]:
        """The rows, sorted by their last sampled turn, so that the reward at the end goes to the last row."""
        order = {id(turn): number for number, turn in enumerate(self.turns)}
        rows = [row for branch in self._branches for row in branch.transcript.rows if row.turns]
        return sorted(rows, key=lambda row: order[id(row.turns[-1])])

    def episode(
        self, task: Task, outcome: Outcome, reward: float | None, info: Mapping[str, Any], messages: list[Message]
    ) -> Episode:
        """The whole episode, truncated if the policy reached a limit. The last sampled turn gets the reward."""
        transcript = Transcript(None)
        transcript.rows, transcript.messages = self.rows, messages
        if transcript.rows:
            transcript.add_reward(reward, info)
        transcript.metrics["calls"] = float(len(self.turns))
        if self.missing_calls is not None:
            transcript.metrics["missing_tool_calls"] = float(self.missing_calls)
        return transcript.episode(task, outcome if self.limit is None else Outcome.truncate(self.limit))


def _is_repeated(sent: Message, recorded: Message) -> bool:
    """Tell whether a program repeats a message. It may drop fields that it does not need and add outer spaces."""
    calls = [[(call.name, dict(call.arguments)) for call in message.tool_calls] for message in (sent, recorded)]
    contents = ["".join(getattr(part, "sha256", part.text) for part in m.content).strip() for m in (sent, recorded)]
    return sent.role == recorded.role and contents[0] == contents[1] and calls[0] == calls[1]
