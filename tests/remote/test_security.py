"""Who may do what: tried against server processes, by HTTP clients and by sockets that say what no client would."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef00"
ENVGYM = Path(sys.executable).with_name("envgym")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, new_server):
    """A server with tokens; bob may have one session, and all together three."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.touch(0o600)
    file.write_text(f"# who may come\nalice {ALICE}\n\nbob {BOB} max_sessions=1  # for now\n")
    server = new_server(
        "GuessSpec", f"tokens={file}", "limit.max_sessions=3", "limit.body_seconds=0.5", "limit.max_body=4096"
    )
    yield server
    log = server.log()
    assert server.stop() == 0
    assert "a defect of the server" not in log


async def ask(
    url: str, method: str, path: str, body: Any = None, token: str | None = None, **headers: str
) -> tuple[int, dict[str, Any], Any]:
    """Status, the answer and the headers of one request; every error is a problem."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url + path, json=body, headers=headers) as response,
    ):
        text = await response.text()
        if response.status >= 400:
            assert response.content_type == "application/problem+json"
            answer = json.loads(text)
            assert answer["status"] == response.status
            assert answer["type"].startswith("urn:envgym:problem:")
        else:
            answer = json.loads(text) if response.content_type == "application/json" else {"text": text}
        return response.status, answer, response.headers


def opening(session: str, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "seed": 1, **more}


def send(url: str, data: bytes, wait: float = 5) -> bytes:
    """What the server answers to these bytes, until it closes the connection or has nothing more to say."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=wait) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
                head, _, body = answer.partition(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    break
        except TimeoutError:
            pass
        return answer


def raw(path: str, *headers: str, method: str = "GET", token: str = ALICE) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def test_without_a_valid_token_nothing_is_answered_but_health(guarded):
    async def main() -> None:
        wrong = [None, "", "x" * 22, ALICE[:-1], ALICE + "0", f"{ALICE} {BOB}"]
        paths = [
            ("POST", "/v1/sessions", opening("s")),
            ("GET", "/v1/envs", None),
            ("GET", "/metrics", None),
            ("DELETE", "/v1/sessions/s", None),
            ("GET", "/nothing", None),
        ]
        for token in wrong:
            for method, path, body in paths:
                status, problem, headers = await ask(guarded.url, method, path, body, token)
                assert (status, problem["type"]) == (401, "urn:envgym:problem:unauthorized"), (token, path)
                assert headers["WWW-Authenticate"] == "Bearer"
                assert not token or token not in json.dumps(problem)
        for scheme in ("Basic", "Token", ""):
            status, *_ = await ask(guarded.url, "GET", "/v1/envs", Authorization=f"{scheme} {ALICE}".strip())
            assert status == 401
        for path in ("/livez", "/readyz"):
            assert (await ask(guarded.url, "GET", path))[0] == 200
        assert (await ask(guarded.url, "GET", "/v1/envs", token=ALICE))[0] == 200

    asyncio.run(main())


def test_quotas_and_the_servers_own_limit_are_429_with_the_time_to_wait(guarded):
    async def main() -> None:
        async def opened(session: str, token: str) -> tuple[int, dict[str, Any], Any]:
            return await ask(guarded.url, "POST", "/v1/sessions", opening(session), token)

        assert (await opened("b1", BOB))[0] == 200
        assert (await opened("b1", BOB))[0] == 200  # the same one
        status, problem, headers = await opened("b2", BOB)
        assert (status, problem["type"]) == (429, "urn:envgym:problem:quota-exceeded")
        assert headers["Retry-After"] == "1"
        assert problem["retry_after"] == 1.0
        assert [(await opened(name, ALICE))[0] for name in ("a1", "a2")] == [200, 200]
        status, problem, headers = await opened("a3", ALICE)
        assert (status, problem["type"]) == (429, "urn:envgym:problem:server-full")
        assert headers["Retry-After"] == "1"
        await ask(guarded.url, "DELETE", "/v1/sessions/b1", token=BOB)
        assert (await opened("b2", BOB))[0] == 200
        for name, token in (("b2", BOB), ("a1", ALICE), ("a2", ALICE)):
            await ask(guarded.url, "DELETE", f"/v1/sessions/{name}", token=token)
        _, metrics, _ = await ask(guarded.url, "GET", "/metrics", token=ALICE)
        assert 'envgym_rejected_total{reason="quota-exceeded"} 1.0' in metrics["text"]
        assert 'envgym_rejected_total{reason="server-full"} 1.0' in metrics["text"]
        assert 'envgym_sessions{env="game"} 0.0' in metrics["text"]

    asyncio.run(main())


def test_another_clients_session_does_not_exist(guarded):
    async def main() -> None:
        async def request(method: str, path: str, body: Any, token: str) -> tuple[int, dict[str, Any]]:
            return (await ask(guarded.url, method, path, body, token))[:2]

        step = {"step_id": 0, "action": {"text": "x"}}
        assert (await request("POST", "/v1/sessions", opening("mine"), ALICE))[0] == 200
        there = await request("POST", "/v1/sessions/mine/step", step, BOB)
        nowhere = await request("POST", "/v1/sessions/none/step", step, BOB)
        assert there[0] == nowhere[0] == 404
        assert there[1]["detail"].replace("mine", "none") == nowhere[1]["detail"]
        assert (await request("POST", "/v1/sessions/heartbeat", {"session_ids": ["mine"]}, BOB))[1] == {"alive": []}
        assert (await request("DELETE", "/v1/sessions/mine", None, BOB))[0] == 204
        # Nor is the id taken: bob's session of the same id is another one, with another seed.
        assert (await request("POST", "/v1/sessions", opening("mine") | {"seed": 2}, BOB))[0] == 200
        status, stepped = await request("POST", "/v1/sessions/mine/step", step, ALICE)
        assert (status, stepped["info"]["turns"]) == (200, 1)
        for token in (ALICE, BOB):
            assert (await request("DELETE", "/v1/sessions/mine", None, token))[0] == 204

    asyncio.run(main())


def test_a_body_that_is_too_large_or_too_slow_is_refused(guarded):
    kind = "Content-Type: application/json"
    declared = send(guarded.url, raw("/v1/sessions", kind, "Content-Length: 4097", method="POST"))
    assert declared.startswith(b"HTTP/1.1 413")
    assert b"urn:envgym:problem:too-large" in declared
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    assert send(guarded.url, raw("/v1/sessions", kind, "Transfer-Encoding: chunked", method="POST") + chunk).startswith(
        b"HTTP/1.1 413"
    )
    slow = send(guarded.url, raw("/v1/sessions", kind, "Content-Length: 100", method="POST") + b'{"session')
    assert slow.startswith(b"HTTP/1.1 408")
    assert b"urn:envgym:problem:too-slow" in slow
    packed = send(
        guarded.url, raw("/v1/sessions", kind, "Content-Encoding: gzip", "Content-Length: 2", method="POST") + b"{}"
    )
    assert packed.startswith(b"HTTP/1.1 415")
    deep = b"[" * 2000 + b"]" * 2000
    nested = send(guarded.url, raw("/v1/sessions", kind, f"Content-Length: {len(deep)}", method="POST") + deep)
    assert nested.startswith(b"HTTP/1.1 422")
    expecting = send(
        guarded.url, raw("/v1/sessions", kind, "Expect: 100-continue", "Content-Length: 15", method="POST"), wait=0.3
    )
    assert expecting.startswith(b"HTTP/1.1 100 Continue")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/envs/../../etc/passwd", 404),
        ("/v1/envs/..%2f..%2fetc%2fpasswd", 404),
        ("/v1/envs/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/v1/envs/game%00", 404),
        ("/v1/envs/%ff%fe", 404),
        ("/v1/envs/game%0d%0aX-Evil:%20yes", 404),
        ("/v1/envs/", 404),
        ("//v1/envs", 404),
        ("/v1/envs/game/tasks?split=train&count=1000000000", 422),
        ("/v1/envs/game/tasks?split=train&count=" + "9" * 5000, 422),
        ("/v1/envs/game/tasks?split=train&start=" + "9" * 400, 422),
        ("/v1/envs/game/tasks?split=train&start=-1", 422),
        ("/v1/envs/game/tasks?split=train&split=test", 422),
        ("/v1/envs/game/tasks?split=%00", 422),
        ("/v1/envs/game/tasks?split=train&start=9007199254740992", 200),
        ("/" + "a" * 20000, 400),
        ("/v1/envs/{env}", 404),
        ("http://elsewhere.invalid/v1/envs/nothing", 404),
        ("*", 400),
    ],
)
def test_tricks_with_paths_and_queries_lead_nowhere(guarded, path, status):
    answer = send(guarded.url, raw(path))
    assert answer.split(b" ")[1] == str(status).encode(), answer[:300]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"X-Evil" not in head
    if status != 200:
        assert json.loads(body)["status"] == status
        assert b"root:" not in body


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /v1/envs HTTP/9.9\r\n\r\n",
        raw("/v1/envs", "X-Bad\x00: 1"),
        raw("/v1/envs", "No colon here"),
        raw("/v1/envs", "Content-Length: 1", "Content-Length: 2"),
        raw("/v1/envs", "Content-Length: -5"),
        raw("/v1/envs", f"X-Long: {'x' * 10000}"),
        raw("/v1/sessions", "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n",
        raw("/v1/sessions", "Transfer-Encoding: chunked", "Content-Length: 3", method="POST"),
    ],
)
def test_what_is_not_http_is_a_problem_too_and_the_server_lives_on(guarded, data):
    answer = send(guarded.url, data, wait=2)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == 400
    assert ALICE.encode() not in answer
    assert send(guarded.url, raw("/livez")).startswith(b"HTTP/1.1 200")


