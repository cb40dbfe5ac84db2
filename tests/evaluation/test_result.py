"""What an evaluation makes of its episodes: failures are counted, and are no zeros."""

import json

import pytest

from envgym.evaluation.result import ks, result_of, score_warning
from envgym.registry import spec
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn

TIMEOUT, BROKEN = Outcome.fail("timeout", "slow"), Outcome.fail("environment", "KeyError")


def group(id, *members, task=None, answers=None):
    """Members are scores, outcomes of failures, or None for an episode without a score. Each has three tokens."""
    row = Row([Segment("prompt", [1]), Segment("action", [2, 3, 4])], turns=[Turn(None, StopReason.STOP)])
    task = task or Task(id)
    episodes = [
        Episode("e", task, member)
        if isinstance(member, Outcome)
        else Episode("e", task, Outcome.finish(), rows=[row], score=member, reward=member)
        for member in members
    ]
    for episode, answer in zip(episodes, answers or [], strict=False):
        episode.answer = answer
    return Group(id, task, episodes)


def test_failed_and_unscored_episodes_are_counted_and_not_averaged():
    result = result_of(
        [group("a", 1.0, TIMEOUT), group("b", 0.0, 1.0), group("c", BROKEN, TIMEOUT), group("d", None, 0.75)]
    )
    assert (result["score"], result["n_tasks"], result["n_episodes"]) == (0.75, 3, 8)
    assert (result["failures"], result["unscored"]) == ({"timeout": 2, "environment": 1}, 1)
    assert (result["truncated"], result["tokens"], result["turns"]) == (0, 15, 1.0)
    json.dumps(result, allow_nan=False)


def test_truncated_episodes_count_with_their_score_and_are_counted():
    cut = group("a", 0.0, 1.0)
    cut.episodes[0].outcome = Outcome.truncate("length")
    result = result_of([cut])
    assert (result["score"], result["truncated"], result["truncated_by"], result["failures"]) == (
        0.5, 1, {"length": 1}, {},
    )  # fmt: skip


def test_all_failed_is_not_a_score_of_zero():
    result = result_of([group("a", TIMEOUT), group("b", BROKEN)])
    assert (result["score"], result["ci95"], result["n_tasks"], result["n_episodes"]) == (None, None, 0, 2)
    assert (result["pass@k"], result["pass^k"], result["seconds"], result["turns"]) == ({}, {}, None, None)
    json.dumps(result, allow_nan=False)


def test_a_task_played_in_two_groups_is_one_cluster():
    apart = result_of([group("e/0", 1.0), group("e/1", 0.0), group("e/2", 1.0), group("e/3", 0.0)])
    one, other = Task("one"), Task("other")
    twice = [
        group("e/0", 1.0, task=one), group("e/1", 0.0, task=other), group("e/2", 1.0, task=one),
        group("e/3", 0.0, task=other),
    ]  # fmt: skip
    together = result_of(twice)
    assert apart["score"] == together["score"] == 0.5
    # By hand: sqrt(2 / 1 * ((2 * 0.5)^2 + (2 * -0.5)^2)) / 4 of two clusters; sqrt(4 / 3 * 4 * 0.25) / 4 of four.
    assert together["stderr"] == pytest.approx(0.5)
    assert apart["stderr"] == pytest.approx((4 / 3) ** 0.5 / 4)


