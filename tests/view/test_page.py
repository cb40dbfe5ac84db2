"""The page in a real browser: what people do with it."""

import json
import sys
from pathlib import Path

import pytest

from envgym.episodes.files import write_episodes
from envgym.episodes.record import write_rollouts
from envgym.run_folder import RunFolder
from envgym.types import Message, StopReason, Turn

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, make_run, viewing

RUN = "runs%2Ffirst"
LISTED = """texts => ["question", "completion"].every(
    (name, n) => document.querySelector(`a.row .${name}`)?.innerText === texts[n])"""
"""The first line of the list has these beginnings of its prompt and its completion."""


def opened(page, url, view):
    page.goto("about:blank")  # else what is waited for next may be found in the view before
    page.goto(f"{url}#/{view}")
    page.wait_for_selector("main h1")
    return page.locator("main")


def test_from_all_runs_to_a_failed_episode_and_its_neighbours(tree, page):
    folder = RunFolder(tree / "runs" / "first")
    folder.append_metrics({"step": 0, "eval/score": 0.5})
    (folder.path / "held_out").mkdir()
    for step in (0, 2):
        evaluated = [made(n, 0, f"held-out answer at {step}", key=f"test-{n}", reward=1.0) for n in range(3)]
        write_rollouts(folder.path / "held_out" / f"step_{step:06d}.parquet", evaluated)
    with viewing(tree) as url:
        main = opened(page, url, "")
        assert main.locator("tbody tr").count() == 3
        main.get_by_role("link", name="runs/first", exact=True).click()
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        assert main.locator("h2:has-text('Held-out evaluations') + .steps a").all_inner_texts() == [
            "2\nscore –",
            "0\nscore 0.500",
        ]
        main.locator("h2:has-text('Held-out evaluations') + .steps a").last.click()
        page.wait_for_function(LISTED, arg=["question 0?", "held-out answer at 0"])
        assert main.locator("a.row").count() == 3
        assert main.locator("a.row .up").count() == 3  # the full score, and no other cell
        assert main.locator("a.row [data-of=status]").first.get_attribute("class").strip() == "state"
        main.locator("a.row").first.click()
        page.wait_for_selector(".talk:has-text('held-out answer at 0')")
        trail = page.get_by_role("navigation").locator("a, span:not(.sep)")
        assert trail.all_inner_texts() == ["envgym", "first", "held-out tasks at step 0", "episode 0"]
        assert trail.nth(1).get_attribute("title") == "runs/first"
        assert trail.nth(2).get_attribute("href") == f"#/list/{RUN}%2Fheld_out/0"
        main = opened(page, url, f"run/{RUN}")
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        assert "step 2 inference engine and trainer differ by 0.2 nats" in main.locator(".alarms").first.inner_text()
        main.locator("h2:text-is('Steps') + .steps a").first.click()
        page.wait_for_function(LISTED, arg=["question 0?", "answer 0 0"])
        assert main.locator("a.row .completion").all_inner_texts()[4:6] == ["answer 1 0", "answer 1 1"]
        assert "16 episodes" in main.inner_text()
        main.get_by_label("Outcome").select_option("failed")
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
        assert main.locator("a.row").count() == 1  # the filters stay
        main.get_by_role("link", name="previous step").click()
        page.wait_for_selector("h1:text-is('Step 2')")
        page.wait_for_selector("a.row")
        assert main.locator("a.row").count() == 1
        main.get_by_label("Task", exact=True).fill("train-1")
        main.get_by_label("Outcome").select_option("")
        main.get_by_role("link", name="next step").click()
        page.wait_for_selector("h1:text-is('Step 3')")
        page.wait_for_selector("a.row")
        assert main.locator("a.row").count() == 4
        main.get_by_label("Task", exact=True).fill("")
        main.get_by_role("columnheader", name="surprise").click()
        first = main.locator("a.row").first
        assert first.locator("[data-of=member]").inner_text() == "3"  # the member whose tokens were least likely
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
        assert "· log-probability −0.1000 (probability 0.905) · difference 0.0100 · ratio 0.9900 · " in told
        assert told.endswith("· advantage 0.5000 · entropy 0.2500 · version 0")
        for word in (
            "role",
            "loss weight",
            "log-probability",
            "engine − trainer",
            "ratio",
            "entropy",
            "policy version",
        ):
            main.get_by_role("button", name=word, exact=True).click()
            assert tokens.count() == 5
        assert "by=version" in page.url
        page.keyboard.press("t")
        page.wait_for_selector(".talk")
        page.keyboard.press("g")
        page.wait_for_selector(".group")
        assert main.locator("article").count() == 4


