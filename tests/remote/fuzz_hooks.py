"""Loaded by schemathesis: what is valid in itself comes at the right time, so that it reaches the environment."""

from __future__ import annotations

import itertools
from typing import Any

import requests
import schemathesis
from schemathesis.generation import GenerationMode

_numbers = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return
    session = f"fuzzed-{next(_numbers)}"
    match case.operation.definition.raw["operationId"]:
        case "open":
            case.body["session_id"] = session  # an id that was there would be opened differently
        case "step" if case.meta.phase.name.value != "stateful":
            address = f"{case.operation.base_url.rstrip('/')}/v1/sessions"
            opened = requests.post(address, json={"session_id": session, "seed": 0}, headers=case.headers, timeout=20)
            if opened.status_code == 200:
                case.path_parameters["session"] = session
                case.body["step_id"] = 0