def test_a_field_of_the_tasks_says_which_belong_together():
    tasks = [Task(f"t{number}", fields={"text": number // 2}) for number in range(4)]
    groups = [group(f"e/{task.id}", float(task.fields["text"]), task=task) for task in tasks]
    assert result_of(groups, cluster="text")["stderr"] == pytest.approx(0.5)
    assert result_of(groups)["stderr"] < 0.5


def test_tasks_without_the_field_belong_to_none_but_themselves():
    groups = [group(f"e/{number}", float(number // 2), task=Task(f"t{number}")) for number in range(4)]
    assert result_of(groups, cluster="text") == result_of(groups)


def test_a_share_of_the_score_is_a_success_where_the_suite_says_so():
    groups = [group("a", 0.5, 0.25), group("b", 0.75, 1.0)]
    assert result_of(groups)["success"] == {"threshold": 1.0, "rate": 0.25, "ci95": pytest.approx([0, 1], abs=1)}
    half = result_of(groups, success=0.5)
    assert half["success"]["rate"] == 0.75
    assert half["pass@k"] == {"1": 0.75, "2": 1.0}
    assert half["pass^k"] == {"1": 0.75, "2": 0.5}


def test_a_score_that_rounding_keeps_from_its_threshold_is_a_success():
    assert result_of([group("a", sum([0.1] * 10))])["success"]["rate"] == 1.0
    assert result_of([group("a", 0.999)])["success"]["rate"] == 0.0


def test_no_pass_at_k_of_more_episodes_than_a_task_has_left():
    """Four were asked for; of one task a single one is left, of the other three."""
    result = result_of([group("a", 1.0, TIMEOUT, TIMEOUT, BROKEN), group("b", 1.0, 0.0, 0.0, TIMEOUT)])
    assert result["pass@k"] == {"1": pytest.approx((1 + 1 / 3) / 2), "2": pytest.approx(2 / 3)}
    assert result["pass^k"] == {"1": pytest.approx((1 + 1 / 3) / 2), "2": 0.0}


def test_majorities_count_what_was_answered():
    voted = group("a", 1.0, 1.0, 0.0, 0.0, answers=["4", "4", "5", "6"])
    result = result_of([voted])
    assert result["majority@k"]["4"] == 1.0
    assert result["majority@k"]["1"] == 0.5
    assert "majority@k" not in result_of([group("a", 1.0, 0.0)])


def test_rewards_are_told_where_they_are_not_the_scores():
    paid = group("a", 0.5, 1.0)
    assert "reward" not in result_of([paid])
    paid.episodes[0].reward = -3.0
    assert result_of([paid])["reward"]["score"] == -1.0


def test_members_of_a_mixture_are_told_apart():
    groups = [group("e/0", 1.0, task=Task("t", env="sums")), group("e/1", 0.0, task=Task("t", env="words"))]
    result = result_of(groups)
    assert (result["score"], result["envs"]["sums"]["score"], result["envs"]["words"]["score"]) == (0.5, 1.0, 0.0)


def test_attempts_that_were_played_again_are_counted():
    """Also those of an episode that failed each time."""
    again = group("a", 1.0, TIMEOUT)
    again.episodes[0].attempt, again.episodes[1].attempt = 2, 3
    assert result_of([again])["played_again"] == 5


@pytest.mark.parametrize(("samples", "found"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_the_samples(samples, found):
    assert ks(samples) == found


def test_a_mean_that_comparing_makes_the_same_everywhere_is_told(tmp_path):
    """Ranks of answers that are judged alone are all first, and of several together their mean is fixed."""
    (tmp_path / "ranks.py").write_text(
        'import envgym\n\n@envgym.reward(batch=True, tasks=[{"prompt": "a"}, {"prompt": "b"}])\n'
        "def ranks(completion):\n    return [1.0 for _ in completion]\n"
    )
    together, alone = spec(str(tmp_path / "ranks.py")), spec("math_verify")
    ranked = [group("a", 1.0), group("b", 1.0)]
    assert "each of 2 tasks has the mean reward 1.000" in score_warning(together, ranked)
    assert "mean reward 0.500" in score_warning(together, [group("a", 1.0, 0.0), group("b", 0.0, 1.0)])
    assert score_warning(alone, ranked) == ""
    assert score_warning(together, ranked[:1]) == ""
    assert score_warning(together, [group("a", 1.0), group("b", 0.5)]) == ""
    of_fewer = [group("a", 1.0, 0.0), group("b", 0.0, 1.0), group("c", 1.0, TIMEOUT)]
    assert "each of 2 tasks has the mean reward 0.500" in score_warning(together, of_fewer)
    assert score_warning(together, of_fewer[1:]) == score_warning(together, of_fewer[2:]) == ""
