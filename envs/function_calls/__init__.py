"""Requests with functions, in one turn: the reward is 1 if the calls are the expected ones, else 0. None is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import DataError
from envgym.types import Action, Message, Observation, Task, ToolCall, ToolSpec, as_messages

from .comparison import are_right, example_calls, is_function, is_well_formed, tool_name

NO_CALL = "None of these functions can do that."
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Types of JSON schemas, by Python's."""


class FunctionCallsConfig(DataEnvConfig):
    """Settings of the requests. `data` is needed."""

    functions: str = "functions"
    """Field of the functions that the policy may call: a list of name, description and parameters (a JSON schema, which
    may name Python's types). A dot in a name becomes an underscore."""


class FunctionCallsEnv(Env):
    """Presents a request and functions: the reward is 1 if the turn's calls are the expected ones, else 0."""

    spec: FunctionCalls

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        functions = self.spec.functions(self.task)
        tools = [
            ToolSpec(tool_name(f["name"]), f.get("description", ""), _json_schema(f["parameters"])) for f in functions
        ]
        return Observation(messages=as_messages(self.task.prompt), tools=tuple(tools)), {}

    async def step(self, action: Action) -> StepResult:
        score = float(are_right(action.tool_calls, self.task.answer, self.spec.functions(self.task)))
        calls = [[call.name, dict(call.arguments)] for call in action.tool_calls]
        metrics = {f"score_{category}": score} if (category := self.task.fields.get("category")) else {}
        return (), score, True, False, {"score": score, "answer": json.dumps(calls, sort_keys=True), "metrics": metrics}


class FunctionCalls(DataEnvSpec):
    """The requests. A task's answer lists the expected calls, `{name: {argument: [allowed values]}}`, in any order; an
    allowed value "" means that the argument may be left out. An empty list: no call; the text `any`: at least one."""

    env_class = FunctionCallsEnv
    agent = "tool_calling"
    Config = FunctionCallsConfig
    config: FunctionCallsConfig
    answer_required = False

    def functions(self, task: Task) -> list[Mapping[str, Any]]:
        """The functions of a task, also in the form of the OpenAI API, `{"type": "function", "function": {...}}`."""
        functions = task.fields[self.config.functions]
        return [f["function"] if isinstance(f, dict) and "function" in f else f for f in functions]

    def check_task(self, task: Task) -> None:
        if not isinstance(task.fields.get(self.config.functions), list):
            raise DataError(f"task {task.key} has no list {self.config.functions!r}; env.functions names another field")
        if not all(map(is_function, self.functions(task))):
            raise DataError(
                f"task {task.key}: each of {self.config.functions!r} is a function with `name`, `description` and "
                "`parameters`, whose `properties` are JSON schemas"
            )
        if not is_well_formed(task.answer, self.functions(task)):
            raise DataError(
                f"task {task.key}: the answer is a list of calls of its functions, each "
                f'{{"name": {{"argument": [allowed values]}}}}, or the text any, not {task.answer!r:.80}'
            )

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The expected calls, with the first allowed values; a sentence where there are none. With the answer `any`, a
        call of the first function without arguments."""
        calls = example_calls(task.answer, self.functions(task))
        turn = [ToolCall("", name, arguments) for name, arguments in calls]
        return [Message("assistant", "", tuple(turn)) if turn else NO_CALL]


def _json_schema(value: Any) -> Any:
    """A description of parameters with JSON's names of types."""
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    types = {"type": JSON_TYPES.get(name, name)} if isinstance(name := value.get("type"), str) else {}
    return {key: _json_schema(item) for key, item in value.items()} | types