def test_rewards_stand_at_the_turns_that_were_sampled(tmp_path, page):
    """A prompt may hold answers of its own (examples, a conversation before): they earned nothing here."""
    turns = [("user", "2?"), ("assistant", "example"), ("user", "3?"), ("assistant", "wrong"), ("user", "again"),
             ("assistant", "right")]  # fmt: skip
    episodes = [made(0, m, messages=[Message(role, text) for role, text in turns]) for m in range(2)]
    for episode in episodes:
        episode.rows[0].turns = [Turn(0.25, StopReason.STOP), Turn(0.75, StopReason.STOP)]
    write_episodes(tmp_path / "some.jsonl", episodes)
    heads = ["assistant", "assistantreward 0.250", "assistantreward 0.750"]
    with viewing(tmp_path, "some.jsonl") as url:
        main = opened(page, url, "episode/some.jsonl/0/0")
        assert main.locator(".turn.assistant header").all_text_contents() == heads
        main = opened(page, url, "group/some.jsonl/0/0")
        assert main.locator("article .turn.assistant header").all_text_contents() == heads * 2


@pytest.mark.parametrize("name", ["some.jsonl", "some.parquet"])
def test_branches_of_a_group_are_a_tree_with_links(tmp_path, page, name):
    episodes = [made(0, member, reward=member / 4) for member in range(5)]
    ids = [episode.id for episode in episodes]
    for member, parent, turn in ((2, 0, 1), (3, 2, 2), (4, 0, 3)):
        episodes[member].parent, episodes[member].parent_turn = ids[parent], turn
    write = write_rollouts if name.endswith("parquet") else write_episodes
    write(tmp_path / name, episodes)
    with viewing(tmp_path, name) as url:
        main = opened(page, url, f"group/{name}/0/0")
        page.wait_for_selector(".group")
        lines = main.get_by_label("Branches").locator("li").all_inner_texts()
        assert [line.splitlines()[0] for line in lines] == [
            "member 0: reward 0",
            "member 2 after turn 1: reward 0.500",
            "member 3 after turn 2: reward 0.750",
            "member 4 after turn 3: reward 1",
            "member 1: reward 0.250",
        ]
        depths = [li.evaluate("li => li.closest('nav').contains(li) && li.parentElement.closest('li') !== null")
                  for li in main.get_by_label("Branches").locator("li").all()]  # fmt: skip
        assert depths == [False, True, True, True, False]
        main.get_by_label("Branches").get_by_role("link", name="member 3").click()
        page.wait_for_selector(".facts:has-text('branch of')")
        assert f"{ids[2]} after turn 2" in page.locator(".facts").inner_text()


def test_parents_in_a_circle_are_listed_once(tmp_path, page):
    episodes = [made(0, member, reward=0.5) for member in range(4)]
    for episode, parent in zip(episodes[1:], [episodes[2].id, episodes[1].id, episodes[3].id], strict=True):
        episode.parent, episode.parent_turn = parent, 1
    write_episodes(tmp_path / "some.jsonl", episodes)
    with viewing(tmp_path, "some.jsonl") as url:
        main = opened(page, url, "group/some.jsonl/0/0")
        page.wait_for_selector(".group")
        assert main.get_by_label("Branches").locator("li").all_inner_texts() == ["member 0: reward 0.500"]
        assert main.locator("article").count() == 4


def test_a_bar_filters_and_search_finds(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"list/{RUN}/1")
        page.wait_for_selector("a.row")
        main.locator(".bars button").last.click()
        rewards = {row.locator("span").nth(1).inner_text() for row in main.locator("a.row").all()}
        assert rewards == {"1"}
        assert "low=" in page.url
        main.get_by_role("button", name="clear 0.500 to 1").click()
        assert main.locator("a.row").count() == 16
        main.get_by_label("Search in messages and tasks").fill("answer 2 3")
        page.wait_for_function("() => document.querySelectorAll('a.row').length === 1")
        main.get_by_label("Task", exact=True).fill("train-3")
        assert "none of 16 match" in main.inner_text()
        assert not main.locator(".list").is_visible()
        main.get_by_role("link", name="Clear the filters").click()
        page.wait_for_function("() => document.querySelectorAll('a.row').length === 16")


