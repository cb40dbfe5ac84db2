"""Alarms: each is raised by a run that goes wrong its way, and by no healthy one."""

import json
import random
from types import SimpleNamespace

import pytest

from envgym.monitoring.alarms import ALARMS, Alarms
from envgym.monitoring.recorder import Recorder
from envgym.run_folder import RunFolder
from envgym.view.sources import Source

RNG = random.Random(0)


def noisy(mean, width, steps=30):
    return [mean + RNG.uniform(-width, width) for _ in range(steps)]


FIRES = {
    "mismatch": [1e-6, 0.06, 0.07],
    "correction_drops": [0.1, 0.6, 0.7, 0.8],
    "entropy_collapse": [0.5, 0.1, *[0.002] * 5],
    "no_entropy": [0.004, 0.0, 0.002, 0.004, 0.001],
    "entropy_growth": [*[0.5] * 8, *[2.0] * 4],
    "clip_fraction": [0.1, 0.6, 0.6, 0.6],
    "standstill": [0.0003],
    "large_update": [0.01, 0.7, 0.8, 0.9],
    "ratio_high": [2.0, 200.0, 1e4, 4e8],
    "effective_share": [0.9, 0.4, 0.3, 0.45],
    "ratio_low": [0.5, 1e-5, 1e-5, 1e-6, 1e-6, 0.0],
    "kl": [0.1, 1.0, 2.5, 3.0, 5.0],
    "grad_norm": [*[0.8] * 12, 30.0],
    "overflow": [1.0] * 5,
    "no_variance": [0.5, *[1.0] * 5],
    "reward_collapse": [*[0.1] * 5, *[0.8] * 10, *[0.1] * 6],
    "truncation": [0.2, *[0.9] * 5],
    "cut_turns": [0.5, 1.0, 1.0, 0.95],
    "failures": [0.0, 0.2, 0.2, 0.2],
    "failures_by_length": [-0.5, -3.0, -3.0, -3.0],
    "failures_by_turns": [0.5, 3.0, 3.0, 3.0],
    "failures_by_surprise": [1.5] * 8,
    "failures_by_reward": [1.0, 4.0, 5.0],
    "explained_variance": [*[0.1] * 20, *[-2.0] * 10],
    "short_batch": [1.0, 0.75],
    "feedback_in_loss": [0.0, 0.3],
    "feedback_as_answer": [0.0, 0.25],
    "stale_weights": [0.0, 0.98],
    "stale_samples": [0.001, 0.001, 8.0],
    "stale_versions": [0.0, 1.0],
    "sampling_distribution": [40.0],
    "sampling_surprise": [-4.0, -1.0, -5.0],
    "lost_episodes": [0.0, 0.03],
    "missing_groups": [0.0, 1.0],
    "untrained_tokens": [0.0, 0.2],
    "unpushed_tokens": [0.0, 0.1],
    "foreign_vocabulary": [1.9],
    "advantage_sign": [1.0, -1.0, -0.7],
    "reward_twice": [0.0, 1.0],
    "episode_twice": [0.0, 2.0],
    "return_twice": [0.0, 0.5],
    "end_not_learned": [1.0, 0.0],
    "template_drift": [0.0, 0.5],
    "context_drift": [0.001, 200.0],
    "wrong_tokenizer": [0.0, 0.8],
    "wrong_denominator": [1.0, 4.0, 4.0],
    "filter_by_length": [0.0, 0.25],
    "misread_answers": [0.0, 0.9],
    "misgraded_answers": [0.0, 0.005, 0.01],
}
HEALTHY = {
    "mismatch": [0.02, 0.06, 0.02, 0.06, 0.03],  # kernels in 16 bits, once in a while far off
    "correction_drops": [0.6, 0.7, 0.1, 0.6, 0.7],
    "entropy_collapse": [0.24 * 0.96**step for step in range(80)],  # solved tasks take little choice
    "no_entropy": [0.002, 0.001, 0.003, 0.004, 0.006, *[0.1] * 20],
    "entropy_growth": [0.05 + 0.02 * step for step in range(40)],  # from nearly none: still far from noise
    "clip_fraction": [0.0, *noisy(0.2, 0.15), 0.9, 0.9, 0.1],
    "standstill": [0.02],
    "large_update": noisy(0.05, 0.05),
    "ratio_high": [*noisy(5.0, 4.0), 500.0, 2.0, 500.0],
    "effective_share": [*noisy(0.95, 0.04), 0.4, 0.3, 0.9],
    "ratio_low": [*noisy(0.3, 0.2), 2e-5, 8e-6, 9e-6, 0.2, 1e-6],
    "kl": [0.02 * step for step in range(60)],
    "grad_norm": [*noisy(0.5, 0.4), 8.0, *[0.01] * 20, 5.0],  # small ones before a usual one are no jump
    "overflow": [1.0, 1.0, 1.0, 0.0, *[0.0] * 30, 1.0],  # the loss scale is found at the start, and now and then
    "no_variance": [*[1.0] * 4, *noisy(0.6, 0.3)],
    "reward_collapse": [*[0.0] * 5, *noisy(0.5, 0.3), *noisy(0.8, 0.2), *noisy(0.6, 0.2)],
    "truncation": [*[1.0] * 4, *noisy(0.3, 0.2)],
    "cut_turns": [1.0, 1.0, *noisy(0.3, 0.2)],
    "failures": [0.3, 0.3, *noisy(0.05, 0.05)],
    "failures_by_length": [RNG.gauss(0, 1) for _ in range(1000)],
    "failures_by_turns": [-3.0] * 30,  # failed episodes have fewer turns, since they ended early
    "failures_by_surprise": [6.0, 0.1, *[RNG.gauss(0, 1) for _ in range(1000)]],
    "failures_by_reward": [3.0, *[RNG.gauss(0, 1) for _ in range(1000)]],
    "explained_variance": [*[-20.0] * 20, *noisy(0.0, 0.4)],  # a head that was drawn knows nothing at first
    "short_batch": [1.0] * 30,
    "feedback_in_loss": [0.0] * 30,
    "feedback_as_answer": [0.0] * 30,
    "stale_weights": noisy(0.0, 0.4),  # of an update that is less than the rounding of 16 bits
    "stale_samples": [0.25, *noisy(1.3, 1.0)],
    "stale_versions": [0.0] * 30,
    "sampling_distribution": [2.0, *noisy(3.0, 3.0)],  # what comes later has other causes
    "sampling_surprise": [RNG.gauss(0, 1) for _ in range(1000)],
    "lost_episodes": [0.0] * 30,
    "missing_groups": [0.0] * 30,
    "untrained_tokens": [0.01] * 30,
    "unpushed_tokens": [0.01] * 30,
    "foreign_vocabulary": [1.1, *noisy(1.0, 0.4)],  # of a small model, and of one that forgets
    "advantage_sign": [1.0, -0.5, 0.9, -0.5, 1.0],  # of a few pairs, with a critic that knows nothing
    "reward_twice": [1e-9] * 30,
    "episode_twice": [0.0] * 30,
    "return_twice": [1e-9] * 30,
    "end_not_learned": [0.6] * 30,  # clipped tokens have no gradient
    "template_drift": [0.0] * 30,
    "context_drift": noisy(1.5, 1.0),
    "wrong_tokenizer": [0.05] * 30,
    "wrong_denominator": [*noisy(1.05, 0.04), 3.0, 1.0, 3.0],
    "filter_by_length": [0.0] * 30,
    "misread_answers": [0.01] * 30,
    "misgraded_answers": [0.01, 0.0, 0.01, *[0.002] * 20],
}
BY_NAME = {alarm.name: alarm for alarm in ALARMS}


