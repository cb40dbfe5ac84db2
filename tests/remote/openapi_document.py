"""The server's requests as an OpenAPI document, from which Schemathesis makes its own."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from envgym.episodes.record import to_record
from envgym.net.problems import ProblemBody
from envgym.remote import wire
from envgym.remote.routes import ROUTES, Route
from envgym.types import Episode, Outcome, Task

REF = "#/components/schemas/{model}"
SESSION = "example"
ANSWERS: dict[str, type[BaseModel]] = {
    "list_envs": wire.EnvList,
    "describe": wire.EnvDescription,
    "tasks": wire.TaskPage,
    "score_group": wire.Verdicts,
    "open": wire.Opened,
    "heartbeat": wire.Alive,
    "step": wire.Stepped,
    "live": wire.Health,
    "ready": wire.Health,
}
"""The bodies of the answers; others have none, or one that is not JSON."""
EXAMPLES: dict[str, Any] = {
    "open": {"session_id": SESSION, "seed": 0},
    "step": {"step_id": 0, "action": {"text": "an answer"}},
    "heartbeat": {"session_ids": [SESSION]},
    "score_group": {
        "task": {"id": "example"},
        "episodes": [to_record(Episode("e", Task("example"), Outcome.finish(), reward=1.0))],
    },
}
"""Valid bodies, in the order of the routes."""
PROBLEM = {
    "description": "A problem (RFC 9457)",
    "content": {"application/problem+json": {"schema": {"$ref": REF.format(model="ProblemBody")}}},
    "headers": {"Retry-After": {"description": "Seconds to wait, of 429 and 503", "schema": {"type": "integer"}}},
}


def document(url: str, envs: list[str], *, tokens: bool) -> str:
    """The document of the server at `url`, as JSON."""
    models = {route.body for route in ROUTES if route.body} | set(ANSWERS.values()) | {ProblemBody}
    modes: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in models]
    schemas = models_json_schema(modes, ref_template=REF)[1]["$defs"]
    schemas["Opening"]["properties"]["env"]["enum"] = ["", *envs]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route, envs, tokens)
    components: dict[str, Any] = {"schemas": schemas}
    if tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    info = {"title": "envgym", "version": str(wire.VERSION)}
    servers = [{"url": url}]
    return json.dumps({"openapi": "3.1.0", "info": info, "servers": servers, "paths": paths, "components": components})


def operation(route: Route, envs: list[str], tokens: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": route.name,
        "parameters": parameters(route, envs),
        "responses": {**answer(route), "default": PROBLEM},
    }
    if route.body is not None:
        content = {"schema": ref(route.body), "example": EXAMPLES[route.name]}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if tokens and not route.open:
        described["security"] = [{"token": []}]
    return described


def answer(route: Route) -> dict[str, Any]:
    if route.name == "close":
        return {"204": {"description": "Done"}}
    if route.name == "channel":
        return {"101": {"description": "A WebSocket from here on"}}
    kind, schema = ("text/plain", {}) if route.name == "metrics" else ("application/json", ref(ANSWERS[route.name]))
    return {"200": {"description": "The answer", "content": {kind: {"schema": schema}}}}


def parameters(route: Route, envs: list[str]) -> list[dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {
        "env": {"schema": {"type": "string", "enum": list(envs)}},
        "session": {"schema": {"type": "string"}, "example": SESSION},
    }
    in_path = [
        {"name": name, "in": "path", "required": True, **schemas[name]} for name in re.findall(r"{(\w+)}", route.path)
    ]
    query = {"properties": {}} if route.query is None else route.query.model_json_schema()
    in_query = [
        {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": field}
        for name, field in query["properties"].items()
    ]
    return in_path + in_query


def ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}
