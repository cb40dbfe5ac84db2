"""An episode's tokens in a real browser: what colours mean, masks, and the keys."""

import sys
from pathlib import Path

from envgym.episodes.files import write_episodes
from envgym.types import Segment

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, viewing

LEGENDS = {
    "role": ["prompt", "sampled", "not in the loss"],
    "loss weight": ["0\n1", "no number", "not in the loss"],
    "log-probability": ["probability 1\n0.7% or less", "no number", "not in the loss"],
    "ratio": ["0.990\n1.010", "no number", "not in the loss"],
    "advantage": ["−0.500\n0.500", "no number", "not in the loss"],
    "entropy": ["0\n2 nats", "no number", "not in the loss"],
    "policy version": ["version 0", "no number", "not in the loss"],
}


def opened(page, url, view):
    page.goto(f"{url}#/{view}")
    page.wait_for_selector(".tokens")
    return page.locator("main")


def test_every_coloring_has_a_legend_in_its_own_colors(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, "episode/runs%2Ffirst/1/0?as=tokens")
        for mode, texts in LEGENDS.items():
            main.get_by_role("button", name=mode, exact=True).click()
            legend = main.locator(".tokens").locator("xpath=preceding-sibling::*[1]")
            assert legend.locator("> span").all_inner_texts() == texts, mode
        color = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        main.get_by_role("button", name="role", exact=True).click()
        [prompt, sampled, _] = main.locator(".tokens").locator("xpath=preceding-sibling::*[1]//i").evaluate_all(color)
        assert main.locator(".tokens span").evaluate_all(color)[::3] == [prompt, sampled]


def test_tokens_outside_of_the_loss_are_hatched(tmp_path, page):
    episode = made(0, 0)
    episode.rows[0].segments += [Segment("feedback", [7]), Segment("action", [60, 61], [1.0, 0.0])]
    write_episodes(tmp_path / "some.jsonl", [episode])
    with viewing(tmp_path, "some.jsonl") as url:
        main = opened(page, url, "episode/some.jsonl/0/0?as=tokens&by=weight")
        images = main.locator(".tokens span").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundImage)"
        )
        assert ["repeating" in image for image in images] == [True, True, False, False, False, True, False, True]


def test_tokens_are_read_without_a_mouse(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, "episode/runs%2Ffirst/1/0?as=tokens")
        main.locator(".tokens").wait_for()
        said = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
            page.keyboard.press(key)
            said.append(main.locator(".bar").inner_text().split(":")[0])
        assert said == [f"token {n}" for n in (0, 1, 0, 4, 4, 0)]
        assert main.locator(".tokens .current").count() == 1
        main.locator(".tokens span").nth(2).click()
        page.keyboard.press("ArrowRight")
        assert main.locator(".bar").inner_text().startswith("token 3:")
        assert main.locator(".bar").get_attribute("role") == "status"  # a screen reader says it
        page.keyboard.press("c")
        page.wait_for_function("() => location.hash.includes('by=')")
