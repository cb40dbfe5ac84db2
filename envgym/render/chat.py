"""Conversations through the tokenizer's own chat template; probes that are rendered with it reveal its behaviour.

Templates are programs: some end a turn with their own token, some show no tools, some reject a role or take a call's
arguments as text. Nothing here depends on a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from os.path import commonprefix
from typing import Any

from envgym.errors import ConfigError, InvalidStep, TurnRefused
from envgym.limits import limits
from envgym.types import Message, Observation, ToolCall, ToolSpec
from envgym.types.conversations import END_OF_THOUGHT, THINK
from envgym.types.messages import images_in

from .renderer import Dialogue, Extension, Renderer
from .spelling import BREAK, rewrite, rewrite_tools
from .tool_calls import (
    EXAMPLE,
    CallForm,
    Format,
    Reading,
    describe,
    find_format,
    read_calls,
    read_hermes,
    write_hermes,
)

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
Content = str | list[dict[str, str]]
"""The content of a message in that form."""
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
                text = joined("<tool_response>\n", _form(message)["content"], "\n</tool_response>")
                if result and "results" in result[-1]:  # roles may have to alternate
                    result[-1]["content"] = joined(result[-1]["content"], "\n", text)
                else:
                    result.append({"role": "user", "content": text, "results": True})
            elif message.role in ("user", "tool"):
                result.append(_form(message))
            else:
                self._append(result, _form(message), [*previous, *result])
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
            messages[-1] = {**messages[-1], "content": joined(messages[-1]["content"], "\n\n", message["content"])}
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
            return [{**first, "content": joined(first["content"], "\n\n", text)}, *remaining]
        return [{**first, "content": joined(text, "\n\n", first["content"])}, *remaining]


def _form(message: Message) -> ChatMessage:
    """A message in the form that templates take: its content is a list of parts if it has images."""
    return message.as_dict(image=lambda _: {"type": "image"})


def joined(*contents: Content) -> Content:
    """Contents of messages as one: a text, unless one of them is a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    return [part for content in contents for part in _parts(content)]


def _parts(content: Content | None) -> list[dict[str, str]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


class ChatRenderer(Renderer):
    """Messages through the tokenizer's own chat template, with its generation prompt. With `keep_thoughts`, later
    messages are appended to the exact tokens also where the template would write earlier turns differently."""

    def __init__(
        self, tokenizer: Any, *, keep_thoughts: bool = False, image_size: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(tokenizer, image_size)
        self.keep_thoughts = keep_thoughts
        if not tokenizer.chat_template:
            raise ConfigError(f"{tokenizer.name_or_path} has no chat template: set render=text")
        self.template = Template(tokenizer, tuple(self.added_tokens.values()), self.speller.escape)
        self.has_channels = "<|channel|>" in str(tokenizer.chat_template)
        end_tokens = self.encode_after(self.tokenizer.eos_token_id, self.template.end_of_turn)[-1:]
        self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, *end_tokens]))

    def dialogue(self) -> ChatDialogue:
        return ChatDialogue(self)

    def check_roles(self, messages: Sequence[Message]) -> None:
        self.template.to_template(messages)

    def _open(self, observation: Observation) -> str:
        if not observation.messages:
            raise InvalidStep("the first observation has neither messages nor text")
        # Text first, then ids: templates write their special tokens as text, and `add_special_tokens` would
        # put a second beginning-of-sequence token before them.
        return self.template.render(self.template.to_template(observation.messages), observation.tools)


