"""An environment as a resources server: sessions with tools and a verdict, and the Gymnasium flavour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from envgym.env import EnvSpec
from envgym.errors import InvalidStep
from envgym.responses import Item
from envgym.types import Action, ToolCall

from .playing import Playing, action_of, spoken
from .rows import place_of, pose
from .sessions import COOKIE, CURRENT, Session, Sessions


class Resources:
    """The routes of one environment. A session is an episode: it begins with `/seed_session` or `/reset`, and ends with
    `/verify`, or with the environment."""

    def __init__(self, name: str, spec: EnvSpec, sessions: Sessions) -> None:
        self._name = name
        self._spec = spec
        self._sessions = sessions

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/seed_session", self._seed_session)
        app.router.add_post("/verify", self._verify)
        app.router.add_post("/reset", self._reset)
        app.router.add_post("/step", self._step)
        app.router.add_post("/{tool}", self._tool)  # last, so that the others are found first

    async def _open(self, request: web.Request) -> None:
        row = await body_of(request)
        place = place_of(row, self._name)
        if self._sessions.full:
            raise web.HTTPTooManyRequests(text="as many sessions as this server may have", headers={"Retry-After": "5"})
        with self._sessions.opening():
            playing, _ = await pose(self._spec, place, row)
            await self._sessions.put(CURRENT.get(), playing)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(CURRENT.get())
        if session is None:
            raise web.HTTPConflict(text=f"no session: /seed_session begins one, and its cookie {COOKIE} names it")
        return session

    # -- with tools and a verdict ---------------------------------------------------------------------------

    async def _seed_session(self, request: web.Request) -> web.Response:
        await self._open(request)
        return web.json_response({})

    async def _tool(self, request: web.Request) -> web.Response:
        """A tool's result, as the text that their agents hand to the policy as it stands."""
        session, name = self._session(request), request.match_info["tool"]
        arguments = await body_of(request)
        async with session.lock:
            if session.playing.ended:
                raise web.HTTPConflict(text="The episode has ended.")
            call = ToolCall(f"call_{session.calls}", name, arguments)
            session.calls += 1
            observation, _ = await session.playing.step(Action("", (), (call,), content=""))
        return web.Response(text=spoken(observation))

    async def _verify(self, request: web.Request) -> web.Response:
        """The verdict on a whole `Response`. What its calls earned is known; its last words are the last action."""
        session, row = self._session(request), await body_of(request)
        action = _action(row)
        async with session.lock:
            try:
                if action is not None and not session.playing.ended:
                    await session.playing.step(action)
                return web.json_response({**row, **session.playing.told(row)})
            finally:
                await self._sessions.close(CURRENT.get())

    # -- the Gymnasium flavour ------------------------------------------------------------------------------

    async def _reset(self, request: web.Request) -> web.Response:
        await self._open(request)
        return web.json_response({"observation": None, "info": {}})  # the row's input says it

    async def _step(self, request: web.Request) -> web.Response:
        session, row = self._session(request), await body_of(request)
        action = _action(row)
        async with session.lock:
            if session.playing.ended:
                raise web.HTTPConflict(text="The episode has ended.")
            try:
                return web.json_response(await _stepped(session.playing, action))
            finally:
                if session.playing.ended or session.playing.failed:  # their agent comes no more
                    await self._sessions.close(CURRENT.get())


def _action(row: Mapping[str, Any]) -> Action | None:
    """The policy's turn in a body. Raises a 422 for what is no `Response`."""
    try:
        return action_of(row.get("response"))
    except InvalidStep as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None


async def _stepped(playing: Playing, action: Action | None) -> Item:
    """What `/step` answers. Without an action the policy may say no more."""
    if action is None:
        playing.truncated, reward, results, words = True, None, [], ""
    else:
        observation, reward = await playing.step(action)
        results = [
            {"call_id": message.tool_call_id, "output": message.text}
            for message in observation.messages
            if message.role == "tool"
        ]
        words = observation.text or "\n\n".join(m.text for m in observation.messages if m.role != "tool")
    info: dict[str, Any] = {"tool_outputs": results}
    if playing.ended:
        told = playing.told({})
        info |= {name: value for name, value in told.items() if name not in ("reward", "terminated")}
    answer = {"observation": words or None, "reward": reward or 0.0, "info": info}
    return answer | {"terminated": playing.terminated, "truncated": playing.truncated and not playing.terminated}


async def body_of(request: web.Request) -> Mapping[str, Any]:
    """A request's body. Raises a 400 unless it is a JSON object."""
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError):  # no JSON, no such encoding, brackets 10,000 deep
        body = None
    if not isinstance(body, Mapping):
        raise web.HTTPBadRequest(text="the body is a JSON object")
    return body
