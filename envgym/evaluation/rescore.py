"""Judging saved episodes again, without sampling, by another environment or reward model: what `envgym score` does."""

from __future__ import annotations

import hashlib
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.env import EnvSpec, ListTasks
from envgym.episodes.files import check_target, content_hash, read_episodes
from envgym.errors import ConfigError, InvalidOutcome
from envgym.hashing import task_hash
from envgym.launch.components import make_runner, running
from envgym.processes import event_loop
from envgym.rollout.scripted import Scripted, ScriptedEpisode, in_order
from envgym.run_folder import RunFolder
from envgym.services import start_services
from envgym.services.start import refuse_policies
from envgym.tasks import DataEnvSpec
from envgym.types import (
    Action,
    Episode,
    Group,
    Limit,
    Message,
    Outcome,
    Row,
    Segment,
    Status,
    StopReason,
    Task,
    Turn,
    as_messages,
)  # fmt: skip

from .plan import Part
from .play import ReadyPart
from .resumable import UnfinishedFile
from .statistics import Mean, clustered_mean
from .suite import SuiteEnv

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

PURPOSE = "score"
BEFORE = "_before"
"""Ending of the names of the metrics that keep an episode's earlier judgement."""
UNUSED = "unused_turns"
"""Metric: recorded turns that were not played, because the environment had ended the episode."""
RECORDING = "recording"
"""Reason of an episode that is truncated because its environment wants more turns than were recorded, and kind of
failure of one whose turns cannot be told from its record."""
LIMITS_OF_THE_POLICY = set(Limit) - {Limit.ENVIRONMENT}
"""Reasons for which the policy had no more turns, whatever the environment."""


def rescore(config: RunConfig, source: Path, out: Path, display: Display, *, overwrite: bool = False) -> dict[str, Any]:
    """Let the last stage's environment judge the episodes of `source`, write them to `out` in their order and return
    what came of it. Where `source` is the stage's data, it judges the answers recorded there.

    The environment is reset on the saved task and stepped with the recorded turns. Its judgement replaces reward,
    score, answer and metrics; the old ones are kept as metrics whose names end in `_before`. Failed episodes stay as
    they are.

    What an earlier call with the same settings and file has judged is not judged again, but by those that judge groups
    together.

    Keys: env, episodes, judged, skipped (failed before: kind -> count), score and reward (each a `Change`), parts (the
    same two of each part of an evaluation or a rollout, by name; empty where there is one), changed, short (truncated
    for want of turns), unused (ended before their last turn), failures (kind -> count), seconds. Raises `EnvgymError`;
    Ctrl-C is a `KeyboardInterrupt` that says what is kept.
    """
    check_target(out, overwrite=overwrite)
    began = time.monotonic()
    *before, stage = config.stages
    if stage.data.get("path") == str(source):
        display.phase("reading the answers")
        saved = event_loop.run(demonstrated(stage))
        # They are judged as saved episodes are, which bring their tasks.
        config = config.model_copy(update={"stages": [*before, stage.model_copy(update={"data": {}})]})
        content = hashlib.sha256(repr([episode.messages for episode in saved]).encode()).hexdigest()
    else:
        saved, content = read_episodes(source), content_hash(source)
    folder = UnfinishedFile(out, overwrite=overwrite)
    with folder.begun(_settings(config, content)):
        episodes = event_loop.run(_score(config, saved, folder, display))
        folder.finish(episodes)
    return {"env": config.stages[-1].env.name, **_summary(saved, episodes), "seconds": time.monotonic() - began}


async def demonstrated(stage: StageConfig) -> list[Episode]:
    """The demonstrations of all tasks of a stage's environment, held-out ones too, as episodes that nobody has judged
    yet."""
    episodes: list[Episode] = []
    async with stage.make_spec() as spec:
        for split in ("train", "test"):
            tasks = spec.tasks(split)
            if tasks.size is None:
                raise ConfigError(f"environment {spec.id} has tasks without end: there is no end to its answers")
            for task in [await tasks.get(index) for index in range(tasks.size)]:
                shown = spec.demonstrations(task, 0)
                turns = [turn if isinstance(turn, Message) else Message.of("assistant", turn) for turn in shown]
                row = Row([Segment("action", array("i"))], turns=[Turn(None, StopReason.STOP) for _ in turns])
                group = f"demonstrated/{len(episodes):06d}"
                episode = Episode(f"{group}:000:0", task, Outcome.completed(), [row], env=spec.id, group=group)
                messages = list(as_messages(task.prompt))
                asked = messages[: len(messages) - len(turns)] if messages[-len(turns) :] == turns else messages
                episode.messages = [*asked, *turns]
                episodes.append(episode)
    return episodes


