"""Folders to look at, a server of them, and a real browser."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envgym.episodes.files import write_episodes
from envgym.episodes.record import learned_values, write_learned, write_rollouts
from envgym.run_folder import RunFolder, append_lines
from envgym.types import (
    Episode,
    Group,
    Message,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    number_rows,
)

ENVGYM = Path(sys.executable).with_name("envgym")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def made(number, member, text="the answer", *, step=1, reward=None, outcome=None, key=None, messages=None):
    """An episode of two prompt tokens and three sampled ones."""
    group = f"step-{step:06d}-0/{number:05d}"
    logprobs = [-0.1 * (member + 1), -0.5, -2.0]
    row = Row(
        [Segment("prompt", [40, 41]), Segment("action", [50, 51, 52 + member], logprobs=logprobs,
                                              versions=(VersionSpan(step - 1, 0, 3),), temperature=1.0)],
        turns=[Turn(reward, StopReason.STOP)],
    )  # fmt: skip
    task = Task(key or f"train-{number}", f"question {number}?", answer=str(number))
    episode = Episode(
        f"{group}:{member:03d}:0", task, outcome or Outcome.finish(), [row], env="sums-v0", group_id=group
    )
    episode.member, episode.reward, episode.score, episode.seconds = member, reward, reward, 0.25
    episode.messages = messages or [Message("user", f"question {number}?"), Message("assistant", text)]
    return episode


def make_run(
    path, *, steps=3, groups=4, members=4, tokenizer=None, config="seed: 7\nstages:\n- {steps: 9, model: none}\n"
):
    """A run's folder as training writes it."""
    folder = RunFolder(path)
    folder.create()
    (path / "config.yaml").write_text(config)
    for step in range(1, steps + 1):
        episodes = [
            made(n, m, f"answer {n} {m}", step=step, reward=float((n + m + step) % 2))
            for n in range(groups)
            for m in range(members)
        ]
        episodes[1].outcome, episodes[1].reward, episodes[1].score = Outcome.fail("timeout", "too slow"), None, None
        write_rollouts(folder.rollout_file(step), episodes)
        grouped = [Group(e.group_id, e.task, [e]) for e in episodes if not e.failed]
        learned = number_rows(grouped)
        for number, episode in enumerate(episode for group in learned for episode in group.episodes):
            row = episode.rows[0]
            row.arrays["advantages"] = np.array([0, 0, 0.5, 0.5, -0.25 * (number + 1)], np.float32)
            row.entropies = np.array([0, 0, 0.25, 0.5, 2.0], np.float32)
            row.first_outputs = row.last_outputs = np.nan_to_num(row.old_logprobs) - np.float32(0.01)
        write_learned(folder.learned_file(step), learned_values(learned))
        for n, episode in enumerate(episodes):
            spans = [
                ["waiting", 100.0, 100.0 + n],
                ["generating", 100.0 + n, 110.0 + n],
                ["environment", 110.0 + n, 111.0 + n],
            ]
            append_lines(folder.event_file(step), [{"episode": episode.id, "spans": spans}])
        append_lines(folder.event_file(step), [{"phases": [["rollout", 100.0, 130.0], ["learn", 130.0, 140.0]]}])
        record = {"step": step, "reward/mean": 0.1 * step, "reward/std": 0.5, "episodes": 16, "loss": 1.0 / step}
        alarms = {"mismatch/mean_abs": 0.2, **({"alarms": ["mismatch"]} if step == 2 else {})}
        folder.append_metrics({**record, "seconds/rollout": 30.0, "seconds/learn": 10.0, **alarms})
    if tokenizer is not None:
        shutil.copy(tokenizer / "tokenizer.json", folder.tokenizer_file)
    return folder


def make_evaluation(path, scores):
    """An evaluation's folder: two episodes of each task."""
    path.mkdir(parents=True)
    episodes = [
        made(n, m, reward=score, key=f"test-{n}") for n, pair in enumerate(scores) for m, score in enumerate(pair)
    ]
    for episode in episodes:
        episode.group_id = episode.group_id.replace("step-000001-0", "sums")
    write_episodes(path / "episodes.jsonl", episodes)
    (path / "result.json").write_text(json.dumps({"score": 0.5}))
    (path / "config.yaml").write_text("seed: 0\nstages:\n- {model: none}\n")
    return path


@pytest.fixture
def tree(tmp_path, tiny_model):
    """`runs/first`, two evaluations, and the folder that they are in."""
    make_run(tmp_path / "runs" / "first", tokenizer=tiny_model)
    make_evaluation(tmp_path / "evals" / "a", [(0, 0), (1, 1), (0, 1), (1, 1)])
    make_evaluation(tmp_path / "evals" / "b", [(1, 1), (1, 1), (0, 1), (0, 1)])
    return tmp_path


@contextlib.contextmanager
def viewing(folder, *words):
    """`envgym view` of a folder, as a process; gives the page's address."""
    process = subprocess.Popen(
        [ENVGYM, "view", "--port", "0", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert "http" in line, process.stderr.read()
        yield re.search(r"http://\S+/", line)[0]
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture(scope="module")  # Playwright's own event loop runs in this thread until it ends
def browser():
    if CHROMIUM is None:
        if os.environ.get("ENVGYM_NEEDS_BROWSER"):
            pytest.fail("there is no Chromium: apt-get install chromium")
        pytest.skip("there is no Chromium (Debian's package: chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A new page, which may complain of nothing."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.complaints = complaints
    yield page
    page.close()
    assert [one for one in complaints if "ERR_CONNECTION" not in one] == []  # its server may have ended before it
