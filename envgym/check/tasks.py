"""Checks of the description and the tasks: can the environment be written down and rebuilt, are its tasks data."""

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

from .report import Finding, Verdict, failed, listed, not_applicable, ok, warning
from .subject import Subject

CHECKS = ("settings", "tasks", "splits", "fingerprints")
SAMPLE = 500
"""Tasks looked at in each split."""


async def check(subject: Subject) -> list[Finding]:
    train, test = await subject.tasks(SAMPLE, "train"), await subject.tasks(SAMPLE, "test")
    described = settings(subject)
    hashed = not_applicable("they are of the settings (settings)")
    if described.verdict is not Verdict.FAILED:
        hashed = fingerprints(subject)
    return [described, await tasks(subject, train, test), splits(train, test), hashed]


def settings(subject: Subject) -> Finding:
    """The description rebuilds an equal environment."""
    try:
        text = subject.spec.to_json()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        advice = "use types for the fields of Config that pydantic can write as JSON (numbers, text, lists, models)"
        return failed(f"they cannot be written as JSON: {reason}", advice)
    try:
        rebuilt = spec_from_json(text)
        again = rebuilt.to_json()
    except Exception as error:
        return failed(f"{text} cannot be read back: {error}", "Config must accept what it writes as JSON")
    if rebuilt != subject.spec:
        return failed(f"{text} reads back as {again}", "validators of Config must leave alone what they returned")
    return ok(f"rebuilt from {text:.100}")


async def tasks(subject: Subject, train: Sequence[Task], test: Sequence[Task]) -> Finding:
    """Sizes, ids, and that a task is always the same one."""
    wrong: list[str] = []
    sizes = []
    for split, sample in (("train", train), ("test", test)):
        own = subject.spec.tasks(split)
        sizes.append(f"{split}: {'no end' if own.size is None else own.size}")
        if own.size is not None and not subject.is_remote and not await _ends(own, own.size):
            wrong.append(f"get({own.size}) of {split} raises no IndexError, though the size is {own.size}")
        if repeated := [key for key, count in Counter(task.key for task in sample).items() if count > 1]:
            wrong.append(f"ids of {split} that several tasks have: {listed(repeated)}")
        wrong += [f"task {task.key} {reason}" for task in sample[:50] if (reason := _not_data(task))]
    again = await subject.tasks(SAMPLE, "train")
    if changed := [t.key for t, other in zip(train, again, strict=False) if task_hash(t) != task_hash(other)]:
        wrong.append(f"tasks that are others when asked for again: {listed(changed)}")
    if wrong:
        return failed("; ".join(wrong[:3]), "tasks are data: one id each, always the same, and of JSON's types")
    found = f"{', '.join(sizes)}; {len(train) + len(test)} looked at, their ids are unique"
    if not train and not test:
        return failed(found, "there must be something to play: a task for each problem")
    return ok(found) if train else warning(found, "there is nothing to train on")


def splits(train: Sequence[Task], test: Sequence[Task]) -> Finding:
    """No held-out task is trained on."""
    if not train or not test:
        return not_applicable(f"there are no {'held-out' if train else 'training'} tasks")
    prompts = {(task.env, _prompt(task)) for task in train}
    by_prompt = {env for env, count in Counter(env for env, _ in prompts).items() if count > 1}
    known = {_content(task, by_prompt) for task in train}
    shared = [task.key for task in test if _content(task, by_prompt) in known]
    if len(known) == 1 and len(shared) == len(test):
        found = f"all {len(train) + len(test)} tasks are the same but for their ids and seeds"
        return warning(found, "as it should be where reset draws the problem by the seed, or a server draws it")
    if shared:
        return failed(
            f"{len(shared)} of {len(test)} held-out tasks are also among {len(train)} that are trained on: "
            f"{listed(shared)}",
            "hold out by the problem, not by its number: the same prompt must not be on both sides",
        )
    return ok(f"none of {len(test)} held-out tasks is among {len(train)} that are trained on")


def fingerprints(subject: Subject) -> Finding:
    """Hashes by which scores can be compared over time."""
    try:
        first, again = subject.spec.fingerprint(), subject.spec.fingerprint()
    except Exception as error:
        return failed(f"fingerprint() raised {type(error).__name__}: {error}", "leave fingerprint as it is")
    if first != again:
        return failed(f"{first}, then {again}", "a fingerprint depends on nothing but code and settings")
    if missing := [key for key in ("code", "spec") if not first.get(key)]:
        advice = "define it in a file: what is typed in cannot be told from another version of it"
        return warning(f"none of its {' and '.join(missing)}", advice)
    return ok(", ".join(f"{key} {value}" for key, value in first.items()))


async def _ends(tasks: TaskSet, size: int) -> bool:
    try:
        await tasks.get(size)
    except (IndexError, EnvgymError):
        return True
    return False


def _not_data(task: Task) -> str:
    """The reason why a task cannot travel; empty where it can."""
    try:
        pickle.dumps(task)
        json.dumps([task.answer, dict(task.fields)])
    except Exception as error:
        return f"cannot be written as JSON ({type(error).__name__}: {error})"
    return ""


def _prompt(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else json.dumps([message.as_dict() for message in task.prompt])


def _content(task: Task, by_prompt: Collection[str]) -> str:
    """The problem, whatever it is called: the prompt, or, in environments where that is always the same, all that
    makes a problem."""
    if task.env in by_prompt:
        return f"{task.env} {_prompt(task)}"
    made_from = [task.answer, dict(task.fields), task.seed]
    parts = [task.env, _prompt(task), *(made_from if made_from != [None, {}, None] else [task.id])]
    return json.dumps(parts, sort_keys=True, default=str)
