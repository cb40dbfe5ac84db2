"""`envgym serve-reward-model`: the real process, asked by our client and by others."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from envgym.errors import ConfigError, InvalidOutcome
from envgym.net.server import serve_requests
from envgym.net.tokens import new_token_file
from envgym.services import RewardEndpoint, RewardModel
from envgym.services.client import Assessment, RewardClient
from envgym.services.reward import RewardEndpointClient
from envgym.services.reward_server import RewardServer
from envgym.services.reward_worker import RewardWorker

ENVGYM = Path(sys.executable).with_name("envgym")
TEXTS = ["what is 12 + 34? the answer is 46.", "a", "forty-six " * 9]
CONVERSATION = [{"role": "user", "content": "what is 12 + 34?"}, {"role": "assistant", "content": "46"}]


class Server:
    """A server process; `url`, `token_file` and `token` are what it said when it was ready."""

    def __init__(self, model, cache, *words):
        self.process = subprocess.Popen(
            [ENVGYM, "serve-reward-model", "--model", str(model), "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ENVGYM_CACHE": str(cache)},
        )
        self.said = self.process.stdout.readline()
        self.url = re.search(r"at (http://\S+)", self.said)[1]
        found = re.search(r"with the token in (\S+)", self.said)
        self.token_file = Path(found[1]) if found else None
        self.token = self.token_file.read_text().strip() if found else None

    def post(self, body, token=..., content_type="application/json"):
        """(status, answer) of a request with `body` (bytes, or something for JSON)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = self.token if token is ... else token
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(self.url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def children(self):
        """The ids of its processes."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        try:
            rest, errors = self.process.communicate(timeout=60)
            return self.process.returncode, rest, errors
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tiny_reward_model, tmp_path_factory):
    server = Server(tiny_reward_model, tmp_path_factory.mktemp("cache"), "batch_size=4", "max_length=60")
    yield server
    children = server.children()
    status, rest, errors = server.end()
    assert (status, rest, errors) == (0, "", "")
    assert not server.token_file.exists()
    assert children
    assert not any(Path("/proc", child).exists() for child in children)


@pytest.fixture(scope="module")
def expected(tiny_reward_model):
    worker = RewardWorker(RewardModel(model=str(tiny_reward_model)))
    return [reward for reward, _, _ in worker.score([*TEXTS, CONVERSATION])]


def test_it_answers_in_the_seeds_form(server, expected):
    status, answer = server.post({"query": TEXTS, "prompts": ["p"] * 3, "labels": [None] * 3})
    assert status == 200
    assert answer["rewards"] == pytest.approx(expected[:3], abs=1e-5)
    assert answer["scores"] == pytest.approx([1 / (1 + math.exp(-reward)) for reward in expected[:3]], abs=1e-5)
    assert answer["extra_logs"] == {}
    assert server.post({"query": []}) == (200, {"rewards": [], "scores": [], "extra_logs": {}})


def test_only_who_has_the_token_is_let_in(server):
    assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.token_file.parent.stat().st_mode) == 0o700
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_text()
    assert server.token not in server.said + arguments
    for token in (None, "wrong", server.token[:-1], server.token + "x"):
        status, answer = server.post({"query": TEXTS}, token)
        assert (status, "rewards" in answer) == (401, False)
        assert server.token not in json.dumps(answer)
    with urllib.request.urlopen(server.url.replace("/get_reward", "/healthz"), timeout=30) as response:
        assert json.load(response) == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"not json", 400, "not JSON"),
        ({"queries": []}, 422, 'the body is {"query"'),
        ({"query": [1]}, 422, "query 0: text or a list of messages, not int"),
        ({"query": [[{"content": "x"}]]}, 422, "query 0: "),
        ({"query": [""]}, 422, "query 0: .*the text is empty"),
        ({"query": ["a", "12 + 34 " * 50]}, 422, "query 1: .* tokens are more than it can score"),
        ({"query": ["a"] * 5000}, 413, "at most 4096 queries"),
        (b'{"query": ["' + b"x" * (33 * 2**20) + b'"]}', 413, "at most 33554432 bytes"),
    ],
)
def test_a_request_that_cannot_be_answered_is_told_why(server, body, status, said):
    answered, answer = server.post(body)
    assert answered == status
    assert re.search(said, answer["error"])
    assert server.post({"query": "a"})[0] == 200


def test_a_query_that_cannot_be_rendered_costs_its_own_request_and_no_other(server, expected):
    nested = "[" * 900 + "]" * 900
    call = '{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": %s}}}]}'
    for body, said in (
        (rb'{"query": ["a", "\ud800"]}', "query 1: "),
        (rb'{"query": [[{"role": "user", "content": "\udc00"}]]}', "query 0: "),
        (f'{{"query": [[{call % nested}]]}}'.encode(), "query 0: "),
    ):
        status, answer = server.post(body)
        assert (status, answer["error"][: len(said)]) == (422, said), answer
        status, answer = server.post({"query": [*TEXTS, CONVERSATION]})
        assert status == 200
        assert answer["rewards"] == pytest.approx(expected, abs=1e-4)


def test_a_web_page_cannot_use_it(server):
    assert server.post({"query": ["a"]}, content_type="text/plain")[0] == 415


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
def test_without_a_token_web_pages_cannot_use_it_by_another_name_either(headers, status):
    class One(RewardClient):
        async def assess(self, conversation, *, label=None):
            return Assessment(1.0, 0.5)

        async def close(self):
            pass

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            app = RewardServer(One(), None).app
            async with serve_requests(app, listener, drain=1), aiohttp.ClientSession(headers=headers) as http:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                async with http.post(f"{url}/get_reward", json={"query": ["a"]}) as answer:
                    assert answer.status == status
                    assert ("rewards" in await answer.json()) == (status == 200)
                async with http.get(f"{url}/healthz") as answer:
                    assert answer.status == status

    asyncio.run(main())


def test_our_client_asks_it(server, expected):
    async def main():
        declared = {"urls": server.url, "token_file": str(server.token_file), "template": None}
        client = RewardEndpointClient(RewardEndpoint(**declared))
        stranger = RewardEndpointClient(RewardEndpoint(urls=server.url))
        try:
            with pytest.raises(InvalidOutcome, match=r"answers 401 .*check the key or token"):
                await stranger.score_one("a")
            asked = [*TEXTS, CONVERSATION, "12 + 34 " * 50]
            return await asyncio.gather(*(client.score_one(one) for one in asked), return_exceptions=True)
        finally:
            await client.close()
            await stranger.close()

    *rewards, failure = asyncio.run(main())
    assert rewards == pytest.approx(expected, abs=1e-5)
    assert isinstance(failure, InvalidOutcome)
    assert "answers 422" in str(failure)


@pytest.mark.slow
def test_a_dead_model_ends_the_server_with_one_line(tiny_reward_model, tmp_path):
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("my-own-token-0123\n")
    server = Server(tiny_reward_model, tmp_path, "--token-file", str(tmp_path / "token"))
    try:
        assert server.token == "my-own-token-0123"
        for child in server.children():
            os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(OSError):  # it may be gone before it answers
            assert server.post({"query": ["a"]})[0] == 503
        assert server.process.wait(60) == 2
        errors = server.process.stderr.read()
        assert re.fullmatch(r"envgym: error: the reward model's process ended .*log: .*\n", errors)
    finally:
        server.process.kill()
    assert (tmp_path / "token").exists()


def test_a_cache_that_takes_no_token_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="or name a folder that can be with ENVGYM_CACHE"), new_token_file("x"):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0", "--no-token"], "refusing to serve on 0.0.0.0 without a token"),
        (["--token-file", "nothing"], "token file nothing: No such file or directory"),
        (["--token-file", "x", "--no-token"], "contradict each other"),
        (["batchsize=4"], "unknown key 'batchsize'. Did you mean 'batch_size'"),
        (["--host", "no.such.host.invalid"], "no such address"),
        (["--port", "99999999"], "cannot serve on port 99999999"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(words, said, tmp_path, capsys, monkeypatch):
    from envgym.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["serve-reward-model", "--model", "nothing", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