def heard(name, values, alarms=None):
    """The steps at which a run with these values of the alarm's metric raises it, and what is said."""
    alarms = alarms or Alarms()
    raised = [
        (step, alarm) for step, value in enumerate(values) for alarm in alarms.observe({BY_NAME[name].metric: value})
    ]
    return [step for step, alarm in raised if alarm.name == name], [alarm.text for _, alarm in raised]


def test_every_alarm_is_tried_both_ways():
    assert set(FIRES) == set(HEALTHY) == set(BY_NAME)
    assert len(BY_NAME) == len(ALARMS)


@pytest.mark.parametrize("name", FIRES)
def test_an_alarm_is_raised_once_and_not_too_early(name):
    steps, texts = heard(name, FIRES[name])
    assert steps == [len(FIRES[name]) - 1]
    assert heard(name, FIRES[name][:-1]) == ([], [])
    [text] = texts
    assert "{" not in text
    assert len(text) < 300
    assert text.isascii()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_none(name):
    assert heard(name, HEALTHY[name]) == ([], [])


@pytest.mark.parametrize("name", FIRES)
def test_it_is_raised_again_only_after_it_has_ceased(name):
    alarms = Alarms()
    last = FIRES[name][-1:]
    assert len(heard(name, FIRES[name] + last * 3, alarms)[0]) == 1
    assert alarms.counts == {name: 1}
    assert len(heard("truncation", [0.9] * 9 + [0.1] + [0.9] * 9)[0]) == 2


def test_a_jump_is_measured_against_the_ten_values_before_it():
    """Their median is 2 here, and would be 3 with the jump itself in place of the first."""
    assert heard("grad_norm", [*[1.0] * 5, *[3.0] * 5, 41.0])[0] == [10]
    assert heard("grad_norm", [*[1.0] * 5, *[3.0] * 5, 39.0])[0] == []


def test_an_entropy_that_never_moved_is_not_said_to_have_come_down():
    alarms = Alarms()
    said = [raised for _ in range(9) for raised in alarms.observe({"policy/entropy": 0.001})]
    assert [raised.name for raised in said] == ["no_entropy"]
    assert "down to" not in said[0].text


def test_the_sentence_shows_the_number():
    [text] = heard("truncation", [0.0, *[0.875] * 5])[1]
    assert text.startswith("88% of the episodes are truncated by a limit; try a larger rollout.max_tokens")


