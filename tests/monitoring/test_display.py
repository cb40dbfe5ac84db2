"""What a user sees of a run: lines in a log, a live table on a terminal."""

import errno
import io
import itertools
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from envgym.cli.errors import Invocation, LogLine, report
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome
from envgym.monitoring.display import Display, LineDisplay, failure_suffix
from envgym.monitoring.terminal import LiveDisplay, open_display, sparkline

EVALUATION = {"score": 0.412, "ci95": [0.37, 0.455], "n_tasks": 512, "greedy": False}
RECORD = {
    "reward/mean": 0.5, "tokens/per_second": 4211.0, "mismatch/max": 1.2e-6, "seconds/step": 1.9,
    "seconds/rollout": 1.1, "seconds/learn": 0.7,
}  # fmt: skip
SUMMARY = {
    "status": "completed",
    "steps": 60,
    "eval": {"before": EVALUATION, "after": {**EVALUATION, "score": 0.951, "ci95": [0.93, 0.97]}},
    "seconds": {"total": 187.3, "rollout": 80.0, "learn": 60.0, "sync": 7.0, "eval": 12.0},
    "tokens": {"sampled": 1234567, "trained": 1200000},
    "mismatch": {"max_abs_logprob": 1.4e-6},
    "failures": {},
    "run": "runs/first",
}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines():
    """A line display, its clock, and a function that gives the lines it has printed since it was last asked."""
    clock, file = Clock(), io.StringIO()
    display = LineDisplay(file, clock)

    def printed():
        text = file.getvalue()
        file.seek(0)
        file.truncate()
        return text.splitlines()

    return display, clock, printed


# -- lines ------------------------------------------------------------------------------------------------


def test_names_that_a_server_makes_up_are_cut_in_the_lines_of_a_run():
    assert failure_suffix({"timeout": 2}) == ", failed: timeout 2"
    assert len(failure_suffix({"x" * 300_000: 1})) < 1100


def test_an_error_or_a_log_line_that_quotes_others_is_cut_in_its_middle(capsys):
    message = f"no tool 'x'. It has {'n' * 300_000}; set only"
    for error in (ConfigError(message), InvalidOutcome("service", message), KeyError(message)):
        if isinstance(error, EnvgymError):
            assert len(str(error)) == 10_000
            assert str(error).startswith("no tool 'x'. It has nnn")
            assert str(error).endswith("nnn; set only")
        report(error, Invocation())
        [line] = capsys.readouterr().err.splitlines()
        assert len(line) < 10_100
    assert str(ConfigError("short")) == "short"
    assert ConfigError().args == ()
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%s has gone", (message,), None)
    assert len(LogLine().format(record)) == 10_000
    assert LogLine().format(record).endswith("nnn; set only has gone")


def test_a_step_is_one_short_line(lines):
    display, clock, printed = lines
    display.step(1, 60, RECORD)
    clock.now = 2.0
    display.step(2, 60, RECORD)
    first, second = printed()
    assert first == "step  1/60  reward 0.500  tokens/s 4,211  mismatch 1.2e-06  seconds 1.9"
    assert second == first.replace(" 1/60", " 2/60") + "  left 1 min 56 s"
    assert len(second) <= 100


def test_quick_steps_share_a_line_but_the_first_and_last_have_their_own(lines):
    display, clock, printed = lines
    for step in range(1, 101):
        clock.now = step * 0.1
        display.step(step, 100, RECORD)
    shown = printed()
    steps = [int(re.match(r"step +(\d+)/100", line)[1]) for line in shown]
    left_out = [int(match[1]) if (match := re.search(r"\((\d+) before it not shown\)$", line)) else 0 for line in shown]
    assert left_out == [0, *(after - before - 1 for before, after in itertools.pairwise(steps))]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) <= 7


def test_a_long_rollout_shows_that_it_goes_on(lines):
    display, clock, printed = lines
    display.phase("starting")
    for second in range(100):
        clock.now = float(second)
        display.rollout(second, 100, {"timeout": 2} if second > 40 else {})
    assert printed() == [
        "starting",
        "30 of 100 episodes",
        "60 of 100 episodes, failed: timeout 2",
        "90 of 100 episodes, failed: timeout 2",
    ]