def recorded(saved: Episode, task: Task) -> ScriptedEpisode:
    """A saved episode as it is played on `task`: its turns as they were recorded, with text, tool calls, token ids and
    stop reasons. Raises `InvalidOutcome` where they cannot be told from the record."""
    out_of_turns = saved.outcome.status is Status.TRUNCATED and saved.outcome.reason in LIMITS_OF_THE_POLICY
    unfinished = saved.outcome if out_of_turns else Outcome.truncated(RECORDING)
    return ScriptedEpisode(task, saved.seed, in_order(recorded_actions(saved)), unfinished)


def recorded_actions(saved: Episode) -> list[Action]:
    """The policy's actions in an episode, turn by turn.

    The messages may begin with turns of the assistant that are the task's: the policy's are the last ones. An API gives
    no token ids. Raises `InvalidOutcome` where the messages do not hold all the turns.
    """
    turns = [turn for row in saved.rows for turn in row.turns]
    sampled = [segment for row in saved.rows for segment in row.segments if segment.role == "action"]
    answers = [message for message in saved.messages if message.role == "assistant"]
    if not turns:
        raise InvalidOutcome(RECORDING, "no turn of the policy is recorded")
    if len(answers) < len(turns):
        raise InvalidOutcome(
            RECORDING, f"{len(turns)} turns are recorded, and the messages hold {len(answers)} of them"
        )
    token_ids = [segment.token_ids for segment in sampled] if len(sampled) == len(turns) else [array("i")] * len(turns)
    return [
        Action(message.text, ids, message.tool_calls, turn.stop_reason)
        for message, ids, turn in zip(answers[-len(turns) :], token_ids, turns, strict=True)
    ]


def _with_rewards(rows: Sequence[Row], turns: Sequence[Turn]) -> list[Row]:
    """The rows with the rewards of these turns; None for those that were not played."""
    rewards: Iterator[float | None] = iter([turn.reward for turn in turns])
    return [replace(row, turns=[Turn(next(rewards, None), turn.stop_reason) for turn in row.turns]) for row in rows]


def _settings(config: RunConfig, episodes: str) -> dict[str, Any]:
    """Everything that a judgement depends on."""
    stage = config.stages[-1].model_dump(mode="json")
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {"env": stage["env"], "data": stage["data"], **run, "episodes": episodes}


async def _score(
    config: RunConfig, saved: Sequence[Episode], folder: UnfinishedFile, display: Display
) -> list[Episode]:
    """The episodes as they are judged now, in the same order."""
    stage = config.stages[-1]
    stage.rollout.refills = 0  # another episode would be the same one
    spec = stage.make_spec()
    # A task object of its own for each episode, by which the recording is found.
    tasks = {index: replace(episode.task) for index, episode in enumerate(saved) if not episode.failed}
    refuse_policies(spec, "which is not sampled here: name another model for it")
    _give(spec, list(tasks.values()))
    display.phase(f"setting up {spec.id}")
    async with (
        running(config, RunFolder(folder.path)) as runtime,
        start_services(spec, runtime, deterministic=config.deterministic, now=False) as services,
    ):
        folder.check_tasks(PURPOSE, list(tasks.values()), spec)
        if folder.kept:
            display.note(f"{len(folder.kept)} episodes are kept from before")
        if services.names:
            display.phase(f"starting {', '.join(services.names)}")
            await services.start()
        recordings = {id(task): saved[index] for index, task in tasks.items()}
        agent = Scripted(lambda task: recorded(recordings[id(task)], task))
        runner = make_runner(config, stage, spec, agent, None, None)
        part = Part(name=PURPOSE, env=SuiteEnv(env=stage.env, data=stage.data), config=config)
        display.phase("scoring")
        groups = await ReadyPart(part, list(tasks.values()), runner).play(folder, display)
        judged = list(saved)
        for index, group in zip(tasks, groups, strict=True):
            [episode], old = group.episodes, saved[index]
            for name in ("id", "group", "member", "seed", "attempt", "seconds"):
                setattr(episode, name, getattr(old, name))
            if "model" in old.fingerprints:
                episode.fingerprints["model"] = old.fingerprints["model"]
            turns = [turn for row in episode.rows for turn in row.turns]
            n_unused = sum(len(row.turns) for row in old.rows) - len(turns)
            if n_unused and not episode.failed:
                episode.metrics[UNUSED] = float(n_unused)
            episode.rows, episode.messages = _with_rewards(old.rows, turns), old.messages
            judged[index] = episode
        judged_groups = saved_groups(judged)
        await runner.compare(judged_groups)
        runner.withdraw_scores(judged_groups)
    for index in tasks:
        judged[index].metrics |= _before(saved[index])
    return judged


