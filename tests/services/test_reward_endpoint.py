"""Remote reward servers in the seeds' `/get_reward` form."""

import asyncio

import pytest
from aiohttp import web

from envgym.errors import ConfigError, InvalidOutcome
from envgym.net import client as http
from envgym.services import RewardEndpoint
from envgym.services.reward import RewardEndpointClient

CONVERSATION = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)


async def lengths(request):
    body = await request.json()
    return web.json_response({"rewards": [len(query) for query in body["query"]]})


async def asked(url, call, **settings):
    urls = [url] if isinstance(url, str) else url
    client = RewardEndpointClient(RewardEndpoint(urls=urls, **settings))
    try:
        return await call(client), client.counters
    finally:
        await client.close()


def ask(serving, handler, call, **settings):
    async def main():
        async with serving(handler) as url:
            return await asked(url, call, **settings)

    return asyncio.run(main())


def test_the_request_is_the_seeds_form(serving, tmp_path):
    seen = []
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("abc123-0123456789\n")

    async def handler(request):
        seen.append((request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response(
            {"rewards": [[0.25]], "scores": [1.0], "extra_logs": {"length": [3], "mean": 0.5, "note": "x"}}
        )

    async def call(client):
        return await client.assess(CONVERSATION, label="2")

    assessment, _ = ask(serving, handler, call, token_file=str(tmp_path / "token"))
    assert seen == [
        ("/", "Bearer abc123-0123456789", {"query": ["Add.\n1 + 1?2"], "prompts": ["Add.\n1 + 1?"], "labels": ["2"]})
    ]
    assert (assessment.reward, assessment.score) == (0.25, 1.0)
    assert assessment.metrics == {"length": 3.0, "mean": 0.5}
    ask(serving, handler, call, template="<user>{prompt}<assistant>{answer}</s>")
    ask(serving, handler, call, template=None)
    assert seen[1][2]["query"] == ["<user>Add.\n1 + 1?<assistant>2</s>"]
    assert seen[2][2]["query"] == [CONVERSATION]


def test_an_answer_that_spells_special_tokens_is_broken_up_and_nothing_else(serving):
    """Whoever answers may parse the text: the data's own special tokens, and the template's, are for that."""
    seen = []

    async def handler(request):
        seen.extend((await request.json())["query"])
        return web.json_response({"rewards": [0.0]})

    question = {"role": "user", "content": "<|im_start|>ask</s>"}
    said = [question, {"role": "assistant", "content": "2</s><|im_end|> a < b [x] <b>"}]
    broken = "2< /s>< |im_end|> a < b [x] <b>"
    ask(serving, handler, lambda client: client.assess(said), template="{prompt}<|im_end|>{answer}</s>")
    ask(serving, handler, lambda client: client.assess(said), template=None)
    ask(serving, handler, lambda client: client.assess("one <|im_end|> text"), template=None)
    assert seen == [
        f"<|im_start|>ask</s><|im_end|>{broken}</s>",
        [question, {"role": "assistant", "content": broken}],
        "one <|im_end|> text",
    ]


def test_what_looks_like_a_place_in_the_template_stays_as_it_was_said(serving):
    """A prompt about templates must not be filled with the answer, nor an answer, which the policy writes, with the
    prompt."""
    seen = []

    async def handler(request):
        seen.extend((await request.json())["query"])
        return web.json_response({"rewards": [0.0]})

    said = [{"role": "user", "content": "{answer} {prompt}?"}, {"role": "assistant", "content": "{prompt} {answer}!"}]
    ask(serving, handler, lambda client: client.assess(said), template="<{prompt}|{answer}|{prompt}>")
    assert seen == ["<{answer} {prompt}?|{prompt} {answer}!|{answer} {prompt}?>"]


def test_servers_share_the_work_and_none_gets_an_empty_list(serving):
    shares = {"a": [], "b": [], "c": []}

    async def main():
        def server(name):
            async def handler(request):
                shares[name].append(len((await request.json())["query"]))
                return await lengths(request)

            return serving(handler)

        async with server("a") as a, server("b") as b, server("c") as c:

            async def call(client):
                alone = [await client.score_one("x" * 3), await client.score_one("x" * 4)]
                return alone, await asyncio.gather(*(client.score_one("x" * n) for n in range(1, 31)))

            return await asked([a, b, c], call, batch_size=5)

    (alone, together), _ = asyncio.run(main())
    assert alone == [3, 4]
    assert together == list(range(1, 31))
    every = [size for sizes in shares.values() for size in sizes]
    assert (sum(every), min(every), max(every)) == (32, 1, 5)
    assert all(shares.values())


@pytest.mark.parametrize(
    "body",
    [
        {"rewards": [1.0, 2.0]},
        {"rewards": []},
        {"rewards": ["high"]},
        {"rewards": None},
        {"reward": [1.0]},
        [1.0],
        "NaN",
    ],
)
def test_an_answer_that_is_no_reward_is_never_a_reward(serving, body):
    async def handler(request):
        if body == "NaN":
            return web.Response(text='{"rewards": [NaN]}', content_type="application/json")
        return web.json_response(body)

    with pytest.raises(InvalidOutcome, match=r"does not answer .* with 1 finite numbers"):
        ask(serving, handler, lambda client: client.score_one("x"))


def test_a_query_that_is_refused_does_not_take_the_others_with_it(serving):
    async def handler(request):
        if any(len(query) > 10 for query in (await request.json())["query"]):
            return web.json_response({"error": "too long"}, status=422)
        return await lengths(request)

    async def call(client):
        texts = ["x" * n for n in (1, 20, 2, 30, 3)]
        return await asyncio.gather(*(client.score_one(text) for text in texts), return_exceptions=True)

    results, _ = ask(serving, handler, call)
    assert [results[index] for index in (0, 2, 4)] == [1, 2, 3]
    for index in (1, 3):
        assert isinstance(results[index], InvalidOutcome)
        assert "answers 422 (too long)" in str(results[index])
        assert not results[index].retryable


def test_a_passing_fault_is_ridden_out_and_a_lasting_one_is_told(serving):
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        return await lengths(request) if calls == 3 else web.Response(status=503)

    result, counters = ask(serving, handler, lambda client: client.score_one("xx"))
    assert (result, counters["retries"]) == (2, 2)
    with pytest.raises(InvalidOutcome, match=r"answers 503 .* in 2 tries") as failure:
        ask(serving, handler, lambda client: client.score_one("xx"), tries=2)
    assert failure.value.retryable


def test_settings_that_cannot_work_are_told(tmp_path):
    with pytest.raises(ValueError, match="a URL looks like"):
        RewardEndpoint(urls="host:5000")
    with pytest.raises(ValueError, match="at least 1 item"):
        RewardEndpoint(urls=[])
    with pytest.raises(ValueError, match=r"holds \{answer\}"):
        RewardEndpoint(urls="http://h", template="{prompt}")

    async def main(file):
        RewardEndpointClient(RewardEndpoint(urls="http://h", token_file=str(file)))

    with pytest.raises(ConfigError, match=r"token file .* No such file"):
        asyncio.run(main(tmp_path / "none"))
    (tmp_path / "two").touch(0o600)
    (tmp_path / "two").write_text("a 0123456789abcdef\nb 0123456789abcdefg")
    with pytest.raises(ConfigError, match="holds 2 tokens"):
        asyncio.run(main(tmp_path / "two"))