def test_a_count_is_shown_to_its_end_or_not_at_all(lines):
    display, clock, printed = lines
    for seconds in (40.0, 1.0):  # the first episode of a long rollout, then of a short one, long after the last line
        clock.now += 100.0
        for done in range(1, 5):
            clock.now += seconds
            display.rollout(done, 4, {})
    assert printed() == ["2 of 4 episodes", "3 of 4 episodes", "4 of 4 episodes"]
    clock.now += 100.0
    for done in range(1, 5):
        clock.now += 13.0
        display.rollout(done, 4, {})
    assert printed() == ["4 of 4 episodes"]


def test_an_alarm_is_a_line_of_its_own(lines):
    display, _, printed = lines
    display.alarm(12, "most of the episodes run into a limit")
    assert printed() == ["alarm at step 12: most of the episodes run into a limit"]


def test_a_supervised_stage_shows_its_loss(lines):
    display, _, printed = lines
    display.evaluation(0, {"eval/loss": 5.25, "n_tasks": 64})
    display.step(1, 10, {"loss": 5.0})
    assert printed() == ["held-out at step 0: loss 5.25 (64 tasks)", "step  1/10  loss 5.0000"]


def test_a_stage_on_recorded_answers_shows_how_they_are_told_apart(lines):
    display, _, printed = lines
    display.step(1, 10, {"loss": 0.5, "preference/accuracy": 0.75, "preference/margin": 1.25})
    display.step(10, 10, {"loss": 0.5, "step/accuracy": 0.5})
    assert printed() == [
        "step  1/10  accuracy 0.750  margin 1.250  loss 0.5000",
        "step 10/10  accuracy 0.500  loss 0.5000  (8 before it not shown)",
    ]


def test_time_left_starts_anew_with_a_stage_and_counts_from_the_step_a_run_resumed_at(lines):
    display, clock, printed = lines
    for now, step in ((0, 41), (10, 42)):
        clock.now = float(now)
        display.step(step, 60, RECORD)
    assert printed()[-1].endswith("left 3 min 00 s")  # 18 steps of 10 s, not 18 of 10 s / 42
    clock.now = 1000.0
    display.step(1, 60, RECORD)
    assert "left" not in printed()[-1]


def test_evaluations_and_the_end(lines):
    display, _, printed = lines
    display.evaluation(20, EVALUATION)
    display.evaluation(20, {**EVALUATION, "greedy": True})
    display.finish(SUMMARY)
    sampled, greedy, *end = printed()
    assert sampled == "held-out at step 20: 0.412 [0.370, 0.455] (512 tasks)"
    assert greedy == "held-out at step 20, greedy: 0.412 [0.370, 0.455] (512 tasks)"
    assert end[0] == "run       completed: 60 steps in 3 min 07 s"


def test_lines_are_ascii(lines):
    display, clock, printed = lines
    display.evaluation(0, EVALUATION)
    for now, step in ((0, 1), (10, 2)):
        clock.now = float(now)
        display.step(step, 60, RECORD)
    display.finish({**SUMMARY, "failures": {"timeout": 3}, "picture": "runs/first/curve.png"})
    shown = "\n".join(printed())
    for part in ("held-out", "step  2/60", "left", "timeout", "curve.png"):
        assert part in shown
    assert shown.isascii()


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_a_run_goes_on_when_nobody_can_read_its_lines(number):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(number, "gone")

    display = LineDisplay(Gone())
    display.phase("starting")
    display.step(1, 2, RECORD)
    display.finish(SUMMARY)


def test_the_base_class_is_a_silent_display(capsys):
    display = Display()
    display.phase("starting")
    display.step(1, 2, RECORD)
    display.finish(SUMMARY)
    display.close()
    assert capsys.readouterr() == ("", "")


def test_no_terminal_means_lines():
    assert isinstance(open_display(), LineDisplay)


# -- live -------------------------------------------------------------------------------------------------