class ChatDialogue(Dialogue):
    """Renders the whole conversation for each observation. If that text continues the policy's exact token sequence,
    the new part is appended; if not (a template strips earlier thoughts, or trims), the conversation forks."""

    renderer: ChatRenderer

    def __init__(self, renderer: ChatRenderer) -> None:
        super().__init__(renderer)
        self._template = renderer.template
        self._text = ""  # the conversation so far, exactly
        self._raw = False  # True if it holds raw text
        self._opening: tuple[Message, ...] = ()
        self._last_turn: tuple[Message, Sequence[int], Reading | None] | None = None  # the policy's, not yet answered

    def _on_begin(self, observation: Observation, text: str) -> None:
        self._text = text
        self._raw = observation.text is not None
        self._opening = observation.messages

    @cached_property
    def _turns(self) -> list[ChatMessage]:
        """The turns so far, in the template's form. Most episodes end before a second observation, and need none."""
        return self._template.to_template(self._opening)

    def _read(self, text: str) -> Reading:
        reader, is_thinker = self._template.call_format, self._template.writes_thoughts
        return read_calls(text, reader, self.tools, thinking=self._opens_thought, is_thinker=is_thinker)

    @property
    def _opens_thought(self) -> bool:
        """True if the prompt begins the policy's turn with a thought."""
        return self._text[-32:].rstrip().endswith("<think>")

    def _with_opening(self, content: str) -> str:
        """A turn's content, with the opening mark of a thought begun by the prompt: templates search for both marks."""
        thought, closed, _ = content.partition("</think>")
        return f"<think>\n{content}" if self._opens_thought and closed and "<think>" not in thought else content

    def _demonstration(self, turn: Message) -> str:
        """The text of a recorded turn, as the template writes the policy's, with the end of the turn. Adds the policy's
        previous turn to the text first."""
        self._take_last_turn()
        end = self._template.end_of_turn or self.renderer.tokenizer.eos_token or ""
        if self._raw:
            text = turn.text.removesuffix(end)
            return text + (self._assistant_text("", turn.tool_calls) if turn.tool_calls else "") + end
        [message] = self._template.to_template([turn])
        conversation = self._template.render([*self._turns, message], self.tools, open_turn=False)
        if conversation.startswith(self._text):
            return self._template.strip_end_of_turn(conversation[len(self._text) :]) + end
        # The template opens a thought in the prompt, but drops it in earlier turns.
        thought, closed, answer = turn.text.rpartition("</think>")
        answer_text = self._assistant_text(answer, turn.tool_calls)
        if self._opens_thought and not closed:
            return f"\n</think>\n\n{answer_text}{end}"
        thought = thought.removeprefix("<think>").removeprefix("\n") if self._opens_thought else thought
        return thought + closed + answer_text + end

    def _assistant_text(self, content: str, calls: Sequence[ToolCall]) -> str:
        return self._template.turn(self._template.assistant(content, calls))

    def _on_policy_turn(self, message: Message, token_ids: Sequence[int], reading: Reading | None) -> None:
        self._take_last_turn()
        self._last_turn = message, token_ids, reading  # rendered later: most episodes end here

    def _take_last_turn(self) -> list[ChatMessage]:
        """Add the policy's last turn to the text. Returns the candidate forms of it for the template."""
        if self._last_turn is None:
            return []
        (message, token_ids, reading), self._last_turn = self._last_turn, None
        exact = self.renderer.decode_escaped(self._body(token_ids))
        write = self.renderer.speller.escape_policy_text if BREAK in exact else str
        # Also where the completion spells no token: in JSON, `\u003c` stands for a bracket.
        calls = rewrite(replace(message, from_others=True), self.renderer.speller.escape_policy_text).tool_calls
        # Special tokens that mark calls must be preserved; others are no part of the content.
        contents = [exact, write(message.text)] if message.tool_calls else [write(message.text), exact]
        forms = [self._template.assistant(self._with_opening(content)) for content in contents]
        if reading is not None and reading.is_complete:
            content = self._with_opening(write(reading.content.rstrip()))
            forms.insert(0, self._template.assistant(content, calls))
        elif self._opens_thought and "</think>" not in exact:
            forms.insert(0, {**self._template.assistant(""), "reasoning_content": exact})
        self._text += self.renderer.decode_escaped(token_ids)
        return [form for index, form in enumerate(forms) if form not in forms[:index]]

    def _on_text(self, text: str) -> None:
        self._take_last_turn()
        self._raw = True
        self._text += text

    def _accepts(self, turns: list[ChatMessage]) -> bool:
        try:
            self._template.render(turns, self.tools)
        except InvalidStep:
            return False
        return True

    def _extend(self, observation: Observation) -> Extension:
        """Add an observation of messages; a fork if the template does not continue the text so far. Raises
        `InvalidStep`, or `TurnRefused` if the policy's last turn is the reason."""
        if self._raw:
            raise InvalidStep(
                "an observation of messages follows one of raw text, and the chat template cannot continue it: "
                "return messages or text throughout, or set render=text"
            )
        new = self._template.to_template(observation.messages, self._turns)
        forms = self._take_last_turn()
        rendered: list[tuple[str, list[ChatMessage]]] = []
        refusal: InvalidStep | None = None
        for last_turn in [[form] for form in forms] or [[]]:
            turns = [*self._turns, *last_turn, *new]
            try:
                rendered.append((self._template.render(turns, self.tools), turns))
            except InvalidStep as error:
                refusal = refusal or error
                continue
            if rendered[-1][0].startswith(self._text):
                break
        if not rendered:
            assert refusal is not None
            if forms and self._accepts([*self._turns, self._template.assistant("text"), *new]):
                raise TurnRefused("the chat template rejects the policy's completion, which may be empty")
            raise refusal
        text, turns = rendered[-1] if rendered[-1][0].startswith(self._text) else rendered[0]
        has_calls = bool(self.messages and self.messages[-1].tool_calls)
        if self.renderer.keep_thoughts and not (observation.tools or has_calls or text.startswith(self._text)):
            text = self._text + continued if (continued := self._continuation(new)) else text
        previous_text, self._text, self._turns = self._text, text, turns
        if text.startswith(previous_text):
            return self._render_images(text[len(previous_text) :], images_in(observation.messages))
        return self._render_images(text, images_in([*self.messages, *observation.messages]), fork=True)

    def _continuation(self, new: list[ChatMessage]) -> str:
        """The text that the template writes after an answer without a thought, from the token that ended the policy's
        turn on; empty if the template does not show that answer, or ends turns with another token."""
        turns = [*self._turns, self._template.assistant(ANSWER), *new]
        try:
            _, shows, text = self._template.render(turns, self.tools).rpartition(ANSWER)
        except InvalidStep:
            return ""
        has_ended = self._last is not None and self.renderer.ends_turn(self._last)
        end = self._template.end_of_turn if has_ended else ""
        return text.removeprefix(end) if shows and self._text.endswith(end) else ""
