"""Chat completions of an OpenAI-compatible API, and the client of environments, which stores repeatable answers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import ConfigError, InvalidOutcome, reported_as
from envgym.net.client import JsonCaller
from envgym.net.shared_calls import SharedCalls
from envgym.net.tokens import api_key
from envgym.render.spelling import escape_for_api, mark_from_others, rewrite
from envgym.types import Message, TextPart, as_messages
from envgym.types.images import image_url
from envgym.types.messages import images_in

from .client import ChatClient, Conversation
from .declarations import Chat

MAX_STORED = 20_000
"""Repeatable answers stored in memory; the least recently used is dropped first."""


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
        """The body of a request, with fields added or replaced by `extra`; fields that are None are omitted."""
        escaped = [rewrite(message, escape_for_api) for message in _with_results_of_text(messages)]
        dicts = [message.as_dict(arguments_as_text=True, image=image_url) for message in escaped]
        body = {"model": self._chat.model, "messages": dicts, **fields, **self._chat.extra}
        return {name: value for name, value in body.items() if value is not None}

    async def ask(
        self, body: Mapping[str, Any], *, defect: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The API's answer; see `post`. Counts its tokens."""
        answer = await self.post(f"{self._chat.base_url}/chat/completions", body, defect=defect, tries=tries)
        self.counters.update({name: count or 0 for name, count in usage_of(answer).items()})
        return answer


def _with_results_of_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with the images of tools' results after the last of these: servers take them from the user alone."""
    result: list[Message] = []
    for role, run in itertools.groupby(messages, lambda message: message.role):
        run_messages = list(run)
        if role == "tool" and (images := images_in(run_messages)):
            run_messages = [replace(message, content=(TextPart(message.printed),)) for message in run_messages]
            run_messages.append(Message("user", ["The images of the results:", *images]))
        result += run_messages
    return result


def first_choice(answer: Any) -> Mapping[str, Any] | None:
    """The first choice of an answer, which then has a `message`; None where there is none."""
    try:
        choice = answer["choices"][0]
        return choice if isinstance(choice["message"], dict) else None
    except (KeyError, IndexError, TypeError):
        return None


def usage_of(answer: Any) -> dict[str, int | None]:
    """`prompt_tokens` and `completion_tokens`; None where the API gives no valid number."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {name: count if type(count) is int and 0 <= count < 2**31 else None for name, count in counts.items()}


class OpenAIChatClient(ChatClient):
    """Asks the API that a `Chat` declares.

    A repeatable answer (greedy, or sampled with a seed) is requested once: the same request gets the stored answer,
    also from concurrent episodes. Raises `ConfigError` where the key's variable is not set.
    """

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self._cache: Path | None = None
        if chat.cache_dir is not None:
            self._cache = Path(chat.cache_dir).expanduser()
            with reported_as(ConfigError, f"cache_dir: {self._cache} cannot be made"):
                self._cache.mkdir(parents=True, exist_ok=True)
        self._api = ChatCompletions(chat, self.counters)
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._asking: SharedCalls[str, str] = SharedCalls()

    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        prompt = mark_from_others(as_messages(messages))
        body = self._api.body(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        repeatable = temperature == 0 or seed is not None
        return await self._in_home_loop(self._complete_once(body) if repeatable else self._ask(body))

    async def close(self) -> None:
        await self._asking.close()
        await self._api.close()

    async def _complete_once(self, body: Mapping[str, Any]) -> str:
        """The answer to a request: a stored one, that of an equal request in flight, or a new one."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        if (text := self._stored(key)) is not None:
            self.counters["cached"] += 1
            return text
        if key in self._asking:
            self.counters["cached"] += 1
        return await self._asking.result(key, lambda: self._ask_and_store(key, body))

    async def _ask_and_store(self, key: str, body: Mapping[str, Any]) -> str:
        """Ask for an answer, and store it in memory and in the cache folder; a failed write is only counted."""
        text = await self._ask(body)
        self._store(key, text)
        if self._cache is not None:
            path = _file(self._cache, key)
            try:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, json.dumps({"answer": text}))
            except OSError:  # a full disk costs the next run a request, never this one its answer
                self.counters["not_cached"] += 1
        return text

    async def _ask(self, body: Mapping[str, Any]) -> str:
        choice = first_choice(await self._api.ask(body))
        text = choice["message"].get("content") if choice else None
        if not isinstance(text, str):
            self.counters["failures"] += 1
            raise InvalidOutcome("service", f"{self._api.name} answers without any text")
        return text

    # -- stored answers ---------------------------------------------------------------------------------

    def _stored(self, key: str) -> str | None:
        """The answer from memory or the cache folder, or None."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        if self._cache is None or (text := _read(_file(self._cache, key))) is None:
            return None
        self._store(key, text)
        return text

    def _store(self, key: str, text: str) -> None:
        self._answers[key] = text
        if len(self._answers) > MAX_STORED:
            self._answers.popitem(last=False)


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _read(path: Path) -> str | None:
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["answer"]
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one that a full disk truncated
        return None
    return text if isinstance(text, str) else None