@pytest.fixture
def live():
    """A live display that is not started, a function that draws it now, and one that gives what it has printed."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, highlight=False)
    display = LiveDisplay(console)
    yield display, lambda: drawn(display), console.file.getvalue
    display.close()


def drawn(display):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(display.render())
    return console.file.getvalue()


def test_the_table_shows_the_state_of_the_run(live):
    display, draw, _ = live
    display.phase("starting the engine")
    assert "starting the engine" in draw()
    display.evaluation(0, EVALUATION)
    display.step(0, 60, {"step": 0})
    for step in range(1, 4):
        display.step(step, 60, {**RECORD, "reward/mean": step / 4})
    display.rollout(128, 512, {"engine": 3})
    table = draw()
    for shown in (
        "3/60", "0.750", "▃▅▇", "0.412 [0.370, 0.455]", "at step 0", "4,211", "1.2e-06", "1.9",
        "128/512 episodes, failed: engine 3",
    ):  # fmt: skip
        assert shown in table, shown
    assert re.search(r"step  3/60 .* 0:00:\d\d", table)  # and the time left


def test_a_wait_for_a_server_counts_down_until_it_is_over(live, monkeypatch):
    display, draw, _ = live
    now = time.monotonic()
    monkeypatch.setattr("envgym.monitoring.terminal.WAITS", {"http://b:1": now + 30})
    display.phase("training")
    display.rollout(12, 512, {})
    for passed, shown in ((0.2, "30 s left"), (9.8, "20 s left"), (29.4, "1 s left")):
        monkeypatch.setattr("envgym.monitoring.terminal.time.monotonic", lambda passed=passed: now + passed)
        assert f"http://b:1 cannot be reached: {shown}" in draw()
    monkeypatch.setattr("envgym.monitoring.terminal.time.monotonic", lambda: now + 31)
    assert "cannot be reached" not in draw()


def test_an_alarm_stays_above_the_table(live):
    display, draw, printed = live
    display.phase("training")
    display.alarm(12, "[most] of the episodes run into a limit")
    assert "alarm at step 12: [most] of the episodes run into a limit" in printed()
    assert "alarm" not in draw()


def test_held_out_score_is_shown_beside_where_it_came_from(live):
    display, draw, _ = live
    display.evaluation(0, EVALUATION)
    display.step(0, 60, {})
    display.evaluation(20, {**EVALUATION, "score": 0.9, "ci95": [0.88, 0.92]})
    display.evaluation(20, {**EVALUATION, "score": 1.0, "ci95": [1, 1], "greedy": True})
    assert re.search(r"0\.900 \[0\.880, 0\.920\] +at step 20 +from 0\.412", draw())


def test_a_new_stage_forgets_the_one_before(live):
    display, draw, _ = live
    display.evaluation(0, {"eval/loss": 5.25, "n_tasks": 64})
    for step in range(101):
        display.step(step, 100, {"loss": 5.0})
    display.evaluation(0, EVALUATION)
    display.step(0, 60, {})
    display.step(1, 60, RECORD)
    table = draw()
    assert "loss" not in table
    assert "1/60" in table
    assert "0.412" in table


def test_sparkline_has_the_scale_of_the_values_or_the_wider_bounds():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.5, 1.0], 40, (0.0, 1.0)) == "▁▅█"
    assert sparkline([0.5, 0.5], 40) == "▁▁"
    assert sparkline([2.0], 40, (0.0, 1.0)) == "█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(sparkline(list(range(1000)), 40)) == 40


# -- on a real terminal -----------------------------------------------------------------------------------

RUN = """
import sys, time
from envgym.monitoring.terminal import open_display

display = open_display()
try:
    display.begin("first", "math_verify, starter")
    display.phase("starting the engine")
    display.note("a line that stays")
    print("READY", flush=True)
    for step in range(1, STEPS + 1):
        for done in range(0, 64):
            display.rollout(done, 64, {})
        time.sleep(0.02)
        display.step(step, STEPS, RECORD)
    display.finish(SUMMARY)
finally:
    display.close()
