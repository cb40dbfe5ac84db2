"""The page in a real browser: what people do with it."""

import json
import sys
from pathlib import Path

import pytest

from envgym.episodes.files import write_episodes
from envgym.types import Message

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, make_run, viewing

RUN = "runs%2Ffirst"


def opened(page, url, view):
    page.goto("about:blank")  # else what is waited for next may be found in the view before
    page.goto(f"{url}#/{view}")
    page.wait_for_selector("main h1")
    return page.locator("main")


def test_from_all_runs_to_a_failed_episode_and_its_neighbours(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, "")
        assert main.locator("tbody tr").count() == 3
        main.get_by_role("link", name="runs/first").click()
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        assert "step 2 sampler and trainer differ by 0.2 nats" in main.locator(".alarms").inner_text()
        main.locator("a.step").first.click()
        page.wait_for_selector("a.row")
        assert "16 episodes" in main.inner_text()
        main.get_by_label("Ended").select_option("failed")
        assert main.locator("a.row").count() == 1
        assert "status=failed" in page.url  # every view is a link
        page.reload()
        page.wait_for_selector("a.row")
        assert main.locator("a.row").count() == 1
        main.locator("a.row").click()
        page.wait_for_selector(".talk")
        assert "failed: took too long: too slow" in main.inner_text()
        assert main.locator(".strip").get_attribute("aria-label") == "waiting 1 s, generating 10 s, environment 1 s"
        page.keyboard.press("u")
        page.wait_for_selector("a.row")
        main.get_by_role("columnheader", name="surprise").click()
        first = main.locator("a.row").first
        assert first.locator("span").nth(4).inner_text() == "3"  # the member whose tokens were least likely
        first.click()
        page.wait_for_selector(".talk")
        at = page.url
        page.keyboard.press("j")
        page.wait_for_function("at => location.href !== at && document.title.startsWith('episode 7')", arg=at)
        page.keyboard.press("k")
        page.wait_for_function("at => location.href.split('?')[0] === at.split('?')[0]", arg=at)


def test_tokens_are_coloured_by_what_was_learned_of_them(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"episode/{RUN}/1/0?as=tokens&by=advantage")
        tokens = main.locator(".tokens span")
        assert tokens.count() == 5
        assert tokens.nth(0).get_attribute("class") == "tint-none"  # a prompt's
        assert tokens.nth(2).get_attribute("class") == "tint-high"
        assert tokens.nth(4).get_attribute("class") == "tint-low"
        assert tokens.nth(2).evaluate("one => one.style.getPropertyValue('--a')") == "1.00"
        assert tokens.nth(4).evaluate("one => one.style.getPropertyValue('--a')") == "0.50"
        tokens.nth(2).hover()
        told = main.locator(".bar").inner_text()
        assert "id 50" in told
        assert "log-probability −0.1000 · difference 0.0100 · ratio 0.9900 · advantage 0.5000 · version 0" in told
        for word in ("role", "loss weight", "log-probability", "sampler − trainer", "ratio", "policy version"):
            main.get_by_role("button", name=word, exact=True).click()
            assert tokens.count() == 5
        assert "by=version" in page.url
        page.keyboard.press("t")
        page.wait_for_selector(".talk")
        page.keyboard.press("g")
        page.wait_for_selector(".group")
        assert main.locator("article").count() == 4


def test_a_bar_filters_and_search_finds(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"list/{RUN}/1")
        page.wait_for_selector("a.row")
        main.locator(".bars button").last.click()
        rewards = {row.locator("span").nth(1).inner_text() for row in main.locator("a.row").all()}
        assert rewards == {"1"}
        main.locator(".bars button[aria-pressed=true]").click()
        main.get_by_label("Search in messages and tasks").fill("answer 2 3")
        page.wait_for_function("() => document.querySelectorAll('a.row').length === 1")


def test_swimlanes_are_of_the_recorded_times(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"lanes/{RUN}/2")
        canvas = main.locator("canvas")
        assert canvas.get_attribute("aria-label") == "16 episodes over 40 seconds"
        canvas.hover(position={"x": 40, "y": 24})
        assert "step-000002-0/00000:000:0: generating for 10 s" in main.locator(".bar").inner_text()


def test_two_evaluations_are_compared_task_by_task(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, "")
        main.get_by_label("Compare evals/a").check()
        main.get_by_label("Compare evals/b").check()
        main.get_by_role("link", name="Compare").click()
        page.wait_for_selector("h1:has-text('B against A')")
        assert "evals/a" in main.locator("p").inner_text().split("\n")[0]
        first = main.locator("tbody tr").first.locator("td").all_inner_texts()
        assert first[:4] == ["sums: test-0", "0", "1", "1"]
        # means 0, 1, 0.5, 1 against 1, 1, 0.5, 0.5: differences 1, 0, 0, -0.5
        facts = main.locator(".facts").inner_text().split("\n")
        assert facts[1].startswith("0.125 [")
        main.locator("tbody tr").first.locator("a").first.click()
        page.wait_for_selector(".talk")


