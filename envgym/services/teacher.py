"""A teacher behind an API: the likeliest tokens in the place of each token, as vLLM's server says them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envgym.errors import InvalidOutcome
from envgym.net.client import JsonCaller
from envgym.net.tokens import api_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from envgym.learner import TrainSample

IN_FLIGHT = 16
SECONDS = 600.0
TRIES = 5


class ApiTeacher:
    """Asks `POST BASE_URL/completions` for `prompt_logprobs`, which vLLM's server has: `top_k` of them at most, which
    is its `--max-logprobs`. A text's token ids are sent as they are, so the teacher must have the policy's tokenizer,
    and ids beyond the policy's `vocabulary` show that it has not."""

    def __init__(self, base_url: str, model: str, api_key_env: str | None, top_k: int) -> None:
        name = f"{model} at {base_url}"
        secret = api_key(api_key_env, name) if api_key_env else ""
        self._caller = JsonCaller(name, Counter(), secret=secret, timeout=SECONDS, tries=TRIES, concurrency=IN_FLIGHT)
        self._url, self._model = f"{base_url.rstrip('/')}/completions", model
        self._top_k = top_k
        self.vocabulary: int | None = None

    async def close(self) -> None:
        await self._caller.close()

    async def forward(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """[T, k, 2] of each sample: log-probabilities of the likeliest tokens, in nats, the likeliest first, and their
        ids. Raises `InvalidOutcome` where the server does not say them."""
        return list(await asyncio.gather(*(self._ask(sample.token_ids.tolist()) for sample in samples)))

    async def _ask(self, token_ids: list[int]) -> NDArray[np.float32]:
        import numpy as np

        body = {"model": self._model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": self._top_k}
        answer = await self._caller.post(self._url, body)
        try:
            [_, *places] = answer["choices"][0]["prompt_logprobs"]
            likeliest = [_likeliest(place, self._top_k) for place in places]
        except (KeyError, IndexError, TypeError, ValueError):
            likeliest = []
        if len(likeliest) != len(token_ids) - 1:
            problem = f"does not answer with {self._top_k} prompt_logprobs for each of the prompt's token ids"
            raise InvalidOutcome("service", f"{self._caller.name} {problem}")
        if self.vocabulary and any(token >= self.vocabulary for place in likeliest for _, token in place):
            raise InvalidOutcome("service", f"{self._caller.name} has another vocabulary than the policy")
        nothing = [(0.0, 0)] * self._top_k  # in the place of the first token, which nothing predicts
        return np.array([nothing, *likeliest], np.float32)


def _likeliest(place: Mapping[str, Any], k: int) -> list[tuple[float, int]]:
    """(log-probability, id) of the k likeliest tokens; the prompt's own may be among them as one more."""
    ranked = sorted((found["rank"], float(found["logprob"]), int(token)) for token, found in place.items())
    if len(ranked) < k:
        raise ValueError("too few")
    return [(logprob, token) for _, logprob, token in ranked[:k]]
