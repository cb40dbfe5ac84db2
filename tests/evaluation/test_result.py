"""What an evaluation makes of its episodes: failures are counted, and are no zeros."""

import math

from envgym.evaluation.result import EvalResult
from envgym.types import Episode, Group, Outcome, Row, Segment, Task


def group(id, *members):
    """Members are scores, outcomes of failures, or None for an episode without a score. Each has three tokens."""
    row = Row([Segment("prompt", [1]), Segment("action", [2, 3, 4])])
    episodes = [
        Episode("e", Task(id), member)
        if isinstance(member, Outcome)
        else Episode("e", Task(id), Outcome.completed(), rows=[row], score=member, reward=member)
        for member in members
    ]
    return Group(id, Task(id), episodes)


TIMEOUT, BROKEN = Outcome.failed("timeout", "slow"), Outcome.failed("environment", "KeyError")


def test_failed_and_unscored_episodes_are_counted_and_not_averaged():
    groups = [group("a", 1.0, TIMEOUT), group("b", 0.0, 1.0), group("c", BROKEN, TIMEOUT), group("d", None, 0.75)]
    result = EvalResult.of(groups)
    assert result.mean.score == (1.0 + 0.5 + 0.75) / 3
    assert result.mean.n == 3
    assert result.as_dict() == {
        "score": 0.75,
        "ci95": [result.mean.low, result.mean.high],
        "stderr": result.mean.stderr,
        "n_tasks": 3,
        "n_episodes": 8,
        "truncated": 0,
        "failures": {"timeout": 2, "environment": 1},
        "unscored": 1,
        "tokens": 5 * 3,
    }


def test_truncated_episodes_count_with_their_score_and_are_counted():
    cut = group("a", 0.0, 1.0)
    cut.episodes[0].outcome = Outcome.truncated("length")
    result = EvalResult.of([cut])
    assert (result.mean.score, result.truncated, result.failures) == (0.5, 1, {})


def test_all_failed_is_not_a_score_of_zero():
    result = EvalResult.of([group("a", TIMEOUT), group("b", BROKEN)])
    assert math.isnan(result.mean.score)
    assert (result.mean.n, result.n_episodes) == (0, 2)


def test_the_same_task_asked_twice_counts_as_the_groups_it_was_played_in():
    result = EvalResult.of([group("eval/00000", 1.0), group("eval/00001", 0.0)])
    assert result.mean.n == 2
