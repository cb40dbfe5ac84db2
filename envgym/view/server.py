"""The page over HTTP: its files, and its data as JSON. The server only reads."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.errors import DataError, EnvgymError
from envgym.net.listening import is_loopback, listen, stop_signals, url_of
from envgym.net.server import serve_requests
from envgym.run_folder import stage_number

from .episodes import compare_episodes, episode_with_tokens, lanes, listing, task_history
from .settings import changed_settings, stage_settings
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
    """Answers the page's requests. Each is a text, `NAME|ARGUMENT|…`; an export stores the answers by the same
    texts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.sources = find(paths)

    def __call__(self, path: str) -> Any:
        """The answer to a request. It reads only sources in the folders that the user named. Raises `DataError` for a
        source that does not exist or cannot be read, and `ValueError` for an invalid request."""
        name, separator, text = path.partition("|")
        numbered = (self._source, _number)
        questions: dict[str, tuple[Callable[..., Any], tuple[Callable[[str], Any], ...]]] = {
            "index": (self._index, ()),
            "run": (self._run, (self._source,)),
            "metrics": (Source.metrics, numbered),
            "list": (_list, (*numbered, _number, _number)),
            "beginnings": (lambda source, step, rows: listing(source, step).beginnings(rows), (*numbered, _numbers)),
            "misgraded": (lambda source, step: listing(source, step).misgraded(), numbered),
            "unstated": (lambda source, step: listing(source, step).unstated(), numbered),
            "history": (task_history, (*numbered, _number)),
            "lanes": (lanes, numbered),
            "episode": (episode_with_tokens, (*numbered, _number)),
            "image": (_data_uri, (self._source, str)),
            "search": (lambda source, step, text: listing(source, step).search(text), (*numbered, str)),
            "compare": (
                lambda a, step_a, b, step_b: compare_episodes(listing(a, step_a), listing(b, step_b)),
                numbered * 2,
            ),
        }
        answer, readers = questions.get(name, (None, ()))
        parts = text.split("|", len(readers) - 1) if readers else [text] if separator else []  # a text may have others
        if answer is None or len(parts) != len(readers):
            raise ValueError("no such question")
        arguments = [read(part) for read, part in zip(readers, parts, strict=True)]
        try:
            return answer(*arguments)
        except EnvgymError:
            raise
        except Exception as error:  # an untrusted run may contain anything
            raise DataError(f"this cannot be read ({type(error).__name__}: {str(error)[:200]})") from None

    def image(self, text: str) -> tuple[bytes, str]:
        """The content and the media type of an image, `SOURCE|NAME`. Raises as a request does."""
        source, name = text.split("|")
        return self._source(source).image(name)

    def _index(self) -> list[dict[str, Any]]:
        self.sources = find(self._paths)
        return sorted(map(_line, self.sources.values()), key=lambda line: -line["changed"])

    def _source(self, name: str) -> Source:
        if name not in self.sources:
            self.sources = find(self._paths)
        source = self.sources.get(name)
        if source is None or source.why:
            raise DataError(source.why if source else f"there is nothing called {name!r:.200}")
        return source

    def _run(self, source: Source) -> dict[str, Any]:
        summary = source.summary()
        held_out = self.sources.get(f"{source.id}/held_out")
        config, parent = source.config(), source.id.rpartition("/")[0]
        is_stage = bool(config) and not (source.path / "config.yaml").exists()
        names = [name.removeprefix(f"{parent}/") for name in self.sources if name.startswith(f"{parent}/")]
        number = stage_number(source.path.name)
        is_last = not is_stage or number == max(map(stage_number, names), default=number)
        return {
            "id": source.id,
            "kind": source.kind,
            "state": source.state(summary),
            "summary": summary,
            "steps": sorted(source.files()),
            "evaluated": sorted(held_out.files()) if held_out else [],
            "run": parent if is_stage else source.id,
            "replays": source.kind == "run" and is_last,
            "settings": stage_settings(config, source.path.name),
            "changed": changed_settings(config, source.path.name) if source.kind == "run" else None,
            "alarms": source.alarms(),
            "checkpoints": source.checkpoints(),
            "logs": source.logs(),
        }


