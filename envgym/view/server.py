"""The page over HTTP: its files, and what it asks for as JSON. It reads, and writes nothing."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from envgym.errors import DataError, EnvgymError
from envgym.remote.listening import is_loopback, listen, stop_signals

from .episodes import compared, lanes, listing, shown
from .sources import Source, find

PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip
COOKIE = "envgym-view"
REFUSAL = "without a token: whoever reaches it could read every episode; give --token-file, or --host 127.0.0.1"


class Answers:
    """Answers to the page, by the path that it asks with. An export holds the same answers by the same paths."""

    def __init__(self, given: Sequence[Path]) -> None:
        self._given = given
        self.sources = find(given)

    def __call__(self, path: str) -> Any:
        """The answer to `WHAT/ARGUMENT/…`, whose parts are separated by `|`. Raises `DataError`, also for a path that
        is none of these: only what was found in the given folders is ever read."""
        what, *arguments = path.split("|")
        known: dict[str, Callable[..., Any]] = {
            "index": self._index, "run": self._run, "metrics": self._metrics, "list": self._list, "lanes": self._lanes,
            "episode": self._episode, "search": self._search, "compare": self._compare,
        }  # fmt: skip
        try:
            return known[what](*arguments)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"there is nothing at {path!r:.200} ({type(error).__name__})") from None

    def _index(self) -> list[dict[str, Any]]:
        self.sources = find(self._given)
        return sorted((source.listed() for source in self.sources.values()), key=lambda one: -one["changed"])

    def _source(self, name: str) -> Source:
        if name not in self.sources:
            self.sources = find(self._given)
        return self.sources[name]

    def _run(self, name: str) -> dict[str, Any]:
        source = self._source(name)
        summary = source.summary()
        steps = sorted(source.files())
        about = {"id": name, "kind": source.kind, "state": source.state(summary), "summary": summary, "steps": steps}
        return {**about, "config": source.config(), "alarms": source.alarms()}

    def _metrics(self, name: str, offset: str) -> dict[str, Any]:
        source = self._source(name)
        records, end = source.metrics(int(offset))
        return {"records": records, "offset": end, "state": source.state(source.summary())}

    def _list(self, name: str, step: str, first: str, count: str) -> dict[str, Any]:
        found = listing(self._source(name), int(step))
        return {"total": len(found), "first": int(first), "columns": found.slice(int(first), int(count))}

    def _episode(self, name: str, step: str, index: str) -> dict[str, Any]:
        return shown(self._source(name), int(step), int(index))

    def _lanes(self, name: str, step: str) -> dict[str, Any]:
        return lanes(self._source(name), int(step))

    def _search(self, name: str, step: str, text: str) -> list[int]:
        return listing(self._source(name), int(step)).holds(text)

    def _compare(self, a: str, step_a: str, b: str, step_b: str) -> dict[str, Any]:
        return compared(*(listing(self._source(name), int(step)) for name, step in ((a, step_a), (b, step_b))))


class ViewServer:
    """The routes. With a `token` only who gave it once (`/?token=…`, which leaves a cookie) is answered; without one
    only this machine is, and no other site's pages."""

    def __init__(self, answers: Answers, token: str | None) -> None:
        self._answers = answers
        self._token = token
        self.app = web.Application(middlewares=[self._guard])
        self.app.router.add_get("/", self._page)
        self.app.router.add_get("/api", self._api)
        self.app.router.add_static("/page", PAGE)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if self._token is not None and "token" in request.query:
            response: web.StreamResponse = web.HTTPFound("/")
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
            return response
        return web.FileResponse(PAGE / "index.html")

    async def _api(self, request: web.Request) -> web.Response:
        try:
            answer = await asyncio.to_thread(self._answers, request.query.get("q", ""))
        except EnvgymError as error:
            return web.json_response({"error": str(error)}, status=404)
        return web.json_response(text=await asyncio.to_thread(dumped, answer))

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return web.json_response({"error": refusal}, status=403, headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.reason}, status=error.status)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> str | None:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "another site's page may not read this"
        if self._token is None:
            name = urlsplit(f"//{host}").hostname or ""
            return None if is_loopback(name) else "this is for this machine: use localhost or 127.0.0.1"
        given = request.query.get("token") or request.cookies.get(COOKIE, "")
        return None if hmac.compare_digest(given.encode(), self._token.encode()) else "open it with /?token=TOKEN"


def dumped(answer: Any) -> str:
    """JSON that a browser reads: ASCII, for there are halves of surrogate pairs, and null for NaN and infinities."""
    try:
        return json.dumps(answer, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        finite = json.loads(json.dumps(answer, default=str), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":"))


async def serve_view(
    given: Sequence[Path], host: str, port: int, token: str | None, on_ready: Callable[[str], None]
) -> None:
    """Serve the page until SIGINT or SIGTERM. Raises `EnvgymError` for what cannot be shown or served."""
    answers, stopping = Answers(given), asyncio.Event()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=REFUSAL if token is None else None))
        stack.enter_context(stop_signals(stopping))
        runner = web.AppRunner(ViewServer(answers, token).app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()
        name, number = listener.getsockname()[:2]
        on_ready(f"http://{f'[{name}]' if ':' in name else name}:{number}/")
        await stopping.wait()
