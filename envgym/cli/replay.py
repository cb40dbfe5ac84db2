"""`envgym replay`: run the recorded actions of a run's step again, and compare what the environment does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.errors import DataError, did_you_mean

from .errors import Invocation
from .parser import Parser, find_path

if TYPE_CHECKING:
    from envgym.jobs.replay import ReplayedEpisode
    from envgym.types import Episode

MOST_LINES = 10
"""Episodes with differences that are printed."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Run the recorded actions of a run's step again in its environment, each episode with its seed, and print where
    observations, rewards or scores differ from the record. Nothing is sampled; with --sample, the step of a
    deterministic run is, from the checkpoint of the step before. Exit status 1 if anything differs.

    usage: RUN [--step N] [--episode ID] [--sample]
    example: envgym replay first --step 3
    """
    parser = Parser("replay", main)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run: its name or folder")
    parser.add_argument("--step", type=int, metavar="N", help="step of the run (default: the last)")
    parser.add_argument("--episode", metavar="ID", help="one episode of the step (default: all)")
    parser.add_argument("--sample", action="store_true", help="sample the step again, and compare the tokens")
    options = parser.parse_without_words(arguments, "envgym replay has no settings: it uses those of the run")
    if options.run is None:
        parser.error("envgym replay is followed by a run")

    from envgym.jobs.replay import recorded_step, replay_episodes, sample_again
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    config, step, file, episodes = recorded_step(find_path(options.run), options.step)
    recorded = episodes
    if options.episode is not None:
        ids = [episode.id for episode in episodes]
        if options.episode not in ids:
            raise DataError(f"{file} has no episode {options.episode!r}.{did_you_mean(options.episode, ids)}")
        episodes = [episode for episode in episodes if episode.id == options.episode]
    with open_display() as display:
        if options.sample:
            samples = sample_again(config, file.parents[1], step, recorded, display, make_model)
            return _report_samples(file, [(episode, share) for episode, share in samples if episode in episodes])
        replays = replay_episodes(config, episodes, display)
    return _report(file, episodes, replays)


def _report_samples(file: Path, samples: Sequence[tuple[Episode, float]]) -> int:
    changed = [(episode, share) for episode, share in samples if share < 1]
    for episode, share in changed[:MOST_LINES]:
        print(f"{episode.id} (task {episode.task.key}): the first {share:.0%} of its tokens are the same")
    if len(changed) > MOST_LINES:
        print(f"… and {len(changed) - MOST_LINES} more")
    print(f"{len(samples) - len(changed)} of {len(samples)} episodes of {file} were sampled again, token for token")
    return 1 if changed else 0


def _report(file: Path, episodes: Sequence[Episode], replays: Sequence[ReplayedEpisode]) -> int:
    failing = [replay for replay in replays if replay.differences]
    for replay in failing[:MOST_LINES]:
        print(f"{replay.episode.id} (task {replay.episode.task.key}): {'; '.join(replay.differences)}")
    if len(failing) > MOST_LINES:
        print(f"… and {len(failing) - MOST_LINES} more")
    for change, count in Counter(change for replay in replays for change in replay.changes).items():
        print(f"the environment's {change} changed since {count} of them were recorded")
    failed = Counter(episode.outcome.reason for episode in episodes if episode.failed)
    for kind, count in failed.items():
        print(f"{count} failed when they were recorded ({kind}), and are not replayed")
    print(f"{len(replays) - len(failing)} of {len(replays)} episodes of {file} repeat exactly")
    return 1 if failing else 0
