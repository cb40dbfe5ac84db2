"""A tokenizer's chat template; probes that are rendered with it reveal its behaviour.

Templates are programs: some end a turn with their own token, some show no tools, some reject a role or take a call's
arguments as text. Nothing here depends on a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from os.path import commonprefix
from typing import Any

from envgym.errors import ConfigError, InvalidStep
from envgym.limits import limits
from envgym.types import Message, ToolCall, ToolSpec
from envgym.types.conversations import END_OF_THOUGHT, THINK

from .spelling import rewrite_tools
from .tool_calls import EXAMPLE, CallForm, Format, describe, find_format, read_hermes, write_hermes

# Texts that no template contains.
QUESTION, ANSWER, QUESTION_2, RESULT, RESULT_1 = "qx1asked", "qx2said", "qx3again", "qx4result", "qx6first"
PROBE = ToolSpec("qx5tool", "qx5tool", {"type": "object", "properties": {"argument": {"type": "string"}}})

RENDERING = 10.0, 2 * 2**30
"""Limits of one rendering in seconds and in bytes of memory, since a template may be a stranger's program. A million
tokens take a second."""
INSTRUCTIONS = ("system", "developer")
THOUGHT = "reasoning_content"
"""The field of an assistant's message in which templates take a thought."""
ChatMessage = dict[str, Any]
"""A message in the form that a template takes."""
EXCHANGE: list[ChatMessage] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


