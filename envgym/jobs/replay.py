"""A run's recorded episodes again, for `envgym replay`: their actions in the environment, or the policy's samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from envgym.config.schema import RunConfig
from envgym.env import EnvSpec
from envgym.episodes.files import read_episodes
from envgym.errors import ConfigError
from envgym.processes import event_loop
from envgym.run_folder import files_by_step, stage_folders
from envgym.types import Episode, Message, Outcome, Task

from .folder import JobFolder, UnfinishedFile
from .job import run_job
from .models import MakeModel, with_results
from .parts import Part, suite_env, with_last_stage
from .score import replay

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

FINGERPRINTS = {"code": "code", "spec": "settings", "grader": "grader's packages", "task": "task"}
"""What has changed, if an episode's fingerprint is another."""
MOST_CHARACTERS = 100
"""Characters of a message that are shown."""


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """An episode that was run again: what has changed since, and what is different."""

    episode: Episode
    changes: list[str]
    differences: list[str]


def recorded_step(run: Path, step: int | None) -> tuple[RunConfig, int, Path, list[Episode]]:
    """The settings of a run's last stage with recorded episodes, its last step or `step`, the file of that, and its
    episodes. `run` may be the folder of one stage. Raises `ConfigError` if there are none."""
    folder = run if (run / "config.yaml").is_file() else run.parent
    if not (folder / "config.yaml").is_file() or (folder / "episodes.jsonl").is_file():  # an evaluation has those
        raise ConfigError(f"{run} is not a run (see: envgym runs)")
    config = RunConfig.read(folder / "config.yaml")
    for index, stage_folder in reversed([*enumerate(stage_folders(folder, config.stage_names))]):
        if run not in (folder, stage_folder.path):
            continue
        if files := files_by_step(stage_folder.rollouts, ".parquet"):
            step = max(files) if step is None else step
            if step not in files:
                raise ConfigError(f"{run} has no episodes of step {step}, but of steps {min(files)} to {max(files)}")
            stage = with_results(config.stages[index], config, folder)
            return config.model_copy(update={"stages": [stage]}), step, files[step], read_episodes(files[step])
    raise ConfigError(f"{run} holds no episodes: it has taken no step, or trained on recorded data only")


def replay_episodes(config: RunConfig, episodes: Sequence[Episode], display: Display) -> list[ReplayedEpisode]:
    """Run the actions of episodes that have not failed again, in the environment of the last stage of `config`, each
    with its seed. Raises `EnvgymError`, also if that stage's agent is not one whose turns are the env steps."""
    stage = config.stages[-1]
    if not stage.agent_config()[0].steps_are_turns:
        raise ConfigError(
            f"episodes of agent {stage.agent.name} cannot be replayed: its turns are recorded, and not what it does in "
            "the environment"
        )
    config = with_last_stage(config, {"refills": 0, "retries": 0, "processes": 0})
    part = Part(name="replay", env=suite_env(stage), config=config, recordings="")
    with tempfile.TemporaryDirectory() as folder:
        file = UnfinishedFile(Path(folder, "replay.jsonl"), part, overwrite=True)
        with file.open():
            scored, replays = replay(file, episodes, display)
    return [
        ReplayedEpisode(
            episodes[index], _changes(episodes[index], new), [*_differences(episodes[index], new, scored[index])]
        )
        for index, new in replays.items()
    ]


class RecordedPart(Part):
    """The groups of one sampling plan of a run."""

    _tasks: list[Task] = PrivateAttr(default_factory=list)

    @property
    def branches(self) -> int:
        return self.stage.rollout.branches

    async def tasks(self, spec: EnvSpec) -> list[Task]:
        return self._tasks


