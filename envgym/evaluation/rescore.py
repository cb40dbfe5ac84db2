"""Re-scoring of saved episodes with another environment or reward model, without sampling, for `envgym score`."""

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
from envgym.env import EnvSpec, TaskList
from envgym.episodes.files import check_target, content_hash, read_episodes
from envgym.errors import ConfigError, InvalidOutcome
from envgym.hashing import task_hash
from envgym.launch.components import make_runner, open_runtime
from envgym.monitoring.metrics import failure_line
from envgym.processes import event_loop
from envgym.rollout.scripted import Scripted, ScriptedEpisode, script_of
from envgym.run_folder import RunFolder
from envgym.services import start_services
from envgym.services.start import refuse_policies
from envgym.tasks import DataEnvSpec
from envgym.types import Action, Episode, Group, Limit, Message, Outcome, Row, Status, Task, Turn

from .generations import GenerationFields, generated_episodes, gold_tasks, holds_generations, unscored_episode
from .plan import Part
from .play import PartRun
from .resumable import UnfinishedFile
from .statistics import Mean, clustered_mean
from .suite import SuiteEnv

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

PURPOSE = "score"
BEFORE = "_before"
"""Suffix of the metrics that store an episode's earlier reward, score and metrics."""
UNUSED = "unused_turns"
"""Metric: recorded turns that were not used, because the environment ended the episode before them."""
RECORDING = "recording"
"""Truncation reason if the environment needs more turns than were recorded, and failure kind if the recording lacks
turns."""
LIMITS_OF_THE_POLICY = set(Limit) - {Limit.ENVIRONMENT}
"""Truncation reasons that do not depend on the environment."""


