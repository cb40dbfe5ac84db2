"""Chat completions of an OpenAI-compatible API, by the openai SDK over our own httpx client and retry policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envgym.errors import missing_package
from envgym.types import Message

from .credentials import api_key
from .http import JsonCaller

try:
    import httpx
    import openai
except ImportError:
    raise missing_package("openai", "api", "an OpenAI-compatible API") from None


class ChatCompletions(JsonCaller):
    """Asks `POST BASE_URL/chat/completions`. The settings are those of `Chat`.

    Raises `ConfigError` where the key's variable is not set.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        counters: Counter[str],
        *,
        api_key_env: str,
        timeout: float,
        tries: int,
        concurrency: int,
        requests_per_minute: float | None,
        extra: Mapping[str, Any],
    ) -> None:
        name = f"{model} at {base_url}"
        super().__init__(
            name,
            counters,
            secret=api_key(api_key_env, name),
            timeout=timeout,
            tries=tries,
            concurrency=concurrency,
            requests_per_minute=requests_per_minute,
        )
        self._model = model
        self._extra = extra
        # The key is not the SDK's to know: it is one of the headers that our client sets.
        self._sdk = openai.AsyncOpenAI(base_url=base_url, api_key="unused", http_client=self.client, max_retries=0)

    def body(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        """The body of a request, with fields added or replaced by `extra`; those that are None are left out."""
        body = {"model": self._model, "messages": [_api_form(message) for message in messages], **fields, **self._extra}
        return {name: value for name, value in body.items() if value is not None}

    async def ask(
        self, body: Mapping[str, Any], *, wrong: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The API's answer; see `post`. Counts its tokens."""
        answer = await self.post("/chat/completions", body, wrong=wrong, tries=tries)
        self.counters.update({name: count or 0 for name, count in usage_of(answer).items()})
        return answer

    async def _send(self, url: str, content: bytes) -> httpx.Response:
        failure: BaseException
        try:
            response: httpx.Response = await self._sdk.post(url, content=content, cast_to=httpx.Response)
            return response
        except openai.APIStatusError as error:
            response = error.response
            return response
        except openai.APIConnectionError as error:
            failure = error.__cause__ or error
        raise failure  # as httpx raised it, with the causes below it


def _api_form(message: Message) -> dict[str, Any]:
    """A message as the API takes it, which wants the arguments of tool calls as text."""
    result = message.as_dict()
    for call in result.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return result


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
