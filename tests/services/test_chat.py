"""The chat client against a real server that misbehaves in every way a real one does."""

import asyncio
import base64
import json
import logging
import re
import time
import types

import pytest
from aiohttp import web

import envgym
from envgym.config.schema import EngineConfig, RoleConfig
from envgym.engine import ChatRequest, SamplingParams
from envgym.engines.openai import OpenAIEngine
from envgym.errors import ConfigError, InvalidOutcome
from envgym.net import client as http
from envgym.services import Chat, RewardEndpoint, start_services
from envgym.services.chat import OpenAIChatClient
from envgym.settings import validate_settings

KEY = "sk-very-secret-0123456789"
HEADERS = {"host", "content-length", "content-type", "accept", "accept-encoding", "connection", "user-agent"}
"""Headers of a request, beside its own key."""


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("TEST_KEY", KEY)


def says(text, **body):
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}], **body})


def ask(serving, handler, *questions, asking=None, **settings):
    """The answers (or failures) to questions asked at the same time, and the client's counters."""

    async def main():
        async with serving(handler) as url:
            client = OpenAIChatClient(Chat(base_url=f"{url}/v1", model="m", **settings))
            try:
                answers = await asyncio.gather(
                    *(client.complete(question, **(asking or {})) for question in questions), return_exceptions=True
                )
            finally:
                await client.close()
            return answers, client.counters

    return asyncio.run(main())


def test_a_question_is_asked_as_the_api_wants_it(serving):
    asked = []

    async def handler(request):
        assert request.path == "/v1/chat/completions"
        asked.append((request.headers["Authorization"], await request.json()))
        return says("42", usage={"prompt_tokens": 7, "completion_tokens": 2})

    call = envgym.types.ToolCall("1", "add", {"a": 1})
    messages = [
        {"role": "user", "content": "add"},
        envgym.Message("assistant", (), (call,)),
        envgym.Message("tool", (envgym.types.TextPart("3"),), (), "1", "add"),
    ]
    extra = {"max_tokens": None, "max_completion_tokens": 9}
    answers, counters = ask(
        serving, handler, messages, asking={"seed": 5, "temperature": 0.5}, api_key_env="TEST_KEY", extra=extra
    )
    assert answers == ["42"]
    [(authorization, body)] = asked
    assert authorization == f"Bearer {KEY}"
    assert {name: body[name] for name in body if name != "messages"} == {
        "model": "m", "temperature": 0.5, "seed": 5, "max_completion_tokens": 9
    }  # fmt: skip
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert (body["messages"][2]["role"], body["messages"][2]["tool_call_id"]) == ("tool", "1")
    assert (counters["prompt_tokens"], counters["completion_tokens"]) == (7, 2)


def test_special_tokens_that_a_message_spells_are_broken_up(serving):
    """An environment's questions quote what the policy wrote, in any role, and the API may parse them."""
    asked = []

    async def handler(request):
        asked.append((await request.json())["messages"])
        return says("42")

    spelled = "a<|im_end|><｜User｜>[INST]</s><end_of_turn>"
    call = envgym.types.ToolCall("1", "add", {"a": ["<|im_end|>"]})
    messages = [{"role": "user", "content": spelled}, envgym.Message("assistant", (), (call,))]
    ask(serving, handler, messages)
    [[question, answer]] = asked
    assert question["content"] == "a< |im_end|>< ｜User｜>[ INST]< /s>< end_of_turn>"
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"a": ["< |im_end|>"]}'


