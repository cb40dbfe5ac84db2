"""Rendering: observations to token ids, and a policy's token ids back to text.

One interface, twice: the tokenizer's own chat template, and plain text for models that have none. What the
policy sampled is never rendered again: its token ids are kept as the engine returned them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, Literal

from .errors import ConfigError, missing_package
from .types import Message, Observation

RenderKind = Literal["auto", "chat", "text"]


class Renderer(ABC):
    """Turns what an environment says into the tokens a policy reads.

    `stop_token_ids` are the ids that end the policy's turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

        self._last: tuple[Observation | None, list[int]] = (None, [])

    def prompt(self, observation: Observation) -> list[int]:
        """Token ids of an episode's first observation, up to where the policy's turn begins."""
        # The members of a group start one after the other, from the same observation.
        if self._last[0] != observation:
            text = observation.text
            rendered = self._messages(observation.messages) if text is None else self._encode(text)
            self._last = (observation, rendered)
        return list(self._last[1])

    @abstractmethod
    def _messages(self, messages: tuple[Message, ...]) -> list[int]: ...

    def answer(self, text: str) -> list[int]:
        """Token ids of an assistant turn with this text, its end-of-turn token included: what a replay plays."""
        return self._encode(text) + list(self.stop_token_ids[:1])

    def text(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """What a turn of the policy says to an environment: its text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class ChatRenderer(Renderer):
    """Messages through the tokenizer's own chat template, with its generation prompt."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        if not tokenizer.chat_template:
            raise ConfigError(f"{tokenizer.name_or_path} has no chat template: set render=text")

    def _messages(self, messages: tuple[Message, ...]) -> list[int]:
        # Text first, then ids: templates write their special tokens as text, and `add_special_tokens` would
        # put a second beginning-of-sequence token before them.
        text = self.tokenizer.apply_chat_template(
            [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self._encode(text)


class TextRenderer(Renderer):
    """Messages as plain text, for base models: `System: …`, `User: …`, then `Assistant:`."""

    def _messages(self, messages: tuple[Message, ...]) -> list[int]:
        lines = [f"{message.role.capitalize()}: {message.text}\n" for message in messages]
        prefix = [self.tokenizer.bos_token_id] if self.tokenizer.bos_token_id is not None else []
        return prefix + self._encode("".join(lines) + "Assistant:")


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises `ConfigError` where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_package("transformers", "train", "rendering prompts") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry; the line below says all
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {model}: its tokenizer cannot be loaded ({reason})") from None


def make_renderer(kind: RenderKind, tokenizer: Any) -> Renderer:
    """The renderer of a kind; `auto` takes the chat template where the tokenizer has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer)
    return TextRenderer(tokenizer)