def test_a_number_of_another_role_is_its_own_but_what_an_environment_calls_its_numbers_is_not_ours():
    alarms = Alarms()
    for _ in range(12):
        record = dict.fromkeys(("grad_norm", "critic/grad_norm", "env/grad_norm", "eval/grad_norm"), 0.5)
        assert alarms.observe(record) == []
    [raised] = alarms.observe(record | dict.fromkeys(("critic/grad_norm", "env/grad_norm", "eval/grad_norm"), 90.0))
    assert raised.name == "critic/grad_norm"
    assert raised.text.startswith("critic: the gradient's norm jumped to 90")
    assert alarms.counts == {"critic/grad_norm": 1}


def test_steps_that_lack_a_number_are_left_out():
    """A group of evaluations in between, or a critic that is not trained yet."""
    alarms = Alarms()
    records = [{"length/truncated_share": 0.9}, {"eval/score": 0.5}] * 5
    assert [len(alarms.observe(record)) for record in records] == [0] * 8 + [1, 0]


# -- on the way to the run folder and the display ---------------------------------------------------------


class Shown:
    """A display that remembers what it is told."""

    def __init__(self):
        self.alarms, self.steps = [], []

    def alarm(self, step, text):
        self.alarms.append((step, text))

    def step(self, step, steps, record):
        self.steps.append((step, steps, record))


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path)
    made.create()
    return made


def recorder_of(folder):
    display, told = Shown(), []
    recorder = Recorder(folder, display, 20)
    recorder.trackers = SimpleNamespace(log=told.append)
    return recorder, display, told


def record_of(step):
    return {"step": step, "length/truncated_share": 0.9 if step % 10 else 0.1}


def test_an_alarm_is_shown_once_written_down_and_counted(folder):
    recorder, display, told = recorder_of(folder)
    for step in range(1, 21):
        recorder.write(record_of(step))
    written = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    assert {record["step"]: record["alarms"] for record in written if "alarms" in record} == {
        5: ["truncation"],
        15: ["truncation"],
    }
    assert [step for step, _ in display.alarms] == [5, 15]
    assert recorder.alarms.counts == {"truncation": 2}
    assert told == written == [record for *_, record in display.steps]


@pytest.mark.parametrize("stop", [0, 3, 5, 9, 14])
def test_a_resumed_run_raises_what_the_run_would_have_raised_anyway(folder, stop):
    recorder, _, _ = recorder_of(folder)
    for step in range(1, stop + 3):  # two steps more than it has a checkpoint of
        recorder.write(record_of(step))
    folder.rewind(stop)
    resumed, display, _ = recorder_of(folder)
    resumed.resume()
    assert display.alarms == []  # told before
    for step in range(stop + 1, 21):
        resumed.write(record_of(step))
    assert [record["step"] for record in folder.read_metrics() if "alarms" in record] == [5, 15]
    assert resumed.alarms.counts == {"truncation": 2}


@pytest.mark.parametrize(
    ("rewards", "shares", "raised"),
    [
        ([(0.0, 0.0)] * 3, [1.0] * 3, "had the same reward, 0,"),  # too few steps for the alarm
        ([(0.25, 0.25)] * 9, [None] * 9, "had the same reward, 0.25,"),  # groups of one
        ([(0.0, 1.0)] * 4, [1.0] * 4, "had the reward of its whole group"),
        ([(0.0, 0.0), (1.0, 1.0)], [None] * 2, None),  # they differ from step to step
        ([(0.0, 0.0), (0.0, 1.0)], [1.0, 0.5], None),
        ([(0.0, 1.0)] * 4, [None] * 4, None),
        ([], [], None),
    ],
)
def test_rewards_that_never_vary_are_told_once_at_the_end_of_a_run(folder, rewards, shares, raised):
    recorder, display, _ = recorder_of(folder)
    for step, ((least, most), share) in enumerate(zip(rewards, shares, strict=True), 1):
        flat = {} if share is None else {"reward/zero_variance_share": share}
        recorder.write({"step": step, "reward/min": least, "reward/max": most, **flat})
    recorder.finish()
    written = folder.read_metrics()
    (folder.path / "config.yaml").write_text("stages: []\n")
    on_page = Source("run", "run", folder.path, (folder.path.resolve(),)).alarms()
    if raised is None:
        assert display.alarms == on_page == []
        assert not any("alarms" in record for record in written)
    else:
        assert [record.get("alarms") for record in written] == [None] * (len(rewards) - 1) + [["no_variance"]]
        [told] = on_page
        assert told["step"] == len(rewards)
        assert "in 100% of the groups every episode has the same reward" in told["text"]
        [(step, text)] = display.alarms
        assert step == len(rewards)
        assert raised in text
        assert recorder.alarms.counts == {"no_variance": 1}


def test_rewards_that_never_vary_are_not_told_twice(folder):
    recorder, display, _ = recorder_of(folder)
    for step in range(1, 7):
        recorder.write({"step": step, "reward/min": 0.0, "reward/max": 0.0, "reward/zero_variance_share": 1.0})
    recorder.finish()
    assert [step for step, _ in display.alarms] == [5]