"""


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, program, **environment):
        self.screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (40, 100))
        self.inside = inside  # kept open, so that its modes can be read when the program is gone
        self.modes = termios.tcgetattr(inside)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={**{k: v for k, v in os.environ.items() if k != "CI"}, "TERM": "xterm-256color", **environment},
        )
        self.text = ""

    def read_until(self, wanted=None):
        """Collect what is printed until `wanted` is, or until the program ends."""
        deadline = time.monotonic() + 60
        while wanted is None or wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.screen], [], [], 0.1)[0]:
                self.text += os.read(self.screen, 65536).decode(errors="replace")
            elif self.process.poll() is not None:
                break
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)
        os.close(self.inside)


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(steps, **environment):
        names = {"STEPS": steps, "RECORD": RECORD, "SUMMARY": SUMMARY}
        program = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + RUN
        opened.append(Terminal(program, **environment))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def cursor_is_visible(text):
    return text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l")


def test_a_run_on_a_terminal(terminal):
    one = terminal(steps=50)
    shown = one.read_until()
    assert one.process.returncode == 0, shown
    assert "first" in shown
    assert "math_verify, starter" in shown
    assert shown.count("a line that stays") == 1
    assert "50/50" in shown
    assert "after 0.951 [0.930, 0.970]" in shown
    assert "envgym eval --config runs/first/config.yaml --model runs/first" in shown
    assert cursor_is_visible(one.text)
    assert termios.tcgetattr(one.inside) == one.modes


def test_drawing_keeps_to_its_pace(terminal):
    one = terminal(steps=100)
    started = time.monotonic()
    shown = one.read_until()
    seconds = time.monotonic() - started
    assert shown.count("╭") <= 4 * seconds + 3  # panels drawn, whatever the 6,400 calls; start and end draw their own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_off_leaves_a_usable_terminal(terminal, number):
    one = terminal(steps=100_000)
    one.read_until("READY")
    one.process.send_signal(number)
    one.read_until()
    assert one.process.returncode != 0
    assert cursor_is_visible(one.text)
    assert termios.tcgetattr(one.inside) == one.modes


def test_a_terminal_that_is_closed_is_no_reason_to_end_a_run(tmp_path):
    """What it says then goes nowhere, in whatever way it is said."""
    screen, inside = pty.openpty()
    done = tmp_path / "done"
    program = f"""
import sys
from envgym.monitoring.terminal import LiveDisplay

display = LiveDisplay()
display.phase("starting")
sys.stdin.readline()
display.note("a line that stays")
display.alarm(1, "it has gone")
display.step(1, 2, {RECORD!r})
display.finish({SUMMARY!r})
open({str(done)!r}, "w").close()
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=inside, stderr=subprocess.DEVNULL) as process:
        os.close(inside)
        os.read(screen, 1)
        os.close(screen)
        process.stdin.write(b"\n")
        process.stdin.close()
        process.wait(60)
    assert done.exists()


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}])
def test_a_terminal_that_cannot_or_should_not_redraw_gets_lines(terminal, environment):
    one = terminal(steps=3, **environment)
    one.read_until()
    assert one.process.returncode == 0
    assert "\x1b" not in one.text
    assert "step 3/3" in one.text


def test_no_color_means_no_colour(terminal):
    one = terminal(steps=3, NO_COLOR="1")
    one.read_until()
    colours = [code for codes in re.findall(r"\x1b\[([0-9;]*)m", one.text) for code in codes.split(";")]
    assert not [code for code in colours if code and 30 <= int(code) <= 49]


def test_what_others_have_written_commands_no_terminal():
    """Kinds of failures and notes hold words of servers and environments."""
    loud = "\x1b[2J\x1b]0;title\x07"
    lined, file = io.StringIO(), io.StringIO()
    line, live = LineDisplay(lined, Clock()), LiveDisplay(Console(file=file, width=200, highlight=False))
    for display in (line, live):
        display.note(loud)
        display.alarm(1, loud)
    line.rollout(1, 2, {loud: 3})
    live.rollout(1, 2, {loud: 3})
    live._console.print(live.render())
    for display in (line, live):
        display.finish({**SUMMARY, "failures": {loud: 1}})
    for text in (lined.getvalue(), file.getvalue()):
        assert not re.search(r"\x1b\[2J|\x1b\]|\x07", text)
        assert text.count(r"\x1b[2J\x1b]0;title\x07") >= 3
