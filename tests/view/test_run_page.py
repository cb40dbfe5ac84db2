"""A run's page in a real browser: settings, alerts, curves that share a cursor, time, checkpoints, commands, logs."""

import json
import re
import sys
from pathlib import Path

import pytest

from envgym.config.resolve import resolve
from envgym.disk import folder_lock
from envgym.monitoring.report import summary_lines
from envgym.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from conftest import make_run, viewing

SECONDS = {"total": 40.0, "start": 15.0, "rollout": 13.2, "score": 1.9, "learn": 5.9, "sync": 0.6, "eval": 2.9}


@pytest.fixture
def run(tmp_path):
    """A run that ended, with other settings than its recipe's and an alert at its second step."""
    config = resolve({"env": "math_verify", "steps": 9, "learner": {"lr": 0.05}, "seed": 3}, recipe="grpo")
    folder = make_run(tmp_path / "runs" / "first", steps=6, config=config.to_yaml())
    evals = {
        moment: {"score": score, "ci95": [score - 0.1, score + 0.1], "n_tasks": 9}
        for moment, score in (("before", 0.5), ("after", 0.75))
    }
    summary = {"status": "completed", "steps": 6, "seconds": SECONDS, "failures": {}, "eval": evals}
    summary["tokens"] = {"sampled": 1, "trained": 1}
    folder.summary_file.write_text(json.dumps(summary))
    for name in ("step_000003", "step_000006"):
        (folder.checkpoints / name).mkdir()
    folder.best.symlink_to("step_000003")
    (folder.logs / "engine.log").write_text("".join(f"line {n}\n" for n in range(5000)))
    return folder


def opened(page, url, name="runs/first"):
    page.goto("about:blank")
    page.goto(f"{url}#/run/{name.replace('/', '%2F')}")
    page.wait_for_selector(".charts .chart:not([hidden]) canvas")
    return page.locator("main")


def part(main, title):
    return main.locator(".part", has=main.page.locator(f"h2:text-is('{title}')"))


def chart(main, title):
    return main.locator(".chart", has=main.page.locator(f"figcaption span:text-is('{title}')"))


def steps_of(chart):
    return re.search(r"over steps (\d+) to (\d+)", chart.locator("canvas").get_attribute("aria-label")).groups()


def test_settings_checkpoints_commands_and_the_logs_end(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url)
        rows = [row.locator("td").all_inner_texts() for row in part(main, "Settings").locator("tbody tr:visible").all()]
        assert ["learner.lr", "0.05", "0.0006"] in rows
        assert ["seed", "3", "0"] in rows
        assert not any(row[0] == "learner.gamma" for row in rows)
        main.locator("summary", has_text="settings").click()
        assert part(main, "Settings").locator("tr:visible", has_text="learner.gamma").count() == 1
        assert part(main, "Checkpoints").locator("li").all_inner_texts() == ["step_000006", "step_000003 (best)"]
        assert part(main, "Commands").locator("code").all_inner_texts() == [
            "envgym train --resume runs/first",
            "envgym eval --config runs/first/config.yaml --model runs/first",
            "envgym show runs/first --step 6",
            "envgym replay runs/first --step 6",
        ]
        assert not part(main, "Logs").locator("pre").is_visible()
        main.locator("summary", has_text="engine.log").click()
        assert part(main, "Logs").locator("pre").inner_text().split("\n")[0::29] == ["line 4970", "line 4999"]
        assert "0.500 [0.400, 0.600] → 0.750 [0.650, 0.850]" in main.locator(".facts").inner_text()


def test_every_part_of_the_time_is_named_with_the_numbers_of_the_terminal(run, tmp_path, page):
    summary = json.loads(run.summary_file.read_text())
    line = dict(summary_lines({**summary, "run": "runs/first"}))["time"]
    with viewing(tmp_path) as url:
        main = opened(page, url)
        names = [
            text.partition(",")[0] for text in part(main, "Time by phase").locator(".legend span").all_inner_texts()
        ]
        assert names == line.split("  ")
        bars = main.locator(".phases .phase").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        )
        swatches = main.locator(".phases + .legend i").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        )
        assert bars == swatches
        assert len(set(bars)) == len(names) == 7


