"""Conversations as plain text, for base models: `System: …`, `User: …`, then `Assistant:`; or without any marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envgym.types import Message, Observation, refuse_images

from .renderer import Dialogue, Extension, Renderer
from .spelling import rewrite_tools
from .tool_calls import EXAMPLE, Reading, describe, read_calls, read_hermes, write_hermes


class TextRenderer(Renderer):
    """Messages as lines that begin with the role. Tools are described before them and called in the Hermes format.

    The assistant's turns end with the tokenizer's end-of-sequence token, and conversations never fork.
    """

    separator = "\n"
    """The text between an assistant's turn and the next message."""
    space = " "
    """The text between the opening of an assistant's turn and the turn."""

    def dialogue(self) -> TextDialogue:
        return TextDialogue(self)

    def _open(self, observation: Observation) -> str:
        tools = rewrite_tools(observation.tools, self.speller.escape)
        head = f"{describe(tools, write_hermes('', [EXAMPLE]))}\n\n" if tools else ""
        return head + self.lines(observation.messages)

    @property
    def _bos_before_messages(self) -> bool:
        return self.tokenizer.bos_token_id is not None

    def escape(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        refuse_images(messages := tuple(messages), "the renderer of plain text (render=text or raw)")
        return super().escape(messages)

    def lines(self, messages: Sequence[Message]) -> str:
        """Messages, and the opening of the policy's turn."""
        texts = [self.turn(m) if m.role == "assistant" else f" {m.text}" for m in messages]
        names = ["System" if m.role == "developer" else m.role.capitalize() for m in messages]
        return "".join(f"{name}:{text}\n" for name, text in zip(names, texts, strict=True)) + "Assistant:"

    def turn(self, message: Message) -> str:
        """A turn of the assistant, after its name."""
        text = message.text.removesuffix(self.end_of_turn)
        return f"{self.space}{write_hermes(text, message.tool_calls)}{self.end_of_turn}"

    @property
    def end_of_turn(self) -> str:
        return self.tokenizer.eos_token or ""


class RawRenderer(TextRenderer):
    """The messages' texts without separators, for prompts that are complete model inputs."""

    separator = space = ""
    others_answer = False

    @property
    def _bos_before_messages(self) -> bool:
        return self._bos_before_text

    def lines(self, messages: Sequence[Message]) -> str:
        return "".join(self.turn(m) if m.role == "assistant" else m.text for m in messages)


class TextDialogue(Dialogue):
    """A dialogue that appends every observation."""

    renderer: TextRenderer

    _is_truncated = False

    def _on_begin(self, observation: Observation, text: str) -> None:
        self._on_text(text)

    def _on_text(self, text: str) -> None:
        # Raw text may be empty, or end with a space or a mark such as `[/INST]`, which an answer follows directly.
        self._needs_space = text[-1:].strip().strip(">]") != ""

    def _read(self, text: str) -> Reading:
        return read_calls(text, read_hermes, self.tools, thinking=False)

    def _demonstration(self, turn: Message) -> str:
        text = self.renderer.turn(turn)
        return text if self._needs_space and not turn.text[:1].isspace() else text.removeprefix(self.renderer.space)

    def _on_policy_turn(self, message: Message, token_ids: Sequence[int], reading: Reading | None) -> None:
        self._is_truncated = len(self._body(token_ids)) == len(token_ids)

    def _extend(self, observation: Observation) -> Extension:
        end = self.renderer.end_of_turn if self._is_truncated else ""
        text = f"{end}{self.renderer.separator}{self.renderer.lines(observation.messages)}"
        self._on_text(text)
        return Extension(self.renderer.encode_after(self._last, text))
