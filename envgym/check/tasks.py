"""Checks of settings and tasks: the environment must survive a round trip through JSON, and tasks must be data."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Collection, Sequence

from envgym.env import TaskSet
from envgym.errors import EnvgymError
from envgym.hashing import task_hash
from envgym.registry import spec_from_json
from envgym.types import Task

from .report import CheckVerdict, Finding, failure, join_first, not_applicable, ok, warning
from .subject import Subject

CHECKS = ("settings", "tasks", "splits", "fingerprints")
SAMPLE = 500
"""Number of tasks to check per split."""


async def check(subject: Subject) -> list[Finding]:
    train, test = await subject.tasks(SAMPLE, "train"), await subject.tasks(SAMPLE, "test")
    described = settings_finding(subject)
    hashed = not_applicable("the settings cannot be written (settings)")
    if described.verdict is not CheckVerdict.FAILED:
        hashed = fingerprints_finding(subject)
    return [described, await tasks_finding(subject, train, test), splits_finding(train, test), hashed]


def settings_finding(subject: Subject) -> Finding:
    """The finding on settings: their JSON must rebuild an equal environment."""
    try:
        text = subject.spec.to_json()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        advice = "use types for the fields of Config that pydantic can write as JSON (numbers, text, lists, models)"
        return failure(f"they cannot be written as JSON: {reason}", advice)
    try:
        rebuilt = spec_from_json(text)
        rebuilt_text = rebuilt.to_json()
    except Exception as error:
        return failure(f"{text} cannot be read back: {error}", "Config must accept what it writes as JSON")
    if rebuilt != subject.spec:
        advice = "validators of Config must not change values that they returned"
        return failure(f"{text} reads back as {rebuilt_text}", advice)
    return ok(f"rebuilt from {text:.100}")


async def tasks_finding(subject: Subject, train: Sequence[Task], test: Sequence[Task]) -> Finding:
    """The finding on sizes and ids of tasks, and on tasks that change."""
    mistakes: list[str] = []
    sizes = []
    for split, sample in (("train", train), ("test", test)):
        task_set = subject.spec.tasks(split)
        sizes.append(f"{split}: {'no end' if task_set.size is None else task_set.size}")
        if task_set.size is not None and not subject.is_remote and not await _has_end(task_set, task_set.size):
            mistakes.append(f"get({task_set.size}) of {split} raises no IndexError, though the size is {task_set.size}")
        if repeated := [key for key, count in Counter(task.key for task in sample).items() if count > 1]:
            mistakes.append(f"ids of {split} that several tasks have: {join_first(repeated)}")
        mistakes += [f"task {task.key} {reason}" for task in sample[:50] if (reason := _data_problem(task))]
    reread = await subject.tasks(SAMPLE, "train")
    if unstable := [t.key for t, second in zip(train, reread, strict=False) if task_hash(t) != task_hash(second)]:
        mistakes.append(f"tasks that differ when read again: {join_first(unstable)}")
    if mistakes:
        return failure("; ".join(mistakes[:3]), "tasks must be data: with unique ids, constant, and of JSON's types")
    message = f"{', '.join(sizes)}; {len(train) + len(test)} checked, their ids are unique"
    if not train and not test:
        return failure(message, "return at least one task from tasks()")
    return ok(message) if train else warning(message, "there are no training tasks")


def splits_finding(train: Sequence[Task], test: Sequence[Task]) -> Finding:
    """The finding on splits: no held-out task may be a training task."""
    if not train or not test:
        return not_applicable(f"there are no {'held-out' if train else 'training'} tasks")
    prompts = {(task.env, _prompt(task)) for task in train}
    prompt_envs = {env for env, count in Counter(env for env, _ in prompts).items() if count > 1}
    train_contents = {_content(task, prompt_envs) for task in train}
    overlap = [task.key for task in test if _content(task, prompt_envs) in train_contents]
    if len(train_contents) == 1 and len(overlap) == len(test):
        message = f"all {len(train) + len(test)} tasks are the same except for their ids and seeds"
        return warning(message, "fine if reset draws the problem from the seed, or a server draws it")
    if overlap:
        message = f"{len(overlap)} of {len(test)} held-out tasks are also among {len(train)} training tasks"
        advice = "split by the problem, not by its number: a prompt must not be in both splits"
        return failure(f"{message}: {join_first(overlap)}", advice)
    return ok(f"none of {len(test)} held-out tasks is among {len(train)} training tasks")


def fingerprints_finding(subject: Subject) -> Finding:
    """The finding on fingerprints, which tell whether two scores are comparable."""
    try:
        first, second = subject.spec.fingerprint(), subject.spec.fingerprint()
    except Exception as error:
        return failure(f"fingerprint() raised {type(error).__name__}: {error}", "do not override fingerprint")
    if first != second:
        return failure(f"{first}, then {second}", "a fingerprint may only depend on code and settings")
    if missing := [key for key in ("code", "spec") if not first.get(key)]:
        advice = "define the class in a file: code from a prompt has no fingerprint"
        return warning(f"none of its {' and '.join(missing)}", advice)
    return ok(", ".join(f"{key} {value}" for key, value in first.items()))


async def _has_end(tasks: TaskSet, size: int) -> bool:
    try:
        await tasks.get(size)
    except (IndexError, EnvgymError):
        return True
    return False


def _data_problem(task: Task) -> str:
    """The reason why a task cannot be sent to another process; empty if it can."""
    try:
        pickle.dumps(task)
        json.dumps([task.answer, dict(task.fields)])
    except Exception as error:
        return f"cannot be written as JSON ({type(error).__name__}: {error})"
    return ""


def _prompt(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else json.dumps([message.as_dict() for message in task.prompt])


def _content(task: Task, prompt_envs: Collection[str]) -> str:
    """A task's problem without its id: the prompt or, in environments with a constant prompt, all other fields."""
    if task.env in prompt_envs:
        return f"{task.env} {_prompt(task)}"
    content = [task.answer, dict(task.fields), task.seed]
    parts = [task.env, _prompt(task), *(content if content != [None, {}, None] else [task.id])]
    return json.dumps(parts, sort_keys=True, default=str)
