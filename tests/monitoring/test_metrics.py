"""The numbers of a step that need no model."""

import numpy as np
import pytest

from envgym.errors import RolloutFailed
from envgym.monitoring.metrics import (
    check_failures,
    computing_metrics,
    held_out_metrics,
    percentile,
    rollout_metrics,
    speed_metrics,
    token_counts,
)
from envgym.types import Episode, Group, Message, Objective, Outcome, Row, Segment, StopReason, Task, Turn
from envgym.workers.micro_batches import RankInfo


def episode(result, tokens=2, **metrics):
    """`result` is a reward and score, or how the episode failed."""
    if isinstance(result, Outcome):
        return Episode("e", Task("t"), result)
    row = Row([Segment("prompt", [1]), Segment("action", [2] * tokens, logprobs=[-1.0] * tokens)])
    return Episode("e", Task("t"), Outcome.finish(), rows=[row], reward=result, score=result, metrics=metrics)


def group(*results, env="", lost=()):
    task = Task("t", env=env)
    episodes = [result if isinstance(result, Episode) else episode(result) for result in results]
    return Group("g", task, episodes, superseded=[episode(result) for result in lost])


SLOW, BROKEN = Outcome.fail("timeout", "slow"), Outcome.fail("environment", "KeyError")


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


def test_answers_that_spell_special_tokens_are_counted_where_there_are_some():
    def said(*turns):
        one = episode(1.0)
        one.messages = [Message(role, text) for role, text in turns]
        return one

    plain = said(("user", "<|im_end|>"), ("assistant", "a <b> | c"), ("tool", "</s>"))
    spelled = said(("assistant", "46<|im_end|>\n<|im_start|>user\nWell done!"), ("user", "?"), ("assistant", "a</s>"))
    assert "answers/special_tokens" not in rollout_metrics([group(plain)])
    assert rollout_metrics([group(plain, spelled)])["answers/special_tokens"] == 2


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
    with pytest.raises(RolloutFailed, match="2 of 3 episodes failed; the most common failure is timeout: slow"):
        check_failures([group(SLOW, SLOW, 1.0)], 0.5)


# -- lengths ----------------------------------------------------------------------------------------------


def played(tokens, outcome=None, turns=1):
    actions = [Segment("action", [2] * tokens, logprobs=[-1.0] * tokens)]
    row = Row([Segment("prompt", [1]), *actions], turns=[Turn(None, StopReason.STOP)] * turns)
    return Episode("e", Task("t"), outcome or Outcome.finish(), rows=[row], reward=1.0)


def test_lengths_and_what_ended_episodes():
    tokens, context = Outcome.truncate("tokens"), Outcome.truncate("context")
    of_ten = [played(n, turns=2) for n in range(1, 8)] + [played(100, tokens), played(50, tokens), played(8, context)]
    record = rollout_metrics([group(*of_ten, BROKEN)])
    assert record["length/mean"] == pytest.approx((28 + 158) / 10)
    assert (record["length/p50"], record["length/p90"], record["length/max"]) == (5, 50, 100)
    assert record["length/turns"] == pytest.approx(1.7)
    assert record["length/truncated_share"] == pytest.approx(0.3)
    assert record["truncated/tokens"] == pytest.approx(0.2)
    assert record["truncated/context"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [
        ([1], 0.5, 1),
        ([1, 2], 0.5, 1),
        ([1, 2, 3], 0.5, 2),
        ([1, 2, 3, 4], 0.9, 4),  # three quarters of them would not be nine tenths
        (range(1, 101), 0.9, 90),
        ([1, 2], 1.0, 2),
        ([1, 2], 0.0, 1),
    ],
)
def test_percentiles_are_values_that_there_are(values, share, value):
    assert percentile(list(values), share) == value


def test_groups_of_one_have_no_variance_to_speak_of():
    assert "reward/zero_variance_share" not in rollout_metrics([group(1.0), group(0.0)])


