"""Chat completions of an OpenAI-compatible API, and the client of environments, which keeps repeatable answers."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, InvalidOutcome, reported_as
from envgym.net.client import JsonCaller
from envgym.net.shared_calls import SharedCalls
from envgym.net.tokens import api_key
from envgym.render.spelling import broken_up, by_others, rewritten
from envgym.types import Message, as_messages

from .client import ChatClient, Conversation
from .declarations import Chat

IN_MEMORY = 20_000
"""Repeatable answers kept in memory; the longest unused goes first."""


class ChatCompletions(JsonCaller):
    """Asks `POST BASE_URL/chat/completions`.

    Raises `ConfigError` where the key's variable is not set.
    """

    def __init__(self, chat: Chat, counters: Counter[str]) -> None:
        name = f"{chat.model} at {chat.base_url}"
        super().__init__(
            name,
            counters,
            secret=api_key(chat.api_key_env, name),
            timeout=chat.timeout,
            tries=chat.tries,
            concurrency=chat.concurrency,
            requests_per_minute=chat.requests_per_minute,
        )
        self._chat = chat

    def body(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        """The body of a request, with fields added or replaced by `extra`; those that are None are left out."""
        written = [rewritten(message, broken_up).as_dict(arguments_as_text=True) for message in messages]
        body = {"model": self._chat.model, "messages": written, **fields, **self._chat.extra}
        return {name: value for name, value in body.items() if value is not None}

    async def ask(
        self, body: Mapping[str, Any], *, wrong: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The API's answer; see `post`. Counts its tokens."""
        answer = await self.post(f"{self._chat.base_url}/chat/completions", body, wrong=wrong, tries=tries)
        self.counters.update({name: count or 0 for name, count in usage_of(answer).items()})
        return answer


def first_choice(answer: Any) -> Mapping[str, Any] | None:
    """The first choice of an answer, which then has a `message`; None where there is none."""
    try:
        choice = answer["choices"][0]
        return choice if isinstance(choice["message"], dict) else None
    except (KeyError, IndexError, TypeError):
        return None


def usage_of(answer: Any) -> dict[str, int | None]:
    """`prompt_tokens` and `completion_tokens`; None for what the API does not say, or is no number of tokens."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counts = {
        name: usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
    }
    return {name: count if type(count) is int and 0 <= count < 2**31 else None for name, count in counts.items()}


class OpenAIChatClient(ChatClient):
    """Asks the API that a `Chat` declares.

    An answer that is repeatable (greedy, or sampled with a seed) is asked for once: the same question gets the kept
    one, also from several episodes at the same time. Raises `ConfigError` where the key's variable is not set.
    """

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self._cache: Path | None = None
        if chat.cache_dir is not None:
            self._cache = Path(chat.cache_dir).expanduser()
            with reported_as(ConfigError, f"cache_dir: {self._cache} cannot be made"):
                self._cache.mkdir(parents=True, exist_ok=True)
        self._api = ChatCompletions(chat, self.counters)
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._asking: SharedCalls[str, str] = SharedCalls()

    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        asked = by_others(as_messages(messages))
        body = self._api.body(asked, max_tokens=max_tokens, temperature=temperature, seed=seed)
        repeatable = temperature == 0 or seed is not None
        return await self._at_home(self._kept_or_asked(body) if repeatable else self._ask(body))

    async def close(self) -> None:
        await self._asking.close()
        await self._api.close()

    async def _kept_or_asked(self, body: Mapping[str, Any]) -> str:
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        if (kept := self._find(key)) is not None:
            self.counters["cached"] += 1
            return kept
        if key in self._asking:
            self.counters["cached"] += 1
        return await self._asking.result(key, lambda: self._ask_and_keep(key, body))

    async def _ask_and_keep(self, key: str, body: Mapping[str, Any]) -> str:
        text = await self._ask(body)
        self._remember(key, text)
        if self._cache is not None:
            try:
                _write(_file(self._cache, key), text)
            except OSError:  # a full disk costs the next run a question, not this one its answer
                self.counters["not_cached"] += 1
        return text

    async def _ask(self, body: Mapping[str, Any]) -> str:
        choice = first_choice(await self._api.ask(body))
        text = choice["message"].get("content") if choice else None
        if not isinstance(text, str):
            self.counters["failures"] += 1
            raise InvalidOutcome("service", f"{self._api.name} answers without any text")
        return text

    # -- answers that are kept ----------------------------------------------------------------------------

    def _find(self, key: str) -> str | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if self._cache is None or (text := _read(_file(self._cache, key))) is None:
            return None
        self._remember(key, text)
        return text

    def _remember(self, key: str, text: str) -> None:
        self._kept[key] = text
        if len(self._kept) > IN_MEMORY:
            self._kept.popitem(last=False)


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _read(path: Path) -> str | None:
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["answer"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that a full disk cut short
        return None
    return text if isinstance(text, str) else None


def _write(path: Path, text: str) -> None:
    """Whole or not at all: other processes may share the folder."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        json.dump({"answer": text}, file)
    os.replace(file.name, path)