def test_a_late_answer_to_an_earlier_search_changes_nothing(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"list/{RUN}/1")
        page.wait_for_selector("a.row")
        search, held = main.get_by_label("Search in messages and tasks"), []
        page.route("**/api?q=search*answer*", lambda route: held.append(route))
        for later, rows in (("train-3", 4), ("", 16)):
            with page.expect_request("**/api?q=search*"):
                search.fill("answer 2 3")
            search.fill(later)
            page.wait_for_function("rows => document.querySelectorAll('a.row').length === rows", arg=rows)
            with page.expect_response("**/api?q=search*answer*") as answer:
                held.pop().continue_()
            answer.value.finished()
            page.wait_for_timeout(100)
            assert main.locator("a.row").count() == rows
            assert "answer" not in page.url


def test_a_bar_lists_as_many_episodes_as_it_counts(tmp_path, page):
    """Also with rewards on the edges of bars, without one, and with edges that are rounded."""
    for name, rewards, counts in (
        ("whole", [-1, -1, 0, 0, 0, 1, 3, None], [2, 3, 1, 1]),
        ("rounded", [0.1, 0.35, 0.6, 1.1], [1, 1, 1, 1]),
    ):
        write_episodes(tmp_path / f"{name}.jsonl", [made(n, 0, reward=reward) for n, reward in enumerate(rewards)])
        with viewing(tmp_path, f"{name}.jsonl") as url:
            main = opened(page, url, f"list/{name}.jsonl/0")
            page.wait_for_selector("a.row")
            bars = main.locator(".bars button")
            assert [int(bar.get_attribute("data-count") or 0) for bar in bars.all()] == counts
            for n, count in enumerate(counts):
                if count:
                    bars.nth(n).click()
                    assert main.locator("a.row").count() == count
                    opened(page, page.url.partition("#")[0], page.url.partition("#/")[2])
                    page.wait_for_function("count => document.querySelectorAll('a.row').length === count", arg=count)
            if name == "whole":
                assert page.get_by_role("button", name="clear 2 to 3").count() == 1
                bars.first.click()
                assert page.get_by_role("button", name="clear −1 to below 0").count() == 1
                opened(page, url, f"list/{name}.jsonl/0?low=-1&high=0")  # of an earlier version: with both ends
                page.wait_for_function("() => document.querySelectorAll('a.row').length === 5")
                assert page.get_by_role("button", name="clear −1 to 0").count() == 1


def test_swimlanes_are_of_the_recorded_times(tree, page):
    with viewing(tree) as url:
        main = opened(page, url, f"lanes/{RUN}/2")
        canvas = main.locator("canvas")
        assert canvas.get_attribute("aria-label") == "16 episodes over 40 seconds"
        canvas.hover(position={"x": 40, "y": 42})
        assert "step-000002-0/00000:000:0: generating for 10 s" in main.locator(".bar").inner_text()


