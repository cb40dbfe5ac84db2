"""A tokenizer's chat template: its behaviour is found out by rendering with it.

Templates are programs: some end a turn with a token of their own, some show no tools, some refuse a role or want a
call's arguments as text. Nothing here goes by a model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from envgym.errors import InvalidStep
from envgym.types import Message, ToolCall, ToolSpec

from .tool_calls import EXAMPLE, CallForm, Format, describe, find_format, read_hermes, write_hermes

# Words that no template writes by itself.
QUESTION, ANSWER, QUESTION_2, RESULT = "qx1asked", "qx2said", "qx3again", "qx4result"
PROBE = ToolSpec("qx5tool", "qx5tool", {"type": "object", "properties": {"argument": {"type": "string"}}})

Written = dict[str, Any]
"""A message as a template takes it."""
EXCHANGE: list[Written] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


class Template:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, added_tokens: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self._added_tokens = added_tokens
        self._name = tokenizer.name_or_path or "the tokenizer"

    def render(self, messages: Sequence[Written], tools: Sequence[ToolSpec] = (), *, open_turn: bool = True) -> str:
        """The text of a conversation; with `open_turn`, up to where the policy's turn begins.

        Raises `InvalidStep` where the template refuses the conversation.
        """
        if tools and not self._shows_tools:
            messages, tools = self._with_description(messages, tools), ()
        return self._render(messages, tools, open_turn)

    def written(self, messages: Sequence[Message]) -> list[Written]:
        """Messages as this template takes them."""
        result: list[Written] = []
        for message in messages:
            if message.role == "assistant":
                result.append(self.assistant(message.text, message.tool_calls))
            elif message.role == "tool" and not self._shows_results:
                text = f"<tool_response>\n{message.text}\n</tool_response>"
                if result and "results" in result[-1]:  # roles may have to alternate
                    result[-1]["content"] += f"\n{text}"
                else:
                    result.append({"role": "user", "content": text, "results": True})
            else:
                result.append(message.as_dict())
        return result

    def assistant(self, content: str, calls: Sequence[ToolCall] = ()) -> Written:
        """An assistant's message."""
        if not calls:
            return {"role": "assistant", "content": content}
        if self._calls is None:
            return {"role": "assistant", "content": write_hermes(content, calls)}
        form = self._calls[0]
        if content and not self._writes_both:
            return {"role": "assistant", "content": content + self.turn(form("", calls))}
        return form(content, calls)

    def turn(self, message: Written) -> str:
        """An assistant's message alone as the template writes it, without its end-of-turn."""
        header = self._try(EXCHANGE, ()).rpartition(ANSWER)[0]
        text = self._try([EXCHANGE[0], message], ())
        if not header or not text.startswith(header):
            return str(message["content"] or "")
        return self.unended(text.removeprefix(header))

    def unended(self, text: str) -> str:
        """A text that ends with the assistant's turn, without what the template writes after what was said."""
        if text.endswith(self._after_last_turn) or not self.end_of_turn:
            return text.removesuffix(self._after_last_turn)
        before, end, _ = text.rpartition(self.end_of_turn)
        return before if end else text

    # -- found out ----------------------------------------------------------------------------------------------

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after an assistant's content, up to and including the token that ends the
        turn; empty where it writes no such token."""
        again = self._try([*EXCHANGE, {"role": "user", "content": QUESTION_2}], ())
        # What stands there both at the end and before another message: some templates end conversations too.
        common = _common_beginning(self._after_last_turn, again.rpartition(ANSWER)[2])
        eos = self.tokenizer.eos_token
        ends = [eos] if eos and eos in common else [token for token in self._added_tokens if token.strip()]
        found = [(common.find(token), -len(token), token) for token in ends if token in common]
        if not found:
            return ""
        at, _, token = min(found)
        return common[:at] + token

    @cached_property
    def _after_last_turn(self) -> str:
        return self._try(EXCHANGE, ()).rpartition(ANSWER)[2]

    @property
    def call_format(self) -> Format:
        """The format in which calls are read."""
        return read_hermes if self._calls is None else self._calls[1]

    @cached_property
    def _calls(self) -> tuple[CallForm, Format] | None:
        """In which form the template takes calls and in which it writes them; None where it does not, or in a form
        that cannot be read. Then tools are described in words, and called in the Hermes format."""
        return find_format(self.turn)

    @cached_property
    def _writes_both(self) -> bool:
        """True where the template writes content and calls of one message. Some drop one of them, or refuse."""
        assert self._calls is not None
        form, written = self._calls
        reading = written(self.turn(form(ANSWER, [EXAMPLE])), {})
        return ANSWER in reading.content and len(reading.calls) == 1

    @cached_property
    def _shows_tools(self) -> bool:
        """True where the template tells the policy which tools there are and how to call them."""
        return self._calls is not None and PROBE.name in self._try([EXCHANGE[0]], [PROBE])

    @cached_property
    def _shows_results(self) -> bool:
        """True where the template takes messages of the role `tool`."""
        call = self.assistant("", [EXAMPLE])
        result = {"role": "tool", "content": RESULT, "tool_call_id": EXAMPLE.id, "name": EXAMPLE.name}
        return self._try([EXCHANGE[0], call, result], [PROBE]).count(RESULT) == 1

    @cached_property
    def _wants_parts(self) -> bool:
        """True where the template takes a message's content as a list of parts alone."""
        shown = []
        for content in (QUESTION, _parts(QUESTION)):
            try:
                shown.append(QUESTION in self._apply([{"role": "user", "content": content}], (), False))
            except Exception:
                shown.append(False)
        return shown == [False, True]

    def _try(self, messages: Sequence[Written], tools: Sequence[ToolSpec]) -> str:
        try:
            return self._render(messages, tools, False)
        except InvalidStep:
            return ""

    def _render(self, messages: Sequence[Written], tools: Sequence[ToolSpec], open_turn: bool) -> str:
        if self._wants_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        try:
            return self._apply(messages, tools, open_turn)
        except Exception as error:  # whatever a template's code runs into
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            roles = ", ".join(message["role"] for message in messages)
            raise InvalidStep(
                f"the chat template of {self._name} refuses the conversation ({reason}; its roles: {roles}): "
                "say it in roles that the template takes, or set render=text"
            ) from None

    def _apply(self, messages: Sequence[Written], tools: Sequence[ToolSpec], open_turn: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=[tool.as_dict() for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=open_turn,
        )
        return str(text)

    def _with_description(self, messages: Sequence[Written], tools: Sequence[ToolSpec]) -> list[Written]:
        """The messages with the tools described in the first of them, whatever its role."""
        text = describe(tools, self.turn(self.assistant("", [EXAMPLE])).strip())
        first, *others = messages
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []


def _common_beginning(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:at]