def _give(spec: EnvSpec, tasks: Sequence[Task]) -> None:
    """Let an environment that has no tasks of its own be set up on those that it is going to pose."""
    of: dict[int, tuple[EnvSpec, list[Task]]] = {}
    for task in tasks:
        part = spec.of(task)  # a mixture refuses what none of its members poses
        of.setdefault(id(part), (part, []))[1].append(task)
    for part, own in of.values():
        if isinstance(part, DataEnvSpec):
            part.given = ListTasks(own)


def saved_groups(episodes: Sequence[Episode]) -> list[Group]:
    """The groups that episodes belong to. Files of several rollouts may use the same names: a member that comes again
    is of another group, and so is one of another task."""
    groups: dict[tuple[str, str, int], Group] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for episode in episodes:
        name = (episode.group, episode.task.key)
        member = (*name, episode.member)
        group = groups.setdefault((*name, seen[member]), Group(episode.group, episode.task, []))
        group.episodes.append(episode)
        seen[member] += 1
    return list(groups.values())


def _before(old: Episode) -> dict[str, float]:
    """The earlier judgement of an episode as metrics; of those before it nothing is kept."""
    metrics = {name: value for name, value in old.metrics.items() if not name.endswith(BEFORE)}
    metrics |= {name: value for name in ("reward", "score") if (value := getattr(old, name)) is not None}
    return {f"{name}{BEFORE}": value for name, value in metrics.items()}


def part_of(episode: Episode) -> str:
    """Purpose of an episode: a part of an evaluation, a rollout, or training, whose steps are one."""
    return "training" if re.fullmatch(r"step-\d+-\d+", episode.purpose) else episode.purpose


@dataclass(frozen=True, slots=True)
class Change:
    """A mean over problems as it was and as it is now, over the same `episodes`: those that have a number both times.
    Where none has, each mean is over those that have it. None: there is none."""

    before: Mean | None
    after: Mean | None
    episodes: int


def _summary(before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if not old.failed]
    judged = [new for _, new in pairs if not new.failed]
    parts: dict[str, list[tuple[Episode, Episode]]] = {}
    for old, new in pairs:
        parts.setdefault(part_of(old), []).append((old, new))
    return {
        "episodes": len(before),
        "judged": len(judged),
        "skipped": dict(Counter(old.outcome.reason for old in before if old.failed)),
        **_changes(pairs),
        "parts": {name: _changes(own) for name, own in parts.items()} if len(parts) > 1 else {},
        "changed": sum((old.score, old.reward) != (new.score, new.reward) for old, new in pairs if not new.failed),
        "short": sum(new.outcome.reason == RECORDING for new in judged),
        "unused": sum(UNUSED in new.metrics for new in judged),
        "failures": dict(Counter(new.outcome.reason for _, new in pairs if new.failed)),
    }


def _changes(pairs: Sequence[tuple[Episode, Episode]]) -> dict[str, Change]:
    return {what: _change(pairs, what) for what in ("score", "reward")}


def _change(pairs: Sequence[tuple[Episode, Episode]], what: str) -> Change:
    judged = [pair for pair in pairs if not pair[1].failed]
    both = [pair for pair in judged if all(getattr(episode, what) is not None for episode in pair)]
    old, new = ([pair[which] for pair in both or judged] for which in (0, 1))
    return Change(_mean(old, what), _mean(new, what), len(both))


def _mean(episodes: Sequence[Episode], what: str) -> Mean | None:
    """The mean over problems of an episode's `score` or `reward`; None where no episode has one."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        if (value := getattr(episode, what)) is not None:
            # The first task of every environment has the same key, and other data other tasks of the same one.
            problem = f"{part_of(episode)}\0{task_hash(episode.task)}\0{episode.task.key}"
            values.setdefault(problem, []).append(value)
    return clustered_mean(values) if values else None