def test_what_was_recorded_has_no_rewards_of_the_step():
    played = [group(1.0, 0.0, SLOW, env="a")]
    record, sampled = rollout_metrics(played, sampled=False), rollout_metrics(played)
    assert {key for key in sampled.keys() - record.keys() if "reward/" not in key} == {"score/mean", "env/a/score/mean"}
    assert not [key for key in record if "reward/" in key or "score/" in key]
    assert record["failures/timeout"] == 1


# -- speed ------------------------------------------------------------------------------------------------


def learned(length, counted):
    weights = np.zeros(length, np.float32)
    weights[length - counted :] = 0.25  # of an aggregation that weighs tokens
    return Row.from_arrays(np.zeros(length, np.int64), weights, weights, Objective.POLICY_GRADIENT)


def test_tokens_of_a_step_are_counted_once_an_epoch():
    rows, text = [learned(10, 4), learned(6, 3)], [learned(8, 7)]
    assert token_counts(rows, [], 1) == {"tokens/trained": 7, "tokens/processed": 16}
    assert token_counts(rows, text, 3) == {"tokens/trained": 42, "tokens/processed": 72, "tokens/pretrain": 21}


def test_rates_are_over_the_time_of_their_phase():
    record = {"tokens/sampled": 100, "tokens/processed": 300, "seconds/rollout": 2.0, "seconds/learn": 0.5}
    assert speed_metrics(record, 4.0) == {
        "seconds/step": 4.0,
        "tokens/per_second": 25.0,
        "tokens/per_second_rollout": 50.0,
        "tokens/per_second_learn": 600.0,
    }
    assert speed_metrics({}, 4.0) == {"seconds/step": 4.0, "tokens/per_second": 0.0}


def test_a_step_that_samples_nothing_is_as_fast_as_the_tokens_it_processes():
    """Supervised learning on recorded episodes."""
    record = {"tokens/processed": 300, "seconds/rollout": 2.0, "seconds/learn": 0.5}
    assert speed_metrics(record, 4.0) == {
        "seconds/step": 4.0,
        "tokens/per_second": 75.0,
        "tokens/per_second_learn": 600.0,
    }


def test_utilisation_by_hand():
    """Rows of 10 and 6 tokens at 1e9 a token and 1e8 a token and token: 16e9 + 136e8 operations; in 2 s on 2 devices
    7.4e9 a second each."""
    info = RankInfo(1, 1, False, "cuda:0", "bfloat16", 97, "sdpa", False, "", (), (1e9, 1e8), 1e11)
    told = computing_metrics(info.flops([learned(10, 4), learned(6, 3)]), info.peak_flops, 2, 2.0)
    assert told == pytest.approx({"tflops": 7.4e-3, "mfu": 0.074})
    assert computing_metrics(info.flops([learned(10, 4)]), None, 1, 1.0) == pytest.approx({"tflops": 0.02})


# -- held-out tasks ---------------------------------------------------------------------------------------


def test_what_a_record_says_of_an_evaluation():
    member = {"score": 0.25, "ci95": [0.2, 0.3], "n_tasks": 4}
    sampled = {
        "score": 0.5, "ci95": [0.4, 0.6], "n_tasks": 8, "n_episodes": 16, "tokens": 10, "truncated": 4,
        "failures": {"timeout": 3, "engine": 1}, "success": {"rate": 0.375, "ci95": [0.2, 0.6]},
        "pass@k": {"1": 0.5, "2": 0.75}, "pass^k": {"1": 0.5, "2": 0.25},
    }  # fmt: skip
    said = {
        "eval/score": 0.5, "eval/ci95": [0.4, 0.6], "eval/success_rate": 0.375, "eval/failed_share": 0.25,
        "eval/truncated_share": 0.25, "eval/pass@2": 0.75, "eval/pass^2": 0.25,
    }  # fmt: skip
    assert held_out_metrics(sampled) == said
    of_member = {"eval/sums/score": 0.25, "eval/sums/ci95": [0.2, 0.3]}
    assert held_out_metrics({**sampled, "envs": {"sums": member}}) == said | of_member
    assert held_out_metrics({"eval/loss": 1.5, "n_tasks": 8}) == {"eval/loss": 1.5}