def test_two_evaluations_are_compared_task_by_task(tree, page):
    for name, sampled in (("first", 0.0), ("second", 1.0)):  # and two runs' evaluations, in two passes
        scores = {"eval": [sampled] * 3, "eval-greedy": [0.5, 0.5]}
        episodes = [made(n, 0, reward=score) for part in scores.values() for n, score in enumerate(part)]
        for episode, part in zip(episodes, [part for part, values in scores.items() for _ in values], strict=True):
            episode.group_id = episode.group_id.replace("step-000001-0", part)
        (tree / "runs" / name / "held_out").mkdir(parents=True)
        (tree / "runs" / name / "metrics.jsonl").touch()
        write_rollouts(tree / "runs" / name / "held_out" / "step_000003.parquet", episodes)
    with viewing(tree) as url:
        main = opened(page, url, "")
        main.get_by_label("Choose runs/first").check()
        main.get_by_label("Choose runs/second").check()
        main.get_by_role("link", name="Compare").click()
        page.wait_for_selector("h1:has-text('B against A')")
        assert main.locator("h2").all_inner_texts() == ["sampled episodes", "greedy episodes"]
        facts = [facts.split("\n")[1:4:2] for facts in main.locator(".facts").all_inner_texts()]
        assert [[number.split()[0], count] for number, count in facts] == [["1", "3"], ["0", "2"]]
        assert main.locator("td.key").all_inner_texts() == [f"train-{n}" for n in (0, 1, 2, 0, 1)]
        main = opened(page, url, "")
        main.get_by_label("Choose evals/a").check()
        main.get_by_label("Choose evals/b").check()
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
    folder = RunFolder(tree / "runs" / "first")
    from envgym.disk import folder_lock

    with viewing(tree) as url, folder_lock(folder.path, "a test"):
        main = opened(page, url, f"run/{RUN}")
        assert "3 of 9" in main.inner_text()
        height = main.evaluate("one => one.scrollHeight")
        folder.append_metrics({"step": 4, "reward/mean": 0.9, "episodes": 16, "loss": 0.1})
        page.wait_for_function("() => document.querySelector('main').innerText.includes('4 of 9')", timeout=15000)
        reward = main.locator(".chart", has_text="reward")
        assert reward.locator("canvas").get_attribute("aria-label") == "reward/mean over steps 1 to 4, last 0.900"
        assert reward.locator(".now").inner_text() == "0.900"
        assert main.evaluate("one => one.scrollHeight") == height, "nothing jumps"


def test_late_answers_about_a_live_run_are_counted_once(tree, page):
    folder = RunFolder(tree / "runs" / "first")
    from envgym.disk import folder_lock

    def hold(question, number):
        held = []
        page.route(f"**/api?q={question}%7C*", lambda route: held.append(route), times=number)
        while len(held) < number:
            page.wait_for_timeout(20)
        return held

    with viewing(tree) as url:
        with folder_lock(folder.path, "a test"):
            main = opened(page, url, f"run/{RUN}")
            page.wait_for_selector(".charts .chart:not([hidden]) canvas")
            assert "rollout 75%, 90 s" in main.inner_text()
            folder.append_metrics({"step": 4, "seconds/rollout": 30.0})
            for route in hold("metrics", 2):
                route.continue_()
            page.wait_for_function("() => document.querySelector('main').innerText.includes('4 of 9')", timeout=15000)
            folder.append_metrics({"step": 5, "seconds/rollout": 30.0})
            page.wait_for_function("() => document.querySelector('main').innerText.includes('5 of 9')", timeout=15000)
            assert "rollout 83%, 150 s" in main.inner_text()
            [route] = hold("run", 1)
            folder.append_metrics({"step": 6, "seconds/rollout": 30.0})  # the last, between the page's two questions
            folder.summary_file.write_text(json.dumps({"status": "completed"}))
        route.continue_()
        page.wait_for_selector("h1 .state:text-is('completed')", timeout=15000)
        assert "6 of 9" in main.inner_text()


def test_ticks_are_few_round_and_told_apart(tree, page):
    """Whatever the range: two ticks or more, in it, each with a word of its own that fits beside the axis."""
    with viewing(tree) as url:
        page.goto(url)
        axes = page.evaluate("""async () => {
            const { ticks, label } = await import("/page/plot.js"), found = [];
            for (const size of [1e-9, 3e-5, 0.007, 0.11, 0.5, 0.99, 1, 1.7, 9, 44, 1e3, 12345, 7e5, 3e7, 1e12])
                for (const low of [0, -size / 3, size, 10 * size, -1000 * size]) for (const most of [2, 3, 4, 6]) {
                    const [at, step] = ticks(low, low + size, most);
                    found.push([low, low + size, most, step, at, at.map((tick) => label(tick, step))]);
                }
            return found;
        }""")
        assert page.evaluate("() => import('/page/plot.js').then(({ ticks }) => ticks(39, 41, 6, 1))") == [
            [39, 40, 41],
            1,
        ]
    assert len(axes) == 300
    for low, high, most, step, at, words in axes:
        told = (low, high, step, at, words)
        assert 2 <= len(at) <= 2 * most + 1, told
        assert low - step * 1e-6 <= at[0] <= at[-1] <= high + step * 1e-6, told
        assert f"{step:e}"[0] in "125", told
        assert len(set(words)) == len(words), told
        assert max(map(len, words)) <= 10, told
        for tick, word in zip(at, words, strict=True):
            value = float(word.replace("−", "-").replace("k", "e3"))
            assert value == pytest.approx(tick, abs=step / 100), told