def _data_uri(source: Source, name: str) -> str:
    content, media_type = source.image(name)
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _list(source: Source, step: int, first: int, count: int) -> dict[str, Any]:
    episodes = listing(source, step)
    return {"total": len(episodes), "first": first, "columns": episodes.slice(first, count)}


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError("no number")
    return int(text)


def _numbers(text: str) -> list[int]:
    return list(map(_number, text.split(",")))


def _line(source: Source) -> dict[str, Any]:
    """A source's line in the list of all sources; for an unreadable one, with the reason."""
    reason = source.why
    try:
        if not reason:
            return source.list_line()
    except Exception as error:  # an untrusted run may contain anything; the others stay in the list
        reason = str(error) if isinstance(error, EnvgymError) else f"{type(error).__name__}: {str(error)[:200]}"
    kind = source.kind if source.kind == "link" else "unreadable"
    return {"id": source.id, "kind": source.kind, "changed": 0.0, "files": 0, "state": kind, "why": reason}


class ViewServer:
    """The page, its data and its files over HTTP. With a `token`, a client must send it once: `/?token=…` sets a
    cookie. Without one, the server answers only this machine. It rejects requests from pages of other sites."""

    def __init__(self, answers: Answers, token: str | None) -> None:
        self._answers = answers
        self._token = token
        self.app = web.Application(middlewares=[self._guard])
        self.app.router.add_get("/", self._page)
        self.app.router.add_get("/api", self._api)
        self.app.router.add_get("/image", self._image)
        self.app.router.add_static("/page", PAGE)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if self._token is not None and "token" in request.query:
            response: web.StreamResponse = web.HTTPFound("/")
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
            return response
        return web.FileResponse(PAGE / "index.html")

    async def _api(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(lambda: to_json(self._answers(request.query.get("q", ""))))
        return web.json_response(text=text)

    async def _image(self, request: web.Request) -> web.Response:
        content, media_type = await asyncio.to_thread(self._answers.image, request.query.get("q", ""))
        return web.Response(body=content, content_type=media_type)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refusal = self._refusal(request)
            response = await handler(request) if refusal is None else _error(refusal, 403)
        except web.HTTPException as error:
            response = _error(error.reason, error.status)
        except EnvgymError as error:
            response = _error(str(error), 404)
        except Exception:  # a malformed host, cookie or request
            response = _error("this request cannot be read", 400)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> str | None:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "pages of other sites have no access"
        if self._token is None:
            name = urlsplit(f"//{host}").hostname or ""
            return None if is_loopback(name) else "only this machine has access: use localhost or 127.0.0.1"
        token = request.query.get("token") or request.cookies.get(COOKIE, "")
        return None if hmac.compare_digest(token.encode(), self._token.encode()) else "open it with /?token=TOKEN"


def _error(text: str, status: int) -> web.StreamResponse:
    return web.json_response({"error": text}, status=status)


def to_json(answer: Any) -> str:
    """JSON for browsers: ASCII, because texts may have lone surrogates, with null for NaN and infinities."""
    try:
        return json.dumps(answer, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        finite = json.loads(json.dumps(answer, default=str), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":"))


async def serve_view(
    paths: Sequence[Path], host: str, port: int, token: str | None, on_ready: Callable[[str], None]
) -> None:
    """Serve the page until SIGINT or SIGTERM. Raises `EnvgymError` if the paths or the address cannot be used."""
    answers = Answers(paths)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=REFUSAL if token is None else None))
        stopping = stack.enter_context(stop_signals())
        await stack.enter_async_context(serve_requests(ViewServer(answers, token).app, listener, drain=1.0))
        on_ready(f"{url_of(listener)}/")
        await stopping.wait()