def test_a_live_run_is_followed(tree, page):
    from envgym.training.run_folder import RunFolder

    folder = RunFolder(tree / "runs" / "first")
    from envgym.disk import locked

    with viewing(tree) as url, locked(folder.path, "a test"):
        main = opened(page, url, f"run/{RUN}")
        assert "3 of 9" in main.inner_text()
        height = main.evaluate("one => one.scrollHeight")
        folder.append_metrics({"step": 4, "reward/mean": 0.9, "episodes": 16, "loss": 0.1})
        page.wait_for_function("() => document.querySelector('main').innerText.includes('4 of 9')", timeout=15000)
        assert main.evaluate("one => one.scrollHeight") == height, "nothing jumps"


def test_an_export_opens_from_the_disk_and_asks_for_nothing(tree, page, monkeypatch):
    from envgym.cli import main as command

    monkeypatch.chdir(tree)
    assert command(["export", "first", "--episodes", "5"]) == 0
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tree}/first.html")
    page.wait_for_selector(".charts .chart:not([hidden]) canvas")
    page.locator("a.step").first.click()
    page.wait_for_selector("a.row")
    assert page.locator("a.row").count() == 16
    page.get_by_label("Ended").select_option("failed")
    page.locator("a.row").first.click()
    page.wait_for_selector(".talk")
    assert "took too long" in page.locator("main").inner_text()
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert (tree / "first.html").stat().st_size < 2**20


def test_a_hostile_episode_is_text_and_breaks_nothing(tmp_path, page):
    bad = "<script>window.owned=1</script><img src=x onerror=window.owned=2>\x1b[31mred\u202egnp.exe\ud800"
    turns = [Message.of(role, f"turn {n} {bad}") for n in range(500) for role in ("user", "assistant")]
    episodes = [made(0, 0, bad, key=f"task {bad}"), made(1, 0, "x" * 2**20), made(2, 0, messages=turns)]
    write_episodes(tmp_path / "bad.jsonl", episodes)
    with viewing(tmp_path, "bad.jsonl") as url:
        main = opened(page, url, "list/bad.jsonl/0")
        page.wait_for_selector("a.row")
        assert main.locator("a.row").count() == 3
        for number in range(3):
            main = opened(page, url, f"episode/bad.jsonl/0/{number}")
            page.wait_for_selector(".talk")
        assert main.locator(".turn").count() == 1000
        opened(page, url, "episode/bad.jsonl/0/0")
        text = main.locator(".turn.assistant .text").inner_text()
        assert text.startswith("<script>window.owned=1</script><img")
        assert "␦1b[31mred␦202egnp" in text  # neither is obeyed
        assert page.evaluate("() => window.owned") is None
        opened(page, url, "episode/bad.jsonl/0/1")
        assert "more characters" in main.locator(".turn.assistant").inner_text()
        page.goto(f"{url}#/episode/bad.jsonl/0/99")
        page.wait_for_selector(".error")
        assert "has 3 episodes, none of number 99" in main.inner_text()
    page.complaints[:] = [one for one in page.complaints if "404" not in one]


def test_a_list_of_many_has_few_elements(tmp_path, page):
    folder = make_run(tmp_path / "runs" / "first", steps=1, groups=1500)
    assert folder.rollout_file(1).is_file()
    with viewing(tmp_path) as url:
        main = opened(page, url, f"list/{RUN}/1")
        page.wait_for_function("() => document.querySelector('.hint').innerText.startsWith('6,000')")
        assert main.locator("a.row").count() < 80
        page.evaluate("() => { const list = document.querySelector('.list'); list.scrollTop = list.scrollHeight; }")
        page.wait_for_function(
            "() => [...document.querySelectorAll('a.row')].some(row => row.innerText.includes('train-1499'))"
        )
        assert main.locator("a.row").count() < 80


VIEWS = ["", f"run/{RUN}", f"list/{RUN}/1", f"episode/{RUN}/1/0", f"episode/{RUN}/1/0?as=tokens&by=advantage",
         f"group/{RUN}/1/0", f"lanes/{RUN}/1", "compare/evals%2Fa/0/evals%2Fb/0"]  # fmt: skip


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious(tree, browser, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    serious = []
    with viewing(tree) as url:
        for view in VIEWS:
            opened(page, url, view)
            page.wait_for_timeout(300)
            found = Axe().run(page).response["violations"]
            serious += [(view, one["id"], one["nodes"]) for one in found if one["impact"] in ("serious", "critical")]
    page.close()
    assert serious == []


def test_the_pages_files_are_small():
    files = [path for path in (Path(__file__).parents[2] / "envgym" / "view" / "page").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 250_000
    assert json.dumps([path.name for path in files]).count(".js") == 11
