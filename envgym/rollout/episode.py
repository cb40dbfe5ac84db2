"""One episode: users' code under deadlines, and the failure that an error in it becomes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from envgym.env import CheckedEnv, EnvSpec
from envgym.env.protocol import environment_failure
from envgym.errors import (
    CallTimeout,
    InvalidOutcome,
    InvalidStep,
    PromptTooLong,
    ResetNeeded,
    WorkerDied,
    WorkerError,
    describe,
    extend_message,
)
from envgym.processes import cancellation
from envgym.processes.cancellation import StillRunning, UsersCode, run_to_end
from envgym.transcript import EpisodeSampler
from envgym.types import Episode, Limit, Outcome, Span, Task

FAILURES: dict[type[Exception], str] = {
    CallTimeout: "timeout",
    PromptTooLong: "prompt_too_long",
    WorkerError: "engine",
    InvalidStep: "invalid_environment",
    ResetNeeded: "invalid_environment",
}
"""The kind of failure for each class of error that ends an episode. Any other error has the kind `environment`."""


async def run_episode(
    spec: EnvSpec,
    task: Task,
    run: Callable[[CheckedEnv], Coroutine[Any, Any, Episode | Outcome]],
    timeout: float,
    sampler: EpisodeSampler | None = None,
    make: Callable[[], CheckedEnv] | None = None,
) -> Episode:
    """Call `run` with a new instance of `spec`, the task's environment, limited to `timeout` seconds, and close the
    instance; `make` makes it another way. If `run` returns an outcome, it becomes an episode without turns.

    Any error becomes the episode's outcome. The episode has no id yet, and its group is not judged. Raises `WorkerDied`
    if the engine is gone, so that no episode can continue.
    """
    name = task.env or spec.id
    env: CheckedEnv | None = None
    result: Episode | Outcome | None = None
    waiting: list[Span] = []
    start = time.monotonic()
    with UsersCode(WorkerDied) as call:
        env, grace = (make or spec.make)(), math.inf
        try:
            waiting_start = time.time()
            await env.acquire()
            if not isinstance(task.prompt, str):
                try:
                    await spec.checked_images(task.prompt)  # the record names them
                except InvalidStep as error:
                    raise extend_message(error, f"the prompt of task {task.id} has it") from None
            waiting.append(("waiting", round(waiting_start, 4), round(time.time(), 4)))
            start = time.monotonic()  # waiting for a slot does not count as the episode's time
            returned = await run_to_end(run(env), timeout, f"{name}: an episode", WorkerDied)
            if not isinstance(returned, Episode | Outcome):
                raise TypeError(f"the agent must return an Episode, not {describe(returned)}")
            result = returned
        except StillRunning:
            if sampler is not None:
                sampler.end()  # code that still runs after its cancellation cannot sample any more
            grace = cancellation.GRACE_SECONDS  # an environment that ignores its cancellation may also hang in `close`
            raise
        finally:
            try:
                if env.has_close:
                    with UsersCode():  # errors in `close` are ignored, since the outcome is known by then
                        await run_to_end(env.close(), grace, f"{name}: close")
            finally:
                env.release()
    if result is None:
        result = failure_of(spec, call.error)
    episode = failed_episode(task, result, sampler) if isinstance(result, Outcome) else result
    if sampler is not None and sampler.seconds_left <= 0 and episode.outcome.reason == Limit.LENGTH:
        episode.outcome = Outcome.truncate(Limit.TIME)
    episode.seconds = time.monotonic() - start
    episode.tally = env.tally if env else None
    episode.spans = [*waiting, *(env.spans if env else ()), *(sampler.spans if sampler else ())]
    return episode


def failed_episode(task: Task, outcome: Outcome, sampler: EpisodeSampler | None) -> Episode:
    """The episode of a failure: the policy's answers until then, without a reward."""
    if sampler is None or sampler.record is None:
        return Episode(id="", task=task, outcome=outcome)
    episode = sampler.record(task, outcome)
    episode.reward, episode.score, episode.score_is_reward = None, None, False
    return episode


def failure_of(spec: EnvSpec, error: BaseException) -> Outcome:
    """The outcome of an episode that ended in `error`."""
    message = str(error) or type(error).__name__
    if isinstance(error, StillRunning):  # not retryable: a retry would hang too
        grace = cancellation.GRACE_SECONDS
        message = f"{spec.id} still runs {grace:g} s after it was cancelled, and is abandoned"
        return Outcome.fail("does_not_end", message)
    if isinstance(error, InvalidOutcome):
        return Outcome.fail(error.kind, message, retryable=error.retryable)
    for expected, kind in FAILURES.items():
        if isinstance(error, expected):
            return Outcome.fail(kind, message, retryable=expected is CallTimeout)
    failure = environment_failure(error)
    return Outcome.fail("environment", str(failure), retryable=failure.retryable)
