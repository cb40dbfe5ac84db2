"""An environment that says the same words every turn, and the agent that plays it: only the controller's own work takes
time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from envgym import Env
from envgym.agents.token_level import MultiTurn, MultiTurnConfig
from envgym.render import load_tokenizer, make_renderer
from envgym.types import Message

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One token before each message and one after each answer, as DeepSeek's: twenty turns fit into 200 tokens."""


class Talks(Env):
    def __init__(self, turns: int = 1, said: str = "") -> None:
        self.turns, self.said = turns, said

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.left = self.turns
        return [Message("user", self.said)], {}

    async def step(self, action: Any) -> Any:
        self.left -= 1
        return [Message("user", self.said)], self.rng.random(), self.left == 0, False, {}


@cache
def agent_of(model: Path) -> MultiTurn:
    """The agent with a tokenizer of bytes, whose lengths are what they are called, and the template above."""
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return MultiTurn(make_renderer("auto", tokenizer), MultiTurnConfig())
