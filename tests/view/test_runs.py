"""The list of runs, and several runs over each other, in a real browser."""

import json
import sys
from pathlib import Path

import pytest

from envgym.run_folder import RunFolder
from envgym.view.server import Answers

sys.path.insert(0, str(Path(__file__).parent))
from conftest import make_evaluation, make_run, viewing

SETTINGS = """recipe: {recipe}
seed: 7
stages:
- {{env: {{name: math_verify}}, learner: {{name: grpo, lr: {lr}}}, steps: 9, model: {model}}}
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three runs, the second of which learned best with another learning rate, an offline one, and an evaluation."""
    path = tmp_path_factory.mktemp("three")
    for name, lr, after, seconds in (("a", 0.001, 0.5, 90), ("b", 0.003, 0.9, 7500), ("c", 0.1, 0.1, 30)):
        folder = make_run(path / "runs" / name, config=SETTINGS.format(recipe="grpo", lr=lr, model="starter"), steps=2)
        lines = folder.metrics_file.read_text()
        held_out = [{"step": step, "eval/score": score} for step, score in ((0, 0.25), (2, after))]
        folder.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in held_out) + lines)
        folder.summary_file.write_text(json.dumps({"status": "completed", "seconds": {"total": seconds}}))
    folder = RunFolder(path / "runs" / "offline")
    folder.create()
    (folder.path / "config.yaml").write_text(SETTINGS.format(recipe="dpo", lr=1e-4, model="models/large"))
    for step, accuracy in ((0, 0.5), (4, 0.75)):
        folder.append_metrics(
            {"step": step, "eval/accuracy": accuracy, "eval/margin": step / 8, "eval/loss": 0.7, "loss": 0.5}
        )
    make_evaluation(path / "evals" / "a", [(0, 1)])
    return path


def cells(page, column):
    return [row.locator(f"td[data-of='{column}']").inner_text() for row in page.locator("tbody tr").all()]


def test_runs_are_listed_with_what_they_are_judged_by_sorted_and_filtered(three, page):
    with viewing(three) as url:
        page.goto(url)
        page.wait_for_selector("tbody tr")
        page.get_by_role("button", name="held-out").click()  # the best first
        assert cells(page, "name")[1:4] == ["runs/offline", "evals/a evaluation", "runs/a"]
        assert cells(page, "name")[0] == "runs/b"
        assert cells(page, "held-out")[:2] == ["0.250 → 0.900", "accuracy 0.500 → 0.750\nmargin 0 → 0.500\nloss 0.700"]
        assert cells(page, "environment")[0] == "math_verify"
        assert cells(page, "recipe")[:2] == ["grpo", "dpo"]
        assert cells(page, "duration")[0] == "2 h 05 min"
        page.get_by_role("button", name="duration").click()
        page.get_by_role("button", name="duration ↓").click()
        assert [name for name in cells(page, "name") if name in ("runs/a", "runs/b", "runs/c")] == [
            "runs/c",
            "runs/a",
            "runs/b",
        ]
        page.get_by_role("searchbox").fill("large dpo")
        assert cells(page, "name") == ["runs/offline"]
        page.reload()
        page.wait_for_selector("tbody tr")
        assert cells(page, "name") == ["runs/offline"]  # the filter is in the address


def test_curves_of_chosen_runs_lie_over_each_other_above_the_settings_that_differ(three, page):
    with viewing(three) as url:
        page.goto(url)
        for name in "ab":
            page.get_by_label(f"Choose runs/{name}").check()
        page.get_by_role("link", name="Overlay").click()
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        held_out = page.locator(".chart:not([hidden])", has_text="held-out score")
        assert held_out.locator(".now").inner_text().split() == ["0.500", "0.900"]
        colors = held_out.locator(".now span").evaluate_all("all => all.map((one) => getComputedStyle(one).color)")
        names = page.locator(".legend a").evaluate_all("all => all.map((one) => getComputedStyle(one).color)")
        assert colors == names
        assert len(set(colors)) == 2
        rows = [row.locator("td").all_inner_texts() for row in page.locator(".settings tbody tr").all()]
        assert rows == [["learner.lr", "0.001", "0.003"]]


@pytest.mark.parametrize("view", ["", "overlay/runs%2Fa/runs%2Fb"])
def test_nothing_is_cut_on_a_phone(three, browser, view):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    with viewing(three) as url:
        page.goto(f"{url}#/{view}")
        page.wait_for_selector("tbody tr")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        cut = page.locator("td, th").evaluate_all(
            "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.outerHTML)"
        )
        assert cut == []
        boxes = page.locator("td").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().right).filter((right) => right > innerWidth)"
        )
        assert boxes == []
        if view:  # names stay whole where there is no room: the table scrolls in its box
            page.set_viewport_size({"width": 200, "height": 800})
            assert page.locator("td").first.bounding_box()["height"] < 40
            assert page.locator(".wide").last.evaluate("one => one.scrollWidth > one.clientWidth")
    page.close()


def test_settings_are_those_of_the_stage_and_what_differs_from_the_recipe(tmp_path):
    from envgym.config.resolve import resolve

    config = resolve(
        {"env": "math_verify", "steps": 3, "stages": {"grpo": {"learner": {"lr": 0.5}}}}, recipe="sft_grpo"
    )
    for stage in ("1-sft", "2-grpo"):
        make_run(tmp_path / "run" / stage, steps=1)
        (tmp_path / "run" / stage / "config.yaml").unlink()
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    answers = Answers([tmp_path / "run"])
    sft, grpo = (answers(f"run|{name}") for name in answers.sources)
    assert [info["settings"]["learner.name"] for info in (sft, grpo)] == ["sft", "grpo"]
    changes = [{key: (value, usual) for key, value, usual in info["changed"]} for info in (sft, grpo)]
    assert [each["env.name"] for each in changes] == [("math_verify", None)] * 2  # the recipe has none
    others = [{key for key in each if not key.startswith(("env.", "agent."))} for each in changes]
    assert others == [{"steps"}, {"steps", "learner.lr"}]
    assert changes[1]["learner.lr"] == (0.5, 0.0003)
    (recipe := tmp_path / "secret.yaml").write_text(
        "seed: 5\nenv: math_verify\nlearner: grpo\n"
    )  # a path is not opened
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml().replace("recipe: sft_grpo", f"recipe: {recipe}"))
    answers = Answers([tmp_path / "run"])
    assert [answers(f"run|{name}")["changed"] for name in answers.sources] == [None, None]
