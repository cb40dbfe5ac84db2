"""Conversations through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envgym.errors import ConfigError, InvalidStep, TurnRefused
from envgym.types import Message, Observation, ToolCall

from .dialogue import Dialogue, Extension
from .renderer import Renderer
from .spelling import BREAK, rewrite
from .template import ANSWER, ChatMessage, Template
from .tool_calls import Reading, read_calls


class ChatRenderer(Renderer):
    """Messages through the tokenizer's own chat template, with its generation prompt. With `keep_thoughts`, later
    messages are appended to the exact tokens also where the template would write earlier turns differently."""

    def __init__(self, tokenizer: Any, *, keep_thoughts: bool = False) -> None:
        super().__init__(tokenizer)
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
        self._turns: list[ChatMessage] = []
        self._last_turn: tuple[Message, Sequence[int], Reading | None] | None = None  # the policy's, not yet answered

    def _on_begin(self, observation: Observation, text: str) -> None:
        self._text = text
        self._raw = observation.text is not None
        self._turns = self._template.to_template(observation.messages)

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
            return Extension(self.renderer.encode_after(self._last, text[len(previous_text) :]))
        return Extension(self.renderer.encode(text), fork=True)

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