def test_an_alert_is_on_the_curve_of_its_metric_with_its_sentence(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url)
        curve = chart(main, "mismatch/mean_abs")
        assert "step 2 inference engine and trainer differ by 0.2 nats" in curve.locator(".alarms").inner_text()
        assert curve.locator("canvas").get_attribute("aria-label").endswith("alerts at 2")
        assert chart(main, "loss").locator(".alarms").inner_text() == ""
        page.wait_for_timeout(200)
        column = curve.locator("canvas").evaluate("""(canvas) => {
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = {};
            for (let n = 0; n < pixels.length; n += 4)
                if (Math.abs(pixels[n] - 0x8a) + Math.abs(pixels[n + 1] - 0x5a) + pixels[n + 2] < 60 && pixels[n + 3])
                    found[(n / 4) % canvas.width] = (found[(n / 4) % canvas.width] || 0) + 1;
            return Object.keys(found).map(Number);
        }""")
        assert len(column) in (1, 2)  # one dashed line
        main.locator(".alarms a").first.click()
        page.wait_for_selector("h1:text-is('Step 2')")
    run.append_metrics({"step": 6, "failures/share": 0.3, "alarms": ["failures"]})
    with viewing(tmp_path) as url:
        main = opened(page, url)
        main.locator(".alarms").first.get_by_role("link", name="rollouts/").click()
        page.wait_for_selector("h1:text-is('Step 6')")


def test_curves_share_a_cursor_and_a_range_of_steps(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url)
        reward, loss = chart(main, "reward"), chart(main, "loss")
        box = reward.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 60)
        assert loss.locator(".now").inner_text() == "step 6 0.167"
        assert loss.locator(".mark").is_visible()
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        assert reward.locator(".drag").is_visible()
        page.mouse.up()
        assert steps_of(reward) == steps_of(loss) != ("1", "6")
        assert steps_of(loss)[1] == "6"
        assert page.get_by_label("First step of the curves").input_value() == steps_of(loss)[0]
        page.get_by_role("button", name="All steps").click()
        assert steps_of(reward) == steps_of(loss) == ("1", "6")
        page.get_by_label("First step of the curves").fill("2")  # without a mouse
        page.get_by_label("Last step of the curves").fill("4")
        page.keyboard.press("Enter")
        assert steps_of(reward) == steps_of(loss) == ("2", "4")
        box = loss.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 60)
        assert reward.locator(".now").inner_text().startswith("step 4 0.400")
        page.mouse.down()
        page.mouse.up()
        page.wait_for_selector("h1:text-is('Step 4')")


def test_a_live_runs_log_is_followed(run, tmp_path, page):
    run.summary_file.unlink()
    with viewing(tmp_path) as url, folder_lock(run.path, "a test"):
        main = opened(page, url)
        assert part(main, "Time by phase").locator(".legend").inner_text() == "rollout 75%, 180 s\nlearn 25%, 60 s"
        main.locator("summary", has_text="engine.log").click()
        with (run.logs / "engine.log").open("a") as file:
            file.write("out of memory\n")
        page.wait_for_function("() => document.querySelector('pre').innerText.endsWith('out of memory')", timeout=15000)


def test_an_offline_run_shows_what_it_is_judged_by_and_no_empty_parts(tmp_path, page):
    folder = RunFolder(tmp_path / "runs" / "sft")
    folder.create()
    (folder.path / "config.yaml").write_text("recipe: sft\nstages:\n- {steps: 4, learner: {name: sft}, model: none}\n")
    for step, loss in ((0, 2.0), (4, 1.25)):
        folder.append_metrics({"step": step, "eval/loss": loss, "loss": 1.0})
    with viewing(tmp_path) as url:
        main = opened(page, url, "runs/sft")
        assert chart(main, "held-out loss").locator(".now").inner_text() == "1.250"
        assert "held-out loss\n2 → 1.250" in main.locator(".facts").inner_text()
        titles = main.locator("h2:visible").all_inner_texts()
        assert titles == ["Settings", "Commands"]


def test_an_evaluations_links_lead_to_its_episodes(tree, page):
    result = {"score": 0.625, "ci95": [0.2, 0.9], "n_tasks": 4, "model": "starter", "truncated": 0, "failures": {}}
    (tree / "evals" / "a" / "result.json").write_text(json.dumps(result))
    with viewing(tree) as url:
        page.goto(f"{url}#/episode/evals%2Fa/0/0")
        page.wait_for_selector(".talk")
        page.get_by_role("navigation").get_by_role("link", name="a", exact=True).click()
        page.wait_for_selector("a.row")
        assert page.locator("a.row").count() == 8
        assert "0.625 [0.200, 0.900]" in page.locator(".facts").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_or_wider_than_the_page(run, tmp_path, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    with viewing(tmp_path) as url:
        main = opened(page, url)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        cut = main.locator(".step, .step span, .legend span, code, td, h2, .fact dd").evaluate_all(
            "all => all.filter((one) => getComputedStyle(one).display !== 'inline')"
            ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.outerHTML)"
        )
        assert cut == []
    page.close()