class Template:
    """A tokenizer's chat template. `escape` is applied to all text of tools, whoever wrote them."""

    def __init__(self, tokenizer: Any, added_tokens: Sequence[str], escape: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self._escape = escape
        self._added_tokens = added_tokens
        self._name = tokenizer.name_or_path or "the tokenizer"

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = (), *, open_turn: bool = True) -> str:
        """The text of a conversation; with `open_turn`, up to where the policy's turn begins.

        Raises `InvalidStep` if the template rejects the conversation.
        """
        tools = rewrite_tools(tools, self._escape)
        if tools and not self._shows_tools:
            messages, tools = self._with_description(messages, tools), ()
        return self._render(messages, tools, open_turn)

    def to_template(self, messages: Sequence[Message], previous: Sequence[ChatMessage] = ()) -> list[ChatMessage]:
        """Convert messages, which follow the `previous` ones, to the form that this template takes. Raises
        `InvalidStep` for a role that the template leaves out."""
        result: list[ChatMessage] = []
        for message in messages:
            if message.role == "assistant":
                result.append(self.assistant(message.text, message.tool_calls))
            elif message.role == "tool" and not self._shows_results:
                text = f"<tool_response>\n{message.text}\n</tool_response>"
                if result and "results" in result[-1]:  # roles may have to alternate
                    result[-1]["content"] += f"\n{text}"
                else:
                    result.append({"role": "user", "content": text, "results": True})
            elif message.role in ("user", "tool"):
                result.append(message.as_dict())
            else:
                self._append(result, message.as_dict(), [*previous, *result])
        return result

    def _append(self, messages: list[ChatMessage], message: ChatMessage, previous: Sequence[ChatMessage]) -> None:
        """Append a message of the system or of a role that may be unknown. A developer is the system, unless the
        template has both; a system message that it does not write there joins the one just before it. Raises
        `InvalidStep` for a role that it leaves out without an error."""
        if message["role"] == "developer" and not self._knows_developers:
            message = {**message, "role": "system"}
        role, roles = message["role"], [earlier["role"] for earlier in previous]
        follows = roles[-1] if messages and roles[-1] in INSTRUCTIONS else ""
        is_written = self._shows(role, not roles, follows, role == "system" and "system" in roles)
        if not is_written and role in INSTRUCTIONS and follows:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{message['content']}"}
        elif is_written is False:
            place = " after the first message" if roles else ""
            raise InvalidStep(
                f"the chat template of {self._name} leaves out messages of the role {role!r}{place}: use the roles "
                "system, user, assistant and tool, and system for the first message alone"
            )
        else:
            messages.append(message)

    def assistant(self, content: str, calls: Sequence[ToolCall] = ()) -> ChatMessage:
        """An assistant's message in the form that this template takes; calls that it cannot write become text in
        `content`, and a thought between tags goes where the template takes it."""
        if content.startswith(THINK) and END_OF_THOUGHT in content and self._takes_thoughts:
            thought, _, answer = content.partition(END_OF_THOUGHT)
            message = self.assistant(answer.lstrip("\n"), calls)
            return {**message, THOUGHT: thought.removeprefix(THINK).strip("\n")}
        if not calls:
            return {"role": "assistant", "content": content}
        if self._calls is None:
            return {"role": "assistant", "content": write_hermes(content, calls)}
        form = self._calls[0]
        if content and not self._writes_both:
            return {"role": "assistant", "content": content + self.turn(form("", calls))}
        return form(content, calls)

    def turn(self, message: ChatMessage) -> str:
        """The text of a single assistant's message, without its end-of-turn."""
        header = self._try(EXCHANGE, ()).rpartition(ANSWER)[0]
        text = self._try([EXCHANGE[0], message], ())
        if not header or not text.startswith(header):
            return str(message["content"] or "")
        return self.strip_end_of_turn(text.removeprefix(header))

    def strip_end_of_turn(self, text: str) -> str:
        """Remove the end-of-turn from a text that ends with the assistant's turn."""
        if text.endswith(self._after_last_turn) or not self.end_of_turn:
            return text.removesuffix(self._after_last_turn)
        content, end, _ = text.rpartition(self.end_of_turn)
        return content if end else text

    # -- probes -------------------------------------------------------------------------------------------------

    @cached_property
    def end_of_turn(self) -> str:
        """The text after an assistant's content, up to and including the token that ends the turn. Empty without such a
        token."""
        followed = self._try([*EXCHANGE, {"role": "user", "content": QUESTION_2}], ())
        # The text common to the last turn and an earlier one: some templates end conversations too.
        common = commonprefix([self._after_last_turn, followed.rpartition(ANSWER)[2]])  # noqa: RUF071
        eos = self.tokenizer.eos_token
        ends = [eos] if eos and eos in common else [token for token in self._added_tokens if token.strip()]
        matches = [(common.find(token), -len(token), token) for token in ends if token in common]
        if not matches:
            return ""
        start, _, token = min(matches)
        return common[:start] + token

    @cached_property
    def _after_last_turn(self) -> str:
        return self._try(EXCHANGE, ()).rpartition(ANSWER)[2]

    @property
    def call_format(self) -> Format:
        """The format in which calls are parsed."""
        return read_hermes if self._calls is None else self._calls[1]

    @cached_property
    def _calls(self) -> tuple[CallForm, Format] | None:
        """The form in which the template takes calls, and the format in which it writes them; None if it writes none
        or in an unknown format. Then tools are described in plain text, and called in the Hermes format."""
        return find_format(self.turn)

    @cached_property
    def _writes_both(self) -> bool:
        """True if the template writes both content and calls of one message. Some drop one of them, or raise."""
        assert self._calls is not None
        form, read = self._calls
        reading = read(self.turn(form(ANSWER, [EXAMPLE])), {})
        return ANSWER in reading.content and len(reading.calls) == 1

    @cached_property
    def _shows_tools(self) -> bool:
        """True if the template describes the tools and how to call them."""
        return self._calls is not None and PROBE.name in self._try([EXCHANGE[0]], [PROBE])

    @cached_property
    def _shows_results(self) -> bool:
        """True if the template takes messages of the role `tool`."""
        call = self.assistant("", [EXAMPLE])
        result = {"role": "tool", "content": RESULT, "tool_call_id": EXAMPLE.id, "name": EXAMPLE.name}
        return self._try([EXCHANGE[0], call, result], [PROBE]).count(RESULT) == 1

    @cache  # noqa: B019  # as long as the template itself
    def _shows(self, role: str, is_first: bool = True, follows: str = "", is_second: bool = False) -> bool | None:
        """True if the template writes a message of a role: the first one, one that `follows` that of another role at
        the beginning, or a later one; with `is_second` the earlier one of that role too. None if it rejects the probe,
        which may be due to the order of the roles."""
        first = [{"role": follows or role, "content": RESULT_1}] if follows or is_second else []
        exchange = [] if is_first or follows else EXCHANGE
        probe = [*first, *exchange, {"role": role, "content": RESULT}, {"role": "user", "content": QUESTION_2}]
        try:
            text = self._render(probe, (), False)
        except InvalidStep:
            return None
        return RESULT in text and (not first or RESULT_1 in text)

    @cached_property
    def _knows_developers(self) -> bool:
        """True if the template has its own form for the role `developer`: many write any role by its name."""
        return "developer" in str(self.tokenizer.chat_template) and self._shows("developer") is True

    @property
    def writes_thoughts(self) -> bool:
        """True if the template has marks of thoughts."""
        return END_OF_THOUGHT in str(self.tokenizer.chat_template)

    @cached_property
    def _takes_thoughts(self) -> bool:
        """True if the template takes a thought from a field alone, and not from between tags in the text as well."""
        thought = f"{THINK}\n{RESULT}\n{END_OF_THOUGHT}\n\n"
        inline = self._try([EXCHANGE[0], {"role": "assistant", "content": thought + ANSWER}], ())
        text = self._try([EXCHANGE[0], {**EXCHANGE[1], THOUGHT: RESULT}], ())
        return RESULT in text and "".join(text.split()) != "".join(inline.split())

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template takes a message's content only as a list of parts. Raises `ConfigError` for a template
        that ends for no message."""
        is_shown = []
        for content in (QUESTION, _parts(QUESTION)):
            try:
                is_shown.append(QUESTION in self._apply([{"role": "user", "content": content}], (), False))
            except TimeoutError as error:
                raise ConfigError(f"the chat template of {self._name} cannot be used: {error}") from None
            except Exception:
                is_shown.append(False)
        return is_shown == [False, True]

    def _try(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
        try:
            return self._render(messages, tools, False)
        except InvalidStep:
            return ""

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], open_turn: bool) -> str:
        """Apply the template. Raises `InvalidStep` for any of its errors."""
        if self._wants_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        try:
            return self._apply(messages, tools, open_turn)
        except Exception as error:  # a template's code can raise any error
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            roles = ", ".join(message["role"] for message in messages)
            raise InvalidStep(
                f"the chat template of {self._name} rejects the conversation ({reason}; its roles: {roles}): "
                "use roles that the template takes, or set render=text"
            ) from None

    def _apply(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], open_turn: bool) -> str:
        schemas = [tool.as_dict() for tool in tools] or None
        options = {"tools": schemas, "tokenize": False, "add_generation_prompt": open_turn}
        with limits(*RENDERING):
            return str(self.tokenizer.apply_chat_template(list(messages), **options))

    def _with_description(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[ChatMessage]:
        """Add a description of the tools to the first message, of any role."""
        text = describe(tools, self.turn(self.assistant("", [EXAMPLE])).strip())
        first, *remaining = messages
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *remaining]
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *remaining]


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []
