"""What server and client say to each other: JSON bodies over HTTP/1.1, version 1.

    GET    /v1/env                           -> EnvDescription
    GET    /v1/tasks?split=&start=&count=    -> TaskPage
    POST   /v1/sessions            Opening   -> Opened      an instance is made and reset
    POST   /v1/sessions/{id}/step  Step      -> Stepped
    DELETE /v1/sessions/{id}                 -> 204
    GET    /healthz                          -> {"status": "ok"}

The client chooses the session's id and numbers its steps, so that every request can be sent again: the server
answers a repeated one with what it answered before and does nothing twice. Tasks, observations and actions
travel as the fields of their dataclasses. Errors are RFC 9457 problem details (`Problem`). A reader ignores
fields it does not know: a newer peer may say more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from envgym.errors import InvalidStep
from envgym.types import Action, Observation, Task

VERSION = 1
MAX_BODY = 64 * 2**20
"""Bytes of the largest request taken: an action carries its token ids, a task its whole row."""
MAX_PAGE = 1000
"""Tasks in the largest page."""

SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Wire(BaseModel):
    """Base class of the bodies."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Split(Wire):
    """`size` is None where there is no end; `error` says why the split cannot be read, where it cannot."""

    size: int | None = None
    error: str | None = None


class EnvDescription(Wire):
    """What is served. `id` is the environment's id on the server; `services` the models it uses there."""

    protocol: Literal["envgym"] = "envgym"
    version: int = VERSION
    id: str
    splits: dict[str, Split]
    services: dict[str, str]


class TaskPage(Wire):
    """The tasks from index `start` on; shorter than asked for at the end of the split."""

    split: str
    start: int
    tasks: tuple[Task, ...]


class Opening(Wire):
    """Make an instance and reset it with `seed` and `options`; without a `task` the seed draws one."""

    session_id: SessionId
    seed: int
    task: Task | None = None
    options: dict[str, Any] = {}


class Opened(Wire):
    """What `reset` returned, and the task it posed. `dropped` names the `info` entries JSON cannot carry."""

    task: Task
    observation: Observation
    info: dict[str, Any]
    dropped: tuple[str, ...] = ()


class Step(Wire):
    """One action. `step_id` counts the session's steps from 0."""

    step_id: int = Field(ge=0)
    action: Action


class Stepped(Wire):
    """What `step` returned. `dropped` names the `info` entries JSON cannot carry."""

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    dropped: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------
# Errors

ProblemKind = Literal[
    "environment-error",  # the environment raised; `error` is the class of the exception
    "environment-timeout",  # the environment did not answer within the server's limit
    "session-not-found",  # closed, idle for too long, or from before a restart
    "session-conflict",  # the id is taken by a session that was opened differently
    "step-conflict",  # a step id out of order, or repeated with another action
    "invalid-request",  # the body or the query is not what the route takes
    "shutting-down",  # the server finishes what it has and takes nothing new
    "internal-error",  # a defect of the server itself
]
PROBLEM_TYPE = "urn:envgym:problem:"


class ProblemBody(Wire):
    """RFC 9457 problem details; `type` is `urn:envgym:problem:` and a `ProblemKind`, or `about:blank`."""

    type: str = "about:blank"
    title: str = ""
    status: int = 0
    detail: str = ""
    error: str = ""

    @property
    def kind(self) -> str:
        return self.type.removeprefix(PROBLEM_TYPE)


class Problem(Exception):
    """An error on its way to the client; the server answers with `status` and `body`."""

    def __init__(self, status: int, kind: ProblemKind, detail: str, *, error: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.body = ProblemBody(
            type=PROBLEM_TYPE + kind, title=kind.replace("-", " "), status=status, detail=detail, error=error
        )


# ---------------------------------------------------------------------------------------------------------
# To JSON


def encode(body: BaseModel) -> bytes:
    """The body as strict JSON, in UTF-8.

    Raises `InvalidStep` where a field that must arrive whole (a task, an observation, options) holds something
    JSON has no word for: a set, bytes, a number that is not finite.
    """
    try:
        return json.dumps(body.model_dump(), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidStep(f"{type(body).__name__} cannot be sent as JSON: {error}") from None


def encodable_info(info: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`info` as JSON can carry it, and the dotted names of the entries that had to be left out.

    Tuples become lists; arrays and scalars of numpy or torch become lists and numbers. Dropped are entries with
    any other object, a number that is not finite, or a key that is not a string: guessing a text form for them
    would hand the reader a value of another type.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in info.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            kept[key], inner = encodable_info(value)
            dropped += [f"{key}.{name}" for name in inner]
            continue
        try:
            if not isinstance(key, str):
                raise TypeError
            kept[key] = _encodable(value)
        except (TypeError, ValueError):
            dropped.append(str(key))
    return kept, tuple(dropped)


def _encodable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("not finite")
        return value
    if isinstance(value, Mapping):
        kept, dropped = encodable_info(value)
        if dropped:
            raise TypeError("holds something that is not JSON")
        return kept
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_encodable(item) for item in value]
    if hasattr(value, "tolist"):
        return _encodable(value.tolist())
    raise TypeError("not JSON")