def rescore(
    config: RunConfig, source: Path, path: Path, display: Display, *, overwrite: bool = False,
    fields: GenerationFields | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Score the episodes of `source` with the last stage's environment, write them to `path` in the same order and
    return a summary. If `source` is the stage's data, the reference answers recorded there are scored. A file of rows
    that are no episodes holds generations, in `fields`. Tasks of a named task set are looked up by their prompts where
    its files are on this machine: then its references grade, not the file's.

    The environment is reset on the saved task and stepped with the recorded turns. It replaces reward, score, answer
    and metrics; the earlier values are stored as metrics whose names end in `_before`. Failed episodes are copied
    unmodified. Episodes that an earlier, interrupted call with the same settings and file scored are reused, but groups
    are always judged again.

    Keys: env, gold (`GoldTasks`, or None if nothing was looked up), episodes, judged, skipped (failed earlier: kind ->
    count), score and reward (each a `Change`), parts (these two per part of an evaluation or a rollout, by name; empty
    for a single part), changed, short (truncated for lack of turns), unused (ended before their last turn), failures
    (kind -> count), seconds. Raises `EnvgymError`; on Ctrl-C a `KeyboardInterrupt` that names the folder of the
    finished episodes.
    """
    check_target(path, overwrite=overwrite)
    start = time.monotonic()
    *earlier_stages, stage = config.stages
    gold = None
    if stage.data.get("path") == str(source):
        display.phase("reading the reference answers")
        saved = event_loop.run(demonstration_episodes(stage))
        # Scored like saved episodes, which contain their tasks.
        config = config.model_copy(update={"stages": [*earlier_stages, stage.model_copy(update={"data": {}})]})
        content = hashlib.sha256(repr([episode.messages for episode in saved]).encode()).hexdigest()
    else:
        are_generations, gold = holds_generations(source), event_loop.run(gold_tasks(stage, source))
        if are_generations:
            display.phase("reading the generations")
            saved = event_loop.run(generated_episodes(stage, source, fields or GenerationFields(), gold))
        else:
            saved = read_episodes(source)
            if gold is not None:
                for episode in saved:
                    episode.task = gold.find(episode.task)
        content = content_hash(source)
    folder = UnfinishedFile(path, overwrite=overwrite)
    with folder.open(_settings(config, content)):
        episodes = event_loop.run(_score(config, saved, folder, display))
        folder.finish(episodes)
    return {"env": stage.env.name, "gold": gold, **_summary(saved, episodes), "seconds": time.monotonic() - start}


async def demonstration_episodes(stage: StageConfig) -> list[Episode]:
    """The demonstrations of all tasks of a stage's environment, held-out ones included, as unscored episodes."""
    episodes: list[Episode] = []
    async with stage.make_spec() as spec:
        for split in ("train", "test"):
            tasks = spec.tasks(split)
            if tasks.size is None:
                raise ConfigError(
                    f"environment {spec.id} has tasks without end: their reference answers cannot all be scored"
                )
            for task in [await tasks.get(index) for index in range(tasks.size)]:
                demonstration = spec.demonstrations(task, 0)
                turns = [turn if isinstance(turn, Message) else Message("assistant", turn) for turn in demonstration]
                episodes.append(unscored_episode(spec, task, turns, f"demonstrated/{len(episodes):06d}"))
    return episodes


def scripted_episode(saved: Episode, task: Task) -> ScriptedEpisode:
    """A saved episode as a script on `task`: its recorded turns, with text, tool calls, token ids and stop reasons.
    Raises `InvalidOutcome` if the recording lacks turns."""
    was_limited = saved.outcome.status is Status.TRUNCATED and saved.outcome.reason in LIMITS_OF_THE_POLICY
    unfinished = saved.outcome if was_limited else Outcome.truncate(RECORDING)
    return ScriptedEpisode(task, saved.seed, script_of(recorded_actions(saved)), unfinished)


def recorded_actions(saved: Episode) -> list[Action]:
    """The policy's actions in an episode, turn by turn.

    The messages may begin with assistant turns of the task's prompt; the policy's turns are the last ones. An API
    returns no token ids. Raises `InvalidOutcome` if the messages lack turns.
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
    """The rows with the rewards of these turns; None for the later turns, which were not used."""
    rewards: Iterator[float | None] = iter([turn.reward for turn in turns])
    return [replace(row, turns=[Turn(next(rewards, None), turn.stop_reason) for turn in row.turns]) for row in rows]


def _settings(config: RunConfig, episodes: str) -> dict[str, Any]:
    """Every setting on which rewards depend."""
    stage = config.stages[-1].model_dump(mode="json")
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {"env": stage["env"], "data": stage["data"], **run, "episodes": episodes}


async def _score(
    config: RunConfig, saved: Sequence[Episode], folder: UnfinishedFile, display: Display
) -> list[Episode]:
    """The episodes with their new rewards, in the same order."""
    stage = config.stages[-1]
    stage.rollout.refills = 0  # a second attempt would be the same
    spec = stage.make_spec()
    # A separate task object per episode, whose id() finds the recording.
    tasks = {index: replace(episode.task) for index, episode in enumerate(saved) if not episode.failed}
    refuse_policies(spec, "which is not sampled here: name another model for it")
    _use_tasks(spec, list(tasks.values()))
    display.phase(f"setting up {spec.id}")
    async with (
        open_runtime(config, RunFolder(folder.path)) as runtime,
        start_services(spec, runtime, deterministic=config.deterministic, eager=False) as services,
    ):
        folder.check_tasks(PURPOSE, list(tasks.values()), spec)
        if folder.saved:
            display.note(f"{len(folder.saved)} saved episodes are reused")
        if services.names:
            display.phase(f"starting {', '.join(services.names)}")
            await services.start()
        recordings = {id(task): saved[index] for index, task in tasks.items()}
        agent = Scripted(lambda task: scripted_episode(recordings[id(task)], task))
        runner = make_runner(config, stage, spec, agent, None, None)
        part = Part(name=PURPOSE, env=SuiteEnv(env=stage.env, data=stage.data), config=config)
        display.phase("scoring")
        groups = await PartRun(part, list(tasks.values()), runner).run_episodes(folder, display)
        scored = list(saved)
        for index, group in zip(tasks, groups, strict=True):
            [episode], old = group.episodes, saved[index]
            for name in ("id", "group_id", "member", "seed", "attempt", "seconds"):
                setattr(episode, name, getattr(old, name))
            if "model" in old.fingerprints:
                episode.fingerprints["model"] = old.fingerprints["model"]
            turns = [turn for row in episode.rows for turn in row.turns]
            n_unused = sum(len(row.turns) for row in old.rows) - len(turns)
            if n_unused and not episode.failed:
                episode.metrics[UNUSED] = float(n_unused)
            episode.rows, episode.messages = _with_rewards(old.rows, turns), old.messages
            scored[index] = episode
        n_failed = sum(scored[index].failed for index in tasks)  # which `run_episodes` has told
        groups = saved_groups(scored)
        await runner.score_groups(groups)
        runner.withdraw_scores(groups)
        if len(failed := [scored[index] for index in tasks if scored[index].failed]) > n_failed:
            display.note(failure_line(failed, len(tasks)))
    for index in tasks:
        scored[index].metrics |= _earlier_metrics(saved[index])
    return scored


def _use_tasks(spec: EnvSpec, tasks: Sequence[Task]) -> None:
    """Set the tasks of environments that take theirs from data to the saved ones."""
    tasks_by_spec: dict[int, tuple[EnvSpec, list[Task]]] = {}
    for task in tasks:
        member = spec.spec_for(task)  # a mixture raises an error for a task of none of its members
        tasks_by_spec.setdefault(id(member), (member, []))[1].append(task)
    for member, member_tasks in tasks_by_spec.values():
        if isinstance(member, DataEnvSpec):
            member.fixed_tasks = TaskList(member_tasks)


def saved_groups(episodes: Sequence[Episode]) -> list[Group]:
    """The groups of episodes. Files of several rollouts may use a group's name twice: a repeated member number, or
    another task, begins another group."""
    groups: dict[tuple[str, str, int], Group] = {}
    counts: Counter[tuple[str, str, int]] = Counter()
    for episode in episodes:
        name = (episode.group_id, episode.task.key)
        member = (*name, episode.member)
        group = groups.setdefault((*name, counts[member]), Group(episode.group_id, episode.task, []))
        group.episodes.append(episode)
        counts[member] += 1
    return list(groups.values())


def _earlier_metrics(old: Episode) -> dict[str, float]:
    """The earlier reward, score and metrics of an episode as metrics; even earlier ones are dropped."""
    metrics = {name: value for name, value in old.metrics.items() if not name.endswith(BEFORE)}
    metrics |= {name: value for name in ("reward", "score") if (value := getattr(old, name)) is not None}
    return {f"{name}{BEFORE}": value for name, value in metrics.items()}


def part_of(episode: Episode) -> str:
    """Purpose of an episode: a part of an evaluation, a rollout, or "training" for every training step."""
    return "training" if re.fullmatch(r"step-\d+-\d+", episode.purpose) else episode.purpose


@dataclass(frozen=True, slots=True)
class Change:
    """An earlier and a new mean over problems, over the same `episodes`: those with a number both times. If there are
    none, each mean is over the episodes with its number; None without any."""

    earlier: Mean | None
    new: Mean | None
    episodes: int


def _summary(saved: Sequence[Episode], episodes: Sequence[Episode]) -> dict[str, Any]:
    """`rescore`'s summary without `env` and `seconds`."""
    pairs = [(old, new) for old, new in zip(saved, episodes, strict=True) if not old.failed]
    finished = [new for _, new in pairs if not new.failed]
    parts: dict[str, list[tuple[Episode, Episode]]] = {}
    for old, new in pairs:
        parts.setdefault(part_of(old), []).append((old, new))
    return {
        "episodes": len(saved),
        "judged": len(finished),
        "skipped": dict(Counter(old.outcome.reason for old in saved if old.failed)),
        **_changes(pairs),
        "parts": {name: _changes(part_pairs) for name, part_pairs in parts.items()} if len(parts) > 1 else {},
        "changed": sum((old.score, old.reward) != (new.score, new.reward) for old, new in pairs if not new.failed),
        "short": sum(new.outcome.reason == RECORDING for new in finished),
        "unused": sum(UNUSED in new.metrics for new in finished),
        "failures": dict(Counter(new.outcome.reason for _, new in pairs if new.failed)),
    }


def _changes(pairs: Sequence[tuple[Episode, Episode]]) -> dict[str, Change]:
    return {field: _change(pairs, field) for field in ("score", "reward")}


def _change(pairs: Sequence[tuple[Episode, Episode]], field: str) -> Change:
    finished = [pair for pair in pairs if not pair[1].failed]
    comparable = [pair for pair in finished if all(getattr(episode, field) is not None for episode in pair)]
    old, new = ([pair[side] for pair in comparable or finished] for side in (0, 1))
    return Change(_mean(old, field), _mean(new, field), len(comparable))


def _mean(episodes: Sequence[Episode], field: str) -> Mean | None:
    """The mean over problems of the episodes' `score` or `reward`; None if no episode has one."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        if (value := getattr(episode, field)) is not None:
            # A key alone does not identify a task: environments, and data files, use the same keys.
            problem = f"{part_of(episode)}\0{task_hash(episode.task)}\0{episode.task.key}"
            values.setdefault(problem, []).append(value)
    return clustered_mean(values) if values else None