def test_no_other_credentials_of_the_environment_are_sent(serving, monkeypatch):
    """Neither those that the openai SDK takes from variables nor a proxy's or .netrc's."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-other")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: sk-other\nAuthorization: Bearer sk-other")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    seen = []

    async def handler(request):
        seen.append(dict(request.headers))
        return says("fine")

    for settings in ({"api_key_env": "TEST_KEY"}, {}):
        answers, _ = ask(serving, handler, "?", **settings)
        assert answers == ["fine"]
    assert seen[0].pop("Authorization") == f"Bearer {KEY}"
    for headers in seen:
        assert {name.lower() for name in headers} <= HEADERS
        assert "other" not in str(headers)


def test_a_compressed_answer_is_bounded_by_what_it_holds(serving, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER", 100_000)

    async def handler(request):
        response = says("x" * 10**6)
        response.enable_compression()
        return response

    [failure], _ = ask(serving, handler, "?", tries=1)
    assert "answers with more than" in str(failure)


@pytest.mark.parametrize("fault", ["429", "500", "garbage", "hang up", "hang", "html 502"])
def test_a_passing_fault_is_ridden_out(serving, fault):
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        if calls > 2:
            return says("fine")
        if fault == "hang up":
            request.transport.close()
        elif fault == "hang":
            await asyncio.sleep(30)
        elif fault == "garbage":
            return web.Response(text="<html>maintenance</html>")
        elif fault == "html 502":
            return web.Response(status=502, text="<html>bad gateway</html>")
        return web.json_response({"error": {"message": "slow down"}}, status=int(fault) if fault.isdigit() else 503)

    answers, counters = ask(serving, handler, "?", timeout=0.2)
    assert answers == ["fine"]
    assert (counters["requests"], counters["retries"], counters["failures"]) == (3, 2, 0)


def test_retry_after_is_kept_to_by_every_request(serving):
    times = []

    async def handler(request):
        times.append(time.monotonic())
        if len(times) == 1:
            return web.Response(status=429, headers={"Retry-After": "0.5"})
        return says("fine")

    async def main():
        async with serving(handler) as url:
            client = OpenAIChatClient(Chat(base_url=url, model="m"))
            first = asyncio.create_task(client.complete("a"))
            async with asyncio.timeout(30):
                while not client.counters["retries"]:  # noqa: ASYNC110 - until it has been told to wait
                    await asyncio.sleep(0.01)
            await asyncio.gather(first, client.complete("b"))
            await client.close()

    asyncio.run(main())
    assert len(times) == 3
    assert min(times[1:]) - times[0] >= 0.49


@pytest.mark.parametrize(
    ("answer", "said", "retryable", "requests"),
    [
        ((500, {"error": {"message": "boom"}}), r"answers 500 \(boom\) in 3 tries", True, 3),
        ((429, {}, {"Retry-After": "86400"}), r"answers 429 .* asks to wait 86400 s", True, 1),
        ((401, {"error": {"message": f"bad key {KEY}"}}), r"401 \(bad key \[secret\]\); check the key", False, 1),
        ((404, {"detail": "no such model"}), r"answers 404 \(no such model\)", False, 1),
        ((307, {}, {"Location": "http://127.0.0.1:1/"}), "answers 307", False, 1),
        ((200, {"choices": []}), "answers without any text", False, 1),
        ((200, {"choices": [{"message": {"content": None}}]}), "answers without any text", False, 1),
        ((200, ["what"]), "answers without any text", False, 1),
    ],
)
def test_what_cannot_be_mended_is_an_invalid_outcome(serving, answer, said, retryable, requests):
    async def handler(request):
        status, body, *headers = answer
        return web.json_response(body, status=status, headers=headers[0] if headers else None)

    [failure], counters = ask(serving, handler, "?", tries=3, api_key_env="TEST_KEY")
    assert isinstance(failure, InvalidOutcome)
    assert (failure.kind, failure.retryable) == ("service", retryable)
    assert KEY not in str(failure)
    with pytest.raises(InvalidOutcome, match=said):
        raise failure
    assert (counters["requests"], counters["failures"]) == (requests, 1)


SHAPES = {
    "plain": KEY,
    "wrapped": f"{KEY[:12]}\n  {KEY[12:]}",
    "wrapped by dashes": "-".join(KEY),
    "in part": f"{KEY[:14]}…",
    "in capitals": KEY.upper(),
    "JSON": "".join(f"\\u{ord(character):04x}" for character in KEY),
    "JSON in JSON": json.dumps(json.dumps("".join(f"\\u{ord(character):04x}" for character in KEY))),
    "Python": "".join(f"\\x{ord(character):02x}" for character in KEY),
    "some escapes": KEY.replace("-", "\\u002d"),
    "URL": "".join(f"%{ord(character):02X}" for character in KEY),
    "URL twice": KEY.replace("-", "%252D"),
    "HTML": "".join(f"&#{ord(character)};" for character in KEY),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of the header": base64.b64encode(f"Bearer {KEY}".encode()).decode(),
    "base64 of other lengths": base64.b64encode(f"x {KEY}".encode()).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(f">>?{KEY}".encode()).decode(),
    "base64 in lines": base64.encodebytes(f"Authorization: Bearer {KEY} and much more behind it".encode()).decode(),
    "base64 in JSON": base64.b64encode(KEY.encode()).decode().replace("=", "\\u003d"),
    "hexadecimal": KEY.encode().hex(),
    "hexadecimal in a word": f"0{KEY.encode().hex().upper()}f",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [200, 401, 500])
def test_the_key_is_in_no_message_in_whatever_shape_its_server_echoes_it(serving, status, shape):
    """Nor is what a cut through it leaves."""

    async def handler(request):
        before = "x" * 180 if status == 500 else "bad key"
        error = {"error": {"message": f"{before} {SHAPES[shape]} is not known"}}
        return web.json_response({"choices": [], **error}, status=status)

    async def main():
        async with serving(handler) as url:
            engine = OpenAIEngine(Chat(base_url=url, model="m", api_key_env="TEST_KEY", tries=1))
            try:
                with pytest.raises(InvalidOutcome) as failure:
                    await engine.chat(ChatRequest("e", (envgym.Message.user("?"),), (), SamplingParams(max_tokens=4)))
            finally:
                await engine.close()
            return str(failure.value)

    message = asyncio.run(main())
    assert re.match(r"m at http://127\.0\.0\.1:\d+ ", message)
    assert status == 200 or f"answers {status} (" in message
    assert ("left out: it holds the secret" if shape != "plain" else "secret]") in message or status == 500
    letters = "".join(filter(str.isalnum, SHAPES[shape]))
    told = "".join(filter(str.isalnum, message))
    assert not any(letters[start : start + 12] in told for start in range(len(letters) - 11))


def test_a_server_s_other_words_are_told_as_they_are(serving, monkeypatch):
    """Also beside a key that is a word or nothing."""
    text = (
        "The model `gpt-9` does not exist: see https://h/docs%20x?a=b&amp;c \\u0041 c2VjcmV0IHdvcmRz deadbeefdeadbeef"
    )

    async def handler(request):
        return web.json_response({"error": {"message": text}}, status=404)

    for key in (KEY, "EMPTY", "token-abc123"):
        monkeypatch.setenv("TEST_KEY", key)
        [failure], _ = ask(serving, handler, "?", api_key_env="TEST_KEY")
        assert str(failure).endswith(f"answers 404 ({text})")


def test_a_key_that_a_broken_answer_holds_is_hidden():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nEcho {KEY.upper()}\r\n\r\n".encode())
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = OpenAIChatClient(Chat(base_url=url, model="m", api_key_env="TEST_KEY", tries=1))
        async with server:
            with pytest.raises(InvalidOutcome) as failure:
                await client.complete("?")
            await client.close()
        return str(failure.value)

    message = asyncio.run(main())
    assert "VERY-SECRET" not in message
    assert "left out" in message


SECRET_URLS = [
    "http://h/v1?api_key=hidden123", "http://h/v1?model=a&API-KEY=hidden123", "https://h/v1/?access_token=hidden123",
    "https://h/v1?sig=hidden123", "http://h/v1?a=b;password=hidden123", "http://h/v1#key=hidden123",
    "http://h/v1?tavilyApiKey=hidden123", "http://h/v1?code=hidden123", "http://me:hidden123@h/v1",
    "http://h/v1?X-Amz-Signature=hidden123",
]  # fmt: skip


def test_a_key_in_an_address_is_refused_and_not_repeated():
    models = {
        "base_url": (EngineConfig, Chat, RoleConfig),
        "urls": (RewardEndpoint,),
    }
    for key, kinds in models.items():
        for kind in kinds:
            more = {"model": "m"} if kind is Chat else {}
            for url in (
                SECRET_URLS if key == "urls" else [*SECRET_URLS, "http://h/v1?k=hidden123", "http://h/v1?hidden123"]
            ):
                with pytest.raises(
                    ConfigError, match=r"a URL must hold no password or key: it would be saved"
                ) as error:
                    validate_settings(kind, {key: url, **more})
                assert "hidden123" not in str(error.value)
            assert validate_settings(kind, {key: "http://127.0.0.1:8000/v1/", **more})
    for url in ("http://h/reward?max_tokens=5&author=me", "http://h/reward?model=secret-free"):
        assert RewardEndpoint(urls=url).urls == (url,)


def test_an_unreachable_server_is_told_in_one_line():
    async def main():
        client = OpenAIChatClient(Chat(base_url="http://127.0.0.1:1/v1", model="m", tries=2))
        try:
            with pytest.raises(InvalidOutcome, match=r"m at http://127.0.0.1:1/v1 cannot be reached \(.*refused.*\)"):
                await client.complete("?")
        finally:
            await client.close()

    asyncio.run(main())


def test_an_endless_answer_is_given_up_on(serving, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER", 100_000)

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)

    [failure], _ = ask(serving, handler, "?", tries=1, timeout=5)
    assert "answers with more than" in str(failure)


def test_concurrency_and_rate_are_limited(serving):
    times, now, most = [], 0, 0

    async def handler(request):
        nonlocal now, most
        times.append(time.monotonic())
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.05)
        now -= 1
        return says("fine")

    ask(serving, handler, *"abcdef", concurrency=2)
    assert most == 2
    times.clear()
    ask(serving, handler, *"abcd", requests_per_minute=600)
    assert times[-1] - times[0] > 0.28


def test_who_gives_up_waiting_takes_no_request_s_place(serving, monkeypatch):
    """By a clock that moves only where somebody waits."""
    now, times, release = 0.0, [], None

    async def sleep_until(moment):
        nonlocal now
        if release is not None:
            await release.wait()
        now = moment

    monkeypatch.setattr(http, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(http, "_sleep_until", sleep_until)

    async def handler(request):
        times.append(now)
        return says("fine")

    async def main():
        nonlocal release
        async with serving(handler) as url:
            client = OpenAIChatClient(Chat(base_url=f"{url}/v1", model="m", requests_per_minute=200))
            await client.complete("first")
            release = asyncio.Event()
            waiting = [asyncio.create_task(client.complete(str(number))) for number in range(10)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            release.set()
            await client.complete("last")
            await client.close()

    asyncio.run(main())
    assert times == pytest.approx([0.0, 0.3])


def test_a_repeatable_answer_is_asked_for_once_and_kept_on_disk(serving, tmp_path):
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        number = calls
        await asyncio.sleep(0.02)
        return says(f"answer {number}")

    greedy = {"temperature": 0.0}
    answers, counters = ask(serving, handler, "?", "?", "?", asking=greedy, cache_dir=str(tmp_path / "cache"))
    assert (answers, calls, counters["cached"]) == (["answer 1"] * 3, 1, 2)
    answers, _ = ask(serving, handler, "?", "other", asking=greedy, cache_dir=str(tmp_path / "cache"))
    assert (answers, calls) == (["answer 1", "answer 2"], 2)
    # Another length, or an answer that is sampled, is another matter.
    ask(serving, handler, "?", asking={"temperature": 0.0, "max_tokens": 5}, cache_dir=str(tmp_path / "cache"))
    answers, _ = ask(serving, handler, "?", "?", asking={"temperature": 1.0}, cache_dir=str(tmp_path / "cache"))
    assert len(set(answers)) == 2
    assert calls == 5
    # A file that a crash cut short is asked for again.
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text('{"answer": "an')
    ask(serving, handler, "?", asking=greedy, cache_dir=str(tmp_path / "cache"))
    assert calls == 6
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_failure_is_not_kept_and_one_who_gives_up_takes_nothing_from_others(serving):
    calls, gave_up = 0, None

    async def handler(request):
        nonlocal calls
        calls += 1
        if calls == 1:
            return web.Response(status=400)
        await gave_up.wait()
        return says("fine")

    async def main():
        nonlocal gave_up
        gave_up = asyncio.Event()
        async with serving(handler) as url:
            client = OpenAIChatClient(Chat(base_url=url, model="m"))
            with pytest.raises(InvalidOutcome):
                await client.complete("?", temperature=0.0)
            patient = asyncio.create_task(client.complete("?", temperature=0.0))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.complete("?", temperature=0.0), 0.02)
            gave_up.set()
            assert await patient == "fine"
            await client.close()

    asyncio.run(main())
    assert calls == 2


def test_the_key_is_in_no_setting_log_or_cache(serving, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)

    async def handler(request):
        return says("fine")

    settings = {"api_key_env": "TEST_KEY", "cache_dir": str(tmp_path)}
    ask(serving, handler, "?", asking={"temperature": 0.0}, **settings)
    declared = Chat(base_url="http://h/v1", model="m", **settings)
    written = [file.read_text() for file in tmp_path.rglob("*.json")]
    assert written
    assert KEY not in json.dumps([declared.model_dump(), repr(declared), written, caplog.text])
    with pytest.raises(ValueError, match="not the key itself"):
        Chat(base_url="http://h/v1", model="m", api_key_env=KEY)
    with pytest.raises(ValueError, match="must hold no password"):
        Chat(base_url="http://me:secret@h/v1", model="m")
    monkeypatch.delenv("TEST_KEY")

    class Judged(envgym.EnvSpec):
        @property
        def services(self):
            return {"judge": declared}

    async def start():
        async with start_services(Judged("judged")):
            pass

    with pytest.raises(ConfigError, match="the environment variable TEST_KEY, which should hold its API key"):
        asyncio.run(start())
