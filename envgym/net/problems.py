"""Errors as answers of a server: problem details (RFC 9457) and their kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from envgym.errors import printable_line

ProblemKind = Literal[
    "environment-error",  # the environment raised; `error` is the class of the exception
    "environment-timeout",  # the environment did not answer within the server's limit
    "environment-not-found",  # nothing of that name is served here
    "session-not-found",  # closed, its lease run out, from before a restart, or another client's
    "session-conflict",  # the id is taken by a session that was opened differently
    "step-conflict",  # a step id out of order, or repeated with another action
    "invalid-request",  # the body or the query is not what the route takes
    "not-found",  # no such route
    "too-large",  # a body above the limit
    "too-slow",  # a body that did not arrive in time
    "unauthorized",  # no token, or one that is not known here
    "forbidden",  # sent by a web page, or under a name that is not this machine's
    "server-full",  # as many sessions as the server or this environment may have, or too much arrives at once
    "quota-exceeded",  # as many sessions as this client may have
    "shutting-down",  # the server finishes what it has and takes nothing new
    "internal-error",  # a defect of the server itself
]
TYPE = "urn:envgym:problem:"
Line = Annotated[str, AfterValidator(printable_line)]
"""Text from the other side, made safe for logs."""


class ProblemBody(BaseModel):
    """RFC 9457 problem details; `type` is `urn:envgym:problem:` and a `ProblemKind`.

    If the environment raised, `error` is the class of the exception; of an `InvalidOutcome`, `failure` is its kind and
    `retryable` whether the episode is to be retried. `retry_after` is the suggested pause in seconds.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str = "about:blank"
    title: str = ""
    status: int = 0
    detail: Line = ""
    error: Line = ""
    failure: Line = ""
    retryable: bool = False
    retry_after: float | None = None

    @property
    def kind(self) -> str:
        return self.type.removeprefix(TYPE)


def main_error(error: ValidationError) -> Any:
    """The first invalid field. Of a value of several forms it is the error of the form that is right the furthest."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    of_field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    return max(of_field, key=lambda item: len(item["loc"]))


class Problem(Exception):
    """An error to send to the client; a server answers with `status`, `body` and these additional `headers`."""

    content_type = "application/problem+json"

    def __init__(
        self, status: int, kind: ProblemKind, detail: str, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ProblemBody(type=TYPE + kind, title=kind.replace("-", " "), status=status, detail=detail, **fields)
        if self.body.retry_after is not None:
            self.headers["Retry-After"] = f"{max(1, round(self.body.retry_after))}"
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def content(self) -> bytes:
        """The encoded body."""
        return json.dumps(self.body.model_dump(exclude_defaults=True)).encode()