def test_a_head_is_a_get_without_its_body_and_no_answer_tells_versions(guarded):
    full, head = (send(guarded.url, raw("/v1/envs", method=method), wait=1) for method in ("GET", "HEAD"))
    assert head.startswith(b"HTTP/1.1 200")
    assert head.endswith(b"\r\n\r\n")
    assert full.startswith(b"HTTP/1.1 200")
    for answer in (full, head, send(guarded.url, raw("/nothing")), send(guarded.url, b"nonsense\r\n\r\n")):
        assert b"Server: envgym\r\n" in answer
        assert b"aiohttp" not in answer
    wrong = send(guarded.url, raw("/v1/sessions", method="PUT"))
    assert wrong.startswith(b"HTTP/1.1 405")
    assert b"Allow: POST\r\n" in wrong


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.1.2.3"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403),
        ({"Host": "192.0.2.1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_web_pages_cannot_use_a_server_without_tokens(game, headers, status):
    assert asyncio.run(ask(game.url, "GET", "/v1/envs", **headers))[0] == status


def test_no_log_answer_metric_or_process_listing_holds_a_token(tmp_path):
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(ALICE)
    game = Path(__file__).with_name("game.py")
    words = [ENVGYM, "serve", f"{game}:GuessSpec", "--port", "0", "--token-file", file, "--drain-seconds", "0"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/GuessSpec")
        heard = [
            send(url, raw("/v1/envs", f"Bad {ALICE}")),
            send(url, raw("/v1/envs", f"X-\x00: {ALICE}")),
            send(url, f"GET /{ALICE} HTTP/1.1\r\nHost: x\r\nAuthorization: {ALICE}\r\n\r\n".encode()),
            send(url, raw("/v1/envs", token=ALICE + "x")),
            send(url, f"{ALICE}\r\n\r\n".encode()),
        ]

        async def play() -> None:
            for text in ("raise", "0", "bad reward"):
                body = opening(f"s{len(heard)}")
                heard.append(repr(await ask(url, "POST", "/v1/sessions", body, ALICE)).encode())
                step = {"step_id": 0, "action": {"text": text}}
                path = f"/v1/sessions/{body['session_id']}/step"
                heard.append(repr(await ask(url, "POST", path, step, ALICE)).encode())
            heard.append(repr(await ask(url, "GET", "/metrics", token=ALICE)).encode())
            heard.append(repr(await ask(url, "GET", "/v1/envs", token=ALICE)).encode())

        asyncio.run(play())
        process = Path("/proc", str(server.pid))
        heard += [(process / "cmdline").read_bytes(), (process / "environ").read_bytes(), line.encode()]
    finally:
        server.terminate()
        heard.append(server.communicate(timeout=20)[0].encode())
    heard.append((tmp_path / "log").read_bytes())
    assert b"no such card" in heard[-1]  # the log was written
    assert server.returncode == 0
    for what in heard:
        assert ALICE.encode() not in what


# ---------------------------------------------------------------------------------------------------------
# Public addresses and TLS


def test_a_public_address_without_tls_is_warned_of_once_and_tls_is_spoken_with_a_certificate(tmp_path, certificate):
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(ALICE)
    cert, key = certificate
    game = Path(__file__).with_name("game.py")
    start = [ENVGYM, "serve", f"g={game}:GuessSpec", "--port", "0", "--token-file", file, "--host", "0.0.0.0"]
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for words, scheme, warnings in (
        ([], "http", 1),
        (["--tls-cert", cert, "--tls-key", key], "https", 0),
    ):
        server = subprocess.Popen(
            [*start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        assert url.startswith(f"{scheme}://0.0.0.0:")
        port = urlsplit(url).port
        done = subprocess.run(
            ["curl", "-sS", "--cacert", cert, "-H", f"Authorization: Bearer {ALICE}",
             f"{scheme}://127.0.0.1:{port}/v1/envs"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert json.loads(done.stdout)["envs"][0]["name"] == "g", done.stderr
        server.terminate()
        said = server.communicate(timeout=20)[1]
        assert server.returncode == 0
        assert said.count("without TLS") == warnings
    for given, message in (
        (["--tls-cert", cert], "TLS takes both files"),
        (["--tls-cert", cert, "--tls-key", tmp_path / "none.pem"], "none.pem is not there"),
        (["--tls-cert", key, "--tls-key", cert], "TLS: "),
    ):
        done = subprocess.run([*start, *given], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