def sample_again(
    config: RunConfig, run: Path, step: int, episodes: Sequence[Episode], display: Display, make_model: MakeModel
) -> list[tuple[Episode, float]]:
    """Sample a step's episodes again, from the weights that sampled them: those of the checkpoint of the step before,
    or of the model that the run began with. Returns each episode that has not failed with the share of its sampled
    tokens, up to the first difference, that are the same. Raises `ConfigError` without these weights, and for a run
    that was not deterministic, whose samples have no seeds.
    """
    stage, changes = config.stages[-1], {}
    if not config.deterministic:
        raise ConfigError("--sample: only the samples of a run with deterministic=true can be repeated")
    if step > 1:
        checkpoint = run / "checkpoints" / f"step_{step - 1:06d}"
        if not checkpoint.is_dir():
            n_taken, saved = len(files_by_step(run / "rollouts", ".parquet")), checkpoint.parent.glob("step_*")
            steps = sorted(int(path.name.removeprefix("step_")) + 1 for path in saved)
            choices = ", ".join(str(number) for number in [1, *steps] if number <= n_taken)
            raise ConfigError(
                f"--sample: {checkpoint} is gone, which sampled step {step}; there are weights for {choices}"
            )
        changes["model"] = str(checkpoint)
    config = with_last_stage(config, {"seed_scope": stage.rollout.seed_scope or "group"}, **changes)
    tasks: dict[str, dict[str, Task]] = {}
    for episode in sorted(episodes, key=lambda episode: episode.group_id):
        tasks.setdefault(episode.purpose, {}).setdefault(episode.group_id, episode.task)
    parts = []
    for purpose, groups in tasks.items():
        part = RecordedPart(name=purpose, env=suite_env(stage, samples=stage.rollout.group_size), config=config)
        part._tasks = [*groups.values()]
        parts.append(part)
    with tempfile.TemporaryDirectory() as folder:
        job = JobFolder(Path(folder, "job"))
        job.create(parts)
        with job.open():
            _, sampled = event_loop.run(run_job(job, display, make_model))
    new = {(e.group_id, e.member): e for groups in sampled.values() for group in groups for e in group.episodes}
    finished = [episode for episode in episodes if not episode.failed]
    return [(episode, _equal_share(episode, new[episode.group_id, episode.member])) for episode in finished]


def _equal_share(*pair: Episode) -> float:
    """The share of two episodes' sampled tokens, up to the first difference, that are the same."""
    saved, new = (
        [token for row in episode.rows for part in row.segments if part.role == "action" for token in part.token_ids]
        for episode in pair
    )
    n_equal = sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], zip(saved, new, strict=False)))
    return n_equal / max(1, len(saved), len(new))


def _changes(saved: Episode, new: Episode) -> list[str]:
    return [words for name, words in FINGERPRINTS.items() if saved.fingerprints.get(name) != new.fingerprints.get(name)]


def _differences(saved: Episode, new: Episode, scored: Episode) -> Iterator[str]:
    """The differences of a replay from a saved episode; `scored` has the replay's rewards, after group judging."""
    if new.failed:
        yield f"it fails: {new.outcome.reason}: {new.outcome.message}"
        return
    rewards, new_rewards = ([turn.reward for row in e.rows for turn in row.turns] for e in (saved, scored))
    n_turns, n_steps = len(rewards), sum(len(row.turns) for row in new.rows)
    messages, new_messages = _observed(saved, n_turns), _observed(new, n_steps)
    for turn, (message, new_message) in enumerate(zip(messages, new_messages, strict=False)):
        is_recorded = turn < n_turns or message  # agents need not record what follows their last turn
        if is_recorded and message != new_message:
            place = f"after turn {turn}" if turn else "at the start"
            yield f"{place} it observed {_in_words(message)}, and now {_in_words(new_message)}"
            break
    if n_steps < n_turns:
        yield f"it ends after turn {n_steps} of {n_turns}"
    for turn, (reward, new_reward) in enumerate(zip(rewards[:n_steps], new_rewards, strict=False), 1):
        if reward != new_reward:
            yield f"turn {turn} had the reward {reward}, and now {new_reward}"
            break
    values = {name: (getattr(saved, name), getattr(scored, name)) for name in ("reward", "score", "answer")}
    values["end"] = _end(saved.outcome), _end(scored.outcome)
    common = sorted(saved.metrics.keys() & scored.metrics.keys())
    values |= {f"metric {name}": (saved.metrics[name], scored.metrics[name]) for name in common}
    for name, (value, new_value) in values.items():
        if value != new_value:
            yield f"{name} was {value}, and is {new_value}"


def _observed(episode: Episode, n_turns: int) -> list[tuple[Message, ...]]:
    """The messages of the environment before each turn of the policy, and after the last one."""
    answers = [index for index, message in enumerate(episode.messages) if message.role == "assistant"]
    ends = [*answers[len(answers) - n_turns :], len(episode.messages)]
    starts = [0, *(index + 1 for index in ends[:-1])]
    return [tuple(episode.messages[start:end]) for start, end in zip(starts, ends, strict=True)]


def _in_words(messages: Sequence[Message]) -> str:
    text = "\n".join(message.printed for message in messages)
    return repr(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…") if messages else "nothing"


def _end(outcome: Outcome) -> str:
    return " ".join(filter(None, (outcome.status.value, outcome.reason)))
