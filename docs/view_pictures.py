"""Draws the pictures of `envgym view` in the documentation, of two runs that it trains first.

python docs/view_pictures.py
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

OUT = Path(__file__).parent / "training"
STEPS = 60
RUNS = {"first": [], "high_rate": ["learner.lr=0.002"]}
"""The runs, and the settings in which they differ."""
VIEWS = {
    "view_runs": ("", "tbody tr .spark"),
    "view_overlay": ("overlay/runs%2Ffirst/runs%2Fhigh_rate", ".settings td"),
    "view_run": ("run/runs%2Ffirst", ".chart:not([hidden]) canvas"),
    "view_list": ("list/runs%2Ffirst/{step}", "a.row .answered:not(:empty)"),
    "view_tokens": ("episode/runs%2Ffirst/{step}/{index}?as=tokens&by=advantage", ".tokens span"),
}
"""The pictures: each with its view, and an element that is there once the view is drawn."""
ENVGYM = [sys.executable, "-c", "import sys; from envgym.cli import main; sys.exit(main())"]


def train(folder: Path, steps: int, tasks: int = 32) -> None:
    common = [f"steps={steps}", f"eval.every={max(1, steps // 3)}"]
    common += [f"rollout.tasks_per_step={tasks}", f"eval.tasks={4 * tasks}"]
    for name, settings in RUNS.items():
        words = ["train", "--env", "math_verify", "--name", name, *common, "engine.kind=transformers", *settings]
        subprocess.run([*ENVGYM, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def differing_episode(folder: Path, step: int) -> int:
    """The number of the first episode of the step whose group has different rewards: it has an advantage."""
    from envgym.episodes.record import read_rollouts

    episodes = read_rollouts(folder / "runs" / "first" / "rollouts" / f"step_{step:06d}.parquet")
    rewards: dict[str, set[float | None]] = {}
    for episode in episodes:
        rewards.setdefault(episode.group_id, set()).add(episode.reward)
    return next((n for n, episode in enumerate(episodes) if len(rewards[episode.group_id]) > 1), 0)


def draw(browser: Browser, folder: Path, steps: int, out: Path) -> None:
    step = max(1, steps // 3)
    places = {"step": step, "index": differing_episode(folder, step)}
    server = subprocess.Popen([*ENVGYM, "view", "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        [url] = re.findall(r"http://\S+/", server.stdout.readline())
        page = browser.new_page(viewport={"width": 1200, "height": 760}, color_scheme="light")
        for name, (view, drawn) in VIEWS.items():
            page.goto("about:blank")
            page.goto(f"{url}#/{view.format(**places)}")
            page.wait_for_selector(drawn)
            page.wait_for_timeout(500)  # canvases and texts of rows follow
            page.screenshot(path=out / f"{name}.png")
        page.close()
    finally:
        server.terminate()
        server.wait()


def main(steps: int = STEPS, out: Path = OUT) -> None:
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        train(Path(temporary), steps)
        program = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        draw(browser, Path(temporary), steps, out)
        browser.close()


if __name__ == "__main__":
    main()
