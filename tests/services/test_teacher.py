"""A teacher behind an API: what is asked, what the answer means."""

import asyncio

import numpy as np
import pytest
from aiohttp import web

from envgym.errors import ConfigError, InvalidOutcome
from envgym.services.teacher import ApiTeacher
from envgym.types import ImageSpan, Row, Segment


def sample(*token_ids):
    return Row([Segment("prompt", token_ids[:1]), Segment("action", token_ids[1:])])


def said(*places):
    """An answer of vLLM's server: of each token {id: (logprob, rank)}."""
    logprobs = [
        {str(token): {"logprob": value, "rank": rank, "decoded_token": "x"} for token, (value, rank) in place.items()}
        for place in places
    ]
    return {"choices": [{"text": "", "prompt_logprobs": [None, *logprobs]}]}


def asked(serving, answer, samples, **settings):
    bodies = []

    async def handler(request):
        bodies.append((request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response(answer)

    async def ask():
        async with serving(handler) as url:
            teacher = ApiTeacher(f"{url}/v1", "big", top_k=2, **{"api_key_env": None, **settings})
            teacher.vocabulary = 10
            try:
                return await teacher.forward(samples)
            finally:
                await teacher.close()

    return asyncio.run(ask()), bodies


def test_the_likeliest_tokens_in_the_place_of_each(serving, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    answer = said({7: (-1.5, 3), 4: (-0.5, 1), 5: (-1.0, 2)}, {6: (-0.25, 1), 9: (-2.0, 2)})
    [found], [(path, key, body)] = asked(serving, answer, [sample(3, 7, 6)], api_key_env="KEY")
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body == {"model": "big", "prompt": [3, 7, 6], "max_tokens": 1, "prompt_logprobs": 2}
    assert found.dtype == np.float32
    assert found[1:].tolist() == [[[-0.5, 4], [-1.0, 5]], [[-0.25, 6], [-2.0, 9]]]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"choices": [{"text": ""}]}, "does not answer with 2 prompt_logprobs"),
        (said({4: (-0.5, 1)}), "does not answer with 2 prompt_logprobs"),
        (said({4: (-0.5, 1), 5: (-1.0, 2)}, {4: (-0.5, 1), 5: (-1.0, 2)}), "does not answer with 2 prompt_logprobs"),
        (said({4: (-0.5, 1), 11: (-1.0, 2)}), "has another vocabulary than the policy"),
    ],
)
def test_another_answer_is_said(serving, answer, problem):
    with pytest.raises(InvalidOutcome, match=f"big at http.* {problem}"):
        asked(serving, answer, [sample(3, 7)])


def test_a_row_with_an_image_is_refused(serving):
    """The server would see its placeholders alone."""
    row = Row([Segment("prompt", [3, 5, 5], images=(ImageSpan("ab" * 32, 1, 2),)), Segment("action", [7])])
    with pytest.raises(ConfigError, match=r"^a row has an image, and big at http.* is asked for token ids alone"):
        asked(serving, {}, [sample(3, 7), row])
