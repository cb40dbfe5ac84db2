"""A teacher behind an API: the most likely tokens at each position, as vLLM's server returns them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError, InvalidOutcome
from envgym.net.client import JsonCaller
from envgym.net.tokens import api_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from envgym.types import Row

IN_FLIGHT = 16
SECONDS = 600.0
TRIES = 5


class ApiTeacher:
    """Asks `POST BASE_URL/completions` for `prompt_logprobs`, which vLLM's server has, up to its `--max-logprobs`,
    which must be at least `top_k`. Token ids are sent unmodified, so the teacher must have the policy's tokenizer,
    and an id beyond the policy's `vocabulary` is an error."""

    def __init__(self, base_url: str, model: str, api_key_env: str | None, top_k: int) -> None:
        name = f"{model} at {base_url}"
        secret = api_key(api_key_env, name) if api_key_env else ""
        self._caller = JsonCaller(name, Counter(), secret=secret, timeout=SECONDS, tries=TRIES, concurrency=IN_FLIGHT)
        self._url, self._model = f"{base_url.rstrip('/')}/completions", model
        self._top_k = top_k
        self.vocabulary: int | None = None

    async def close(self) -> None:
        await self._caller.close()

    async def forward(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """[T, k, 2] of each row: log-probabilities of the most likely tokens, in nats and descending, and their ids.
        Raises `InvalidOutcome` where the server does not return them, and `ConfigError` for a row with an image."""
        if any(row.images for row in rows):
            raise ConfigError(
                f"a row has an image, and {self._caller.name} is asked for token ids alone: name a folder or hub id as "
                "the teacher's model, without base_url"
            )
        return list(await asyncio.gather(*(self._ask(row.token_ids.tolist()) for row in rows)))

    async def _ask(self, token_ids: list[int]) -> NDArray[np.float32]:
        """[T, k, 2]: (log-probability, id) of the most likely tokens at each position; zeros at the first. Raises
        `InvalidOutcome` for an unusable answer."""
        import numpy as np

        body = {"model": self._model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": self._top_k}
        answer = await self._caller.post(self._url, body)
        try:
            [_, *positions] = answer["choices"][0]["prompt_logprobs"]
            top_tokens = [_top_tokens(position, self._top_k) for position in positions]
        except (KeyError, IndexError, TypeError, ValueError):
            top_tokens = []
        if len(top_tokens) != len(token_ids) - 1:
            problem = f"does not answer with {self._top_k} prompt_logprobs for each of the prompt's token ids"
            raise InvalidOutcome("service", f"{self._caller.name} {problem}")
        if self.vocabulary and any(token >= self.vocabulary for position in top_tokens for _, token in position):
            raise InvalidOutcome("service", f"{self._caller.name} has another vocabulary than the policy")
        placeholder = [(0.0, 0)] * self._top_k  # for the first token, which is not predicted
        return np.array([placeholder, *top_tokens], np.float32)


def _top_tokens(position: Mapping[str, Any], k: int) -> list[tuple[float, int]]:
    """(log-probability, id) of the k most likely tokens. The server may add the prompt's token as one more."""
    ranked = sorted((entry["rank"], float(entry["logprob"]), int(token)) for token, entry in position.items())
    if len(ranked) < k:
        raise ValueError("too few")
    return [(logprob, token) for _, logprob, token in ranked[:k]]
