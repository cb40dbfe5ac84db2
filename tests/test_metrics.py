"""The numbers of a step that need no model."""

import pytest

from envgym.errors import RolloutFailed
from envgym.metrics import check_failures, rollout_metrics
from envgym.types import Episode, Group, Outcome, Row, Segment, Task


def episode(result, tokens=2, **metrics):
    """`result` is a reward and score, or how the episode failed."""
    if isinstance(result, Outcome):
        return Episode("e", Task("t"), result)
    row = Row([Segment("prompt", [1]), Segment("action", [2] * tokens, logprobs=[-1.0] * tokens)])
    return Episode("e", Task("t"), Outcome.completed(), rows=[row], reward=result, score=result, metrics=metrics)


def group(*results, env="", lost=()):
    task = Task("t", env=env)
    episodes = [result if isinstance(result, Episode) else episode(result) for result in results]
    return Group("g", task, episodes, lost=[episode(result) for result in lost])


SLOW, BROKEN = Outcome.failed("timeout", "slow"), Outcome.failed("environment", "KeyError")


def test_means_are_of_finished_episodes_and_failures_are_counted():
    record = rollout_metrics([group(1.0, 0.0, SLOW), group(0.5, 0.5, lost=[SLOW, BROKEN]), group(BROKEN, 1.0)])
    assert record["episodes"] == 7
    assert record["reward/mean"] == record["score/mean"] == pytest.approx(0.6)
    assert record["reward/zero_variance_share"] == 1 / 2  # of the groups that have two rewards to compare
    assert (record["reward/min"], record["reward/max"]) == (0, 1)
    assert record["failures/share"] == 2 / 7
    # also those that were played again
    assert (record["failures/timeout"], record["failures/environment"]) == (2, 2)
    assert (record["tokens/sampled"], record["length/mean"]) == (10, 2)


def test_an_environments_own_numbers_are_means_over_the_episodes_that_have_them():
    record = rollout_metrics([group(episode(1.0, boxed=1), episode(0.0, boxed=0), episode(0.0))])
    assert record["env/boxed"] == 0.5


def test_members_of_a_mixture_are_told_apart_even_where_a_step_has_but_one():
    record = rollout_metrics([group(1.0, SLOW, env="a", lost=[BROKEN]), group(episode(0.0, moves=3), env="a")])
    assert record["env/moves"] == record["env/a/moves"] == 3
    assert record["env/a/reward/mean"] == record["env/a/score/mean"] == 0.5
    assert (record["env/a/episodes"], record["env/a/failures/timeout"], record["env/a/failures/environment"]) == (
        3,
        1,
        1,
    )
    assert not [key for key in record if key.startswith(("env/a/tokens", "env/a/length"))]


def test_too_many_failures_stop_the_run_with_the_commonest():
    check_failures([group(SLOW, 1.0)], 0.5)
    with pytest.raises(RolloutFailed, match="2 of 3 episodes failed; the commonest failure is timeout: slow"):
        check_failures([group(SLOW, SLOW, 1.0)], 0.5)
