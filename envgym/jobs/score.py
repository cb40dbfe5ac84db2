"""Re-scoring of recorded answers with another environment or reward model, without sampling, for `envgym score`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.files import holds_episodes, read_episodes
from envgym.errors import ConfigError, InvalidOutcome
from envgym.evaluation.changes import RECORDING, UNUSED
from envgym.hashing import text_hash
from envgym.monitoring.metrics import failure_line
from envgym.processes import event_loop
from envgym.rollout.runner import Runner
from envgym.rollout.scripted import Scripted, ScriptedEpisode, script_of
from envgym.types import Action, Episode, Group, Limit, Message, Outcome, Status, Task, Turn

from .folder import JobFolder, UnfinishedFile
from .generations import (
    GenerationFields,
    GoldTasks,
    generated_episodes,
    gold_tasks,
    holds_generations,
    unscored_episode,
)
from .job import Script, run_job
from .parts import Part, suite_env, with_last_stage

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

BEFORE = "_before"
"""Suffix of the metrics that store an episode's earlier reward, score and metrics."""
LIMITS_OF_THE_POLICY = set(Limit) - {Limit.ENVIRONMENT}
"""Truncation reasons that do not depend on the environment."""


def score_to_file(
    config: RunConfig,
    source: Path,
    path: Path,
    display: Display,
    *,
    overwrite: bool = False,
    fields: GenerationFields | None = None,
) -> tuple[list[Episode], list[Episode], GoldTasks | None]:
    """Score the episodes of `source` with the last stage's environment, and write them to `path` in the same order. If
    `source` is the stage's data, the reference answers recorded there are scored. A file of rows that are no episodes
    holds generations, in `fields`. Tasks of a named task set are looked up by their prompts where its files are on this
    machine: then its references grade, not the file's.

    The environment is reset on the saved task and stepped with the recorded turns. It replaces reward, score, answer
    and metrics; the earlier values are stored as metrics whose names end in `_before`. Failed episodes are copied
    unmodified. Episodes that an earlier, interrupted call with the same settings and file scored are reused, but groups
    are always judged again.

    Returns the episodes before and after, in one order, and the tasks of the environment's task set, if the episodes'
    were looked up there. Raises `EnvgymError`; on Ctrl-C a `KeyboardInterrupt` that names the folder of the finished
    episodes.
    """
    stage = config.stages[-1]
    saved, gold = event_loop.run(_recorded_episodes(stage, source, fields or GenerationFields(), display))
    # Saved episodes contain their tasks; a second attempt would be the same.
    data = {} if stage.data.get("path") == str(source) else stage.data
    config = with_last_stage(config, {"refills": 0}, data=data)
    answers = text_hash(repr([(episode.id, episode.seed, episode.outcome, episode.messages) for episode in saved]))
    part = Part(name="score", env=suite_env(config.stages[-1]), config=config, recordings=answers)
    folder = UnfinishedFile(path, part, overwrite=overwrite)
    with folder.open():
        scored, _ = replay(folder, saved, display)
        for earlier, new in zip(saved, scored, strict=True):
            if new is not earlier:
                new.metrics |= _earlier_metrics(earlier)
        folder.finish(scored)
    return saved, scored, gold


def replay(folder: JobFolder, saved: Sequence[Episode], display: Display) -> tuple[list[Episode], dict[int, Episode]]:
    """Run the actions of episodes again, in the environment of an open folder's part. Returns the episodes with their
    new rewards, the failed ones unchanged, and by the index of the others what the environment gave again."""
    # A separate task object per episode, whose id() finds the recording.
    tasks = {index: replace(episode.task) for index, episode in enumerate(saved) if not episode.failed}
    recordings = {id(task): saved[index] for index, task in tasks.items()}
    scored, replays = list(saved), dict[int, Episode]()

    async def restore(runner: Runner, replayed: list[Group]) -> list[Group]:
        for index, group in zip(tasks, replayed, strict=True):
            [replays[index]] = group.episodes
            scored[index] = _with_rewards_of(saved[index], replays[index])
        n_failed = sum(scored[index].failed for index in tasks)
        groups = saved_groups(scored)
        await runner.score_groups(groups)
        runner.withdraw_scores(groups)
        if len(failed := [scored[index] for index in tasks if scored[index].failed]) > n_failed:
            display.note(failure_line(failed, len(tasks)))
        return groups

    agent = Scripted(lambda task: scripted_episode(recordings[id(task)], task))
    event_loop.run(run_job(folder, display, Script(agent, list(tasks.values()), restore)))
    return scored, replays


async def _recorded_episodes(
    stage: StageConfig, source: Path, fields: GenerationFields, display: Display
) -> tuple[list[Episode], GoldTasks | None]:
    """The episodes to score, and the tasks of a named task set among which theirs were looked up."""
    if stage.data.get("path") == str(source) and not holds_episodes(source):
        display.phase("reading the reference answers")
        return await demonstration_episodes(stage), None
    gold = await gold_tasks(stage, source)
    if holds_generations(source):
        display.phase("reading the generations")
        return await generated_episodes(stage, source, fields, gold), gold
    saved = read_episodes(source)
    if gold is not None:
        for episode in saved:
            episode.task = gold.find(episode.task)
    return saved, gold


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


def _with_rewards_of(saved: Episode, replayed: Episode) -> Episode:
    """The saved episode with outcome, rewards, score, answer and metrics of the replayed one. Turns that were not used
    have no reward."""
    turns = [turn for row in replayed.rows for turn in row.turns]
    rewards = iter([turn.reward for turn in turns])
    rows = [
        replace(row, turns=[Turn(next(rewards, None), turn.stop_reason) for turn in row.turns]) for row in saved.rows
    ]
    n_unused = sum(len(row.turns) for row in saved.rows) - len(turns)
    identity = {name: getattr(saved, name) for name in ("id", "group_id", "member", "seed", "attempt", "seconds")}
    return replace(
        replayed,
        **identity,
        rows=rows,
        messages=saved.messages,
        metrics=replayed.metrics | ({UNUSED: float(n_unused)} if n_unused and not replayed.failed else {}),
        fingerprints=replayed.fingerprints | {k: v for k, v in saved.fingerprints.items() if k == "model"},
    )


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
