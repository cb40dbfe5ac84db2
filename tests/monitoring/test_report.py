"""What a run comes to: the words at its end and the picture."""

import math
import struct

import pytest

from envgym.monitoring.report import aligned, centered_mean, duration, plot, score, summary_lines
from envgym.run_folder import RunFolder

BEFORE = {"score": 0.412, "ci95": [0.37, 0.455], "n_tasks": 512}
AFTER = {"score": 0.951, "ci95": [0.93, 0.97], "n_tasks": 512}


@pytest.fixture
def summary():
    return {
        "status": "completed",
        "steps": 60,
        "eval": {"before": BEFORE, "after": AFTER},
        "seconds": {"total": 200.0, "rollout": 100.0, "learn": 60.0, "sync": 10.0, "eval": 20.0},
        "tokens": {"sampled": 1234567, "trained": 1200000},
        "mismatch": {"max_abs_logprob": 1.4e-6},
        "failures": {"timeout": 3, "env_error": 1},
        "run": "runs/first",
        "picture": "runs/first/curve.png",
    }


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw the picture of some metrics; gives the axes of the figure that was saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))

    def draw(records):
        path = plot(tmp_path, records)
        return (path, figures[-1].axes[0]) if path else (None, None)

    return draw


def lines_of(axes):
    return {line.get_label(): [list(data) for data in line.get_data()] for line in axes.get_lines()}


# -- words ------------------------------------------------------------------------------------------------


def test_columns_are_aligned():
    rows = [("name", "score"), ("a", "0.5"), ("longer", "")]
    assert aligned(rows) == "name    score\na       0.5\nlonger"
    assert aligned(rows, right=True) == "name    score\na         0.5\nlonger"


def test_a_run_ends_with_what_it_came_to(summary):
    assert dict(summary_lines(summary)) == {
        "run": "completed: 60 steps in 3 min 20 s",
        "held-out": "before 0.412 [0.370, 0.455]  ->  after 0.951 [0.930, 0.970]   512 tasks, 95% intervals",
        "time": "rollout 50%  learn 30%  sync 5%  eval 10%  other 5%",
        "tokens": "1,234,567 sampled, 1,200,000 trained",
        "mismatch": "1.4e-06 nats at most between inference engine and trainer",
        "failures": "timeout 3, env_error 1",
        "folder": "runs/first",
        "picture": "runs/first/curve.png",
        "look": "envgym view runs/first",
        "next": "envgym eval --config runs/first/config.yaml --model runs/first",
    }


def test_a_run_of_several_stages_says_of_which_its_numbers_are(summary):
    summary["stages"] = ["1-sft", "2-grpo"]
    assert dict(summary_lines(summary))["run"] == "completed: 60 steps of 2-grpo, the last of 2 stages, in 3 min 20 s"


def test_the_best_checkpoint_is_named(summary):
    summary["best"] = {"metric": "eval/score", "value": 0.96123, "step": 40}
    assert dict(summary_lines(summary))["best"] == "eval/score 0.9612 at step 40   checkpoints/best"


def test_what_a_run_does_not_have_is_not_said(summary):
    summary |= {"eval": {}, "failures": {}, "tokens": {"sampled": 0, "trained": 10}}
    del summary["picture"]
    assert dict(summary_lines(summary)).keys() == {"run", "time", "tokens", "folder", "look", "next"}


def test_each_kind_of_run_ends_with_a_command_that_looks_at_what_it_changed(summary):
    """Recordings and tasks without a held-out part cannot be evaluated, and a reward model answers nothing."""

    def next_command(**changes) -> str:
        return dict(summary_lines({**summary, **changes}))["next"]

    answers = " --tasks 0:8 --out runs/first/answers.jsonl && envgym show runs/first/answers.jsonl"
    rollout = "envgym rollout --config runs/first/config.yaml --model runs/first "
    assert next_command(head="lm").startswith("envgym eval ")
    assert next_command(gives_rewards=False) == f"{rollout}agent=single_turn --split test{answers}"
    assert next_command(held_out_tasks=0) == f"{rollout}--split train{answers}"
    assert next_command(head="scalar", gives_rewards=False) == "envgym serve-reward-model --model runs/first"


def test_a_run_that_stopped_before_its_second_evaluation_has_no_after(summary):
    summary["eval"] = {"before": BEFORE}
    assert dict(summary_lines(summary))["held-out"] == "before 0.412 [0.370, 0.455]   512 tasks, 95% intervals"


def test_alarms_are_counted_at_the_end_and_phases_that_took_no_time_left_out(summary):
    summary |= {"alarms": {"truncation": 2, "kl": 1}}
    summary["seconds"] |= {"score": 0.0, "prepare": 1.0}
    lines = dict(summary_lines(summary))
    assert lines["alarms"] == "truncation 2, kl 1   what each means: docs/training/monitor.md"
    assert "score" not in lines["time"]
    assert "prepare" in lines["time"]


def test_greedy_is_reported_on_its_own_line(summary):
    summary["eval"] |= {"greedy_before": BEFORE, "greedy_after": {**AFTER, "score": 0.96}}
    assert "after 0.960" in dict(summary_lines(summary))["greedy"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_score_nobody_has_is_not_a_number():
    assert score({"score": math.nan, "ci95": [math.nan, math.nan]}) == "nan [nan, nan]"


# -- picture ----------------------------------------------------------------------------------------------


def test_the_picture_shows_the_data(drawn):
    records = [{"step": 0, "eval/score": 0.4, "eval/ci95": [0.35, 0.45]}]
    records += [{"step": step, "reward/mean": step / 40, "loss": -1.0} for step in range(1, 41)]
    records[20] |= {"eval/score": 0.7, "eval/ci95": [0.66, 0.74]}
    records[40] |= {"eval/score": 0.9, "eval/ci95": [0.87, 0.93]}
    path, axes = drawn(records)
    lines = lines_of(axes)
    assert lines["training reward, each step"] == [list(range(1, 41)), [step / 40 for step in range(1, 41)]]
    assert lines["held-out score, 95% interval"] == [[0, 20, 40], [0.4, 0.7, 0.9]]
    assert set(lines["held-out score before training"][1]) == {0.4}
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.35, 0.93)
    assert {text.get_text() for text in axes.texts} == {"0.400", "0.900"}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "reward, score")
    assert axes.get_ylim() == (0, 1.02)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:]) == (1200, 700)


def test_rewards_beyond_one_are_not_cut_off(drawn):
    _, axes = drawn([{"step": step, "reward/mean": float(step - 3)} for step in range(1, 10)])
    low, high = axes.get_ylim()
    assert low < -2
    assert high > 6


def test_a_supervised_stage_draws_its_loss(drawn):
    _, axes = drawn([{"step": step, "loss": 5.0 / step} for step in range(1, 10)])
    assert "training loss, each step" in lines_of(axes)
    assert axes.get_ylabel() == "loss"


def test_a_run_without_a_step_has_no_picture(drawn, tmp_path):
    assert drawn([{"step": 0, "eval/score": 0.4, "eval/ci95": [0.35, 0.45]}]) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    assert plot(tmp_path, RunFolder(tmp_path).read_metrics()) == tmp_path / "curve.png"


def test_the_averaged_curve_follows_a_line_without_lag():
    line = [float(step) for step in range(100)]
    assert centered_mean(line) == pytest.approx(line)
    noisy = [0.5 + 0.1 * (-1) ** step for step in range(100)]
    assert all(abs(value - 0.5) < 0.05 for value in centered_mean(noisy)[5:-5])