def inks(plot):
    """How many pixels a drawing has of each colour of the page that it is drawn with."""
    return plot.evaluate("""(box) => {
        const canvas = box.querySelector("canvas"), style = getComputedStyle(document.documentElement);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = {};
        for (const name of ["--line-1", "--rule", "--quiet"]) {
            const [r, g, b] = style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/g).map((two) => parseInt(two, 16));
            let count = 0;
            for (let n = 0; n < pixels.length; n += 4) {
                const far = Math.abs(pixels[n] - r) + Math.abs(pixels[n + 1] - g) + Math.abs(pixels[n + 2] - b);
                if (far < 12 && pixels[n + 3] > 200) count++;
            }
            found[name] = count;
        }
        return { ...found, width: canvas.width };
    }""")


DRAWN = """() => [...document.querySelectorAll(".chart:not([hidden]) canvas")].every(
    (one) => one.height === one.clientHeight && one.width === one.clientWidth)"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_curves_are_drawn_and_told_under_the_pointer(tree, browser, scheme, width):
    make_curves(tree / "runs" / "first", 40)
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    with viewing(tree) as url:
        main = opened(page, url, f"run/{RUN}")
        page.wait_for_function(DRAWN)
        titles = main.locator(".chart:not([hidden]) figcaption > span:first-child").all_inner_texts()
        assert titles == ["held-out score", "reward", "loss"]
        for n, plot in enumerate(main.locator(".chart:not([hidden]) .plot").all()):
            found = inks(plot)
            assert found["--line-1"] > (40 if n else 8)  # the first has a single point
            assert found["--rule"] > 500
            assert found["width"] == round(plot.bounding_box()["width"])
        reward = main.locator(".chart:not([hidden])").nth(1)
        assert reward.locator(".now").inner_text() == "0.975"
        canvas = reward.locator("canvas")
        assert canvas.get_attribute("aria-label") == "reward/mean over steps 1 to 40, last 0.975"
        box = canvas.bounding_box()
        canvas.hover(position={"x": box["width"] - 12, "y": 60})
        assert reward.locator(".now").inner_text() == "step 40 0.975 [0.953, 0.997]"  # 0.975 ± 1.96 · 0.25 / √512
        canvas.hover(position={"x": 1, "y": 60})
        assert reward.locator(".now").inner_text().startswith("step 1 0.024 [")
        assert reward.locator(".mark").is_visible()
        page.mouse.move(5, 5)
        assert reward.locator(".now").inner_text() == "0.975"
        assert not reward.locator(".mark").is_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), (
            "nothing is wider than the page"
        )
        before = inks(reward.locator(".plot"))["width"]
        page.set_viewport_size({"width": width - 60, "height": 800})
        page.wait_for_function(f"() => document.querySelectorAll('.chart:not([hidden]) canvas')[1].width !== {before}")
        assert inks(reward.locator(".plot"))["--line-1"] > 40
    page.close()


def make_curves(run, steps):
    records = [{"step": 0, "eval/score": 0.25, "eval/ci95": [0.2, 0.3]}]
    for step in range(1, steps + 1):
        reward = 0.975 * step / steps
        records.append(
            {"step": step, "reward/mean": reward, "reward/std": 0.25, "episodes": 512, "loss": (-1) ** step * 1e-8}
        )
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_thousands_of_steps_are_a_mean_within_their_range(tree, page):
    make_curves(tree / "runs" / "first", 5000)
    with viewing(tree) as url:
        main = opened(page, url, f"run/{RUN}")
        page.wait_for_function(DRAWN)
        loss = main.locator(".chart:not([hidden])").nth(2)
        assert inks(loss.locator(".plot"))["--line-1"] < 3000  # between -1e-8 and 1e-8 all else is light
        filled = loss.locator("canvas").evaluate("""(canvas) => {
            const pen = canvas.getContext("2d"), x = Math.round(canvas.width / 2);
            const column = pen.getImageData(x, 12, 1, canvas.height - 34).data;
            return column.filter((one, n) => n % 4 === 3 && one > 60).length;
        }""")
        assert filled > 80  # of 106 rows
        loss.locator("canvas").hover(position={"x": 240, "y": 40})
        assert "e−8" in loss.locator(".now").inner_text()


def test_an_export_opens_from_the_disk_and_asks_for_nothing(tree, page, monkeypatch):
    from envgym.cli import main as command

    monkeypatch.chdir(tree)
    assert command(["export", "first", "--episodes", "5"]) == 0
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tree}/first.html")
    page.wait_for_selector(".charts .chart:not([hidden]) canvas")
    page.wait_for_function(DRAWN)
    sloping = page.locator(".chart:not([hidden])", has_not_text="mismatch").locator(".plot").all()
    assert all(inks(plot)["--line-1"] > 40 for plot in sloping)
    loss = page.locator(".chart:not([hidden])", has_text="loss")
    loss.locator("canvas").hover(position={"x": 260, "y": 40})
    assert loss.locator(".now").inner_text().startswith("step 3 0.333")
    page.locator("a.step").first.click()
    page.wait_for_selector("a.row")
    assert page.locator("a.row").count() == 16
    page.wait_for_function(LISTED, arg=["question 0?", "answer 0 0"])  # of five episodes that are in the file
    assert page.locator("a.row .question").all_inner_texts().count("") == 16 - 2
    page.get_by_label("Outcome").select_option("failed")
    page.locator("a.row").first.click()
    page.wait_for_selector(".talk")
    assert "took too long" in page.locator("main").inner_text()
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert (tree / "first.html").stat().st_size < 2**20


def test_an_exported_list_says_of_how_many_it_is(tmp_path, page, monkeypatch):
    from envgym.cli import main as command

    monkeypatch.chdir(tmp_path)
    write_episodes(tmp_path / "many.jsonl", [made(n, 0, reward=float(n % 2)) for n in range(2001)])
    assert command(["export", "many.jsonl", "--episodes", "0"]) == 0
    page.goto(f"file://{tmp_path}/many.html#/list/many.jsonl/0")
    page.wait_for_selector("a.row")
    count = page.locator(".tools .hint")
    assert count.inner_text() == "2,000 episodes (the first 2,000 of 2,001)"
    page.get_by_label("Outcome").select_option("wrong")
    assert count.inner_text() == "1,000 of 2,000 episodes (the first 2,000 of 2,001)"


def test_a_hostile_episode_is_text_and_breaks_nothing(tmp_path, page):
    bad = "<script>window.owned=1</script><img src=x onerror=window.owned=2>\x1b[31mred\u202egnp.exe\ud800"
    turns = [Message(role, f"turn {n} {bad}") for n in range(500) for role in ("user", "assistant")]
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


def test_a_view_begins_at_its_top_in_the_systems_theme_until_another_is_chosen(tree, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 400}, color_scheme="dark")
    theme = "() => document.documentElement.dataset.theme"
    with viewing(tree) as url:
        main = opened(page, url, f"run/{RUN}")
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        page.evaluate("() => scrollTo(0, document.body.scrollHeight)")
        main.locator("h2:text-is('Steps') + .steps a").first.click()
        page.wait_for_selector("a.row")
        assert page.evaluate("() => scrollY") == 0
        page.go_back()
        page.wait_for_selector(".charts .chart:not([hidden]) canvas")
        page.wait_for_function("() => scrollY > 0")
        assert page.evaluate(theme) == "dark"
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"() => ({theme})() === 'light'")
        page.get_by_role("button", name="Light or dark theme").click()
        assert page.evaluate(theme) == "dark"
        page.reload()
        page.wait_for_selector("main h1")
        assert page.evaluate(theme) == "dark"
    page.close()


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
        page.wait_for_function(
            "() => [...document.querySelectorAll('a.row .completion')].at(-1).innerText === 'answer 1499 3'"
        )
        assert main.locator("a.row").count() < 80


VIEWS = ["", f"run/{RUN}", f"list/{RUN}/1", f"episode/{RUN}/1/0", f"episode/{RUN}/1/0?as=tokens&by=advantage",
         f"group/{RUN}/1/0", f"lanes/{RUN}/1", "compare/evals%2Fa/0/evals%2Fb/0",
         f"overlay/{RUN}/{RUN}"]  # fmt: skip


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
    assert sum(path.stat().st_size for path in files) < 120_000
    assert json.dumps([path.name for path in files]).count(".js") == 12
