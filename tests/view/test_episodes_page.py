"""Episodes in a real browser: found by what they say, next to their group, and over the steps of a run."""

import sys
from pathlib import Path

import pytest

from envgym.cli import main as command
from envgym.episodes.files import write_episodes
from envgym.episodes.record import write_rollouts
from envgym.view.server import Answers

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, make_run, viewing


def graded(number, member, answer, reward, *, step=1, group=None):
    episode = made(number, member, f"So it is {answer}.", step=step, reward=reward)
    episode.answer = answer
    if group is not None:
        episode.group_id = group
    return episode


@pytest.fixture
def run(tmp_path):
    """A step with an episode whose answer is right and graded wrong, and two evaluations of the same tasks."""
    folder = make_run(tmp_path / "runs" / "first", steps=1, tokenizer=None)
    episodes = [graded(n, m, str(n + m), 1.0 if m == 0 else 0.0) for n in range(30) for m in range(2)]
    episodes[34].reward = episodes[34].score = 0.0  # its answer, 17, is what was wanted
    episodes[40] = graded(20, 0, "x", 1.0)
    episodes[40].answer = "X"
    write_rollouts(folder.rollout_file(1), episodes)
    folder.held_out.mkdir()
    for step, answer in ((0, "no idea"), (1, "3")):
        evaluated = [graded(n, 0, answer, float(answer == "3"), group=f"eval/{n:05d}") for n in (2, 3)]
        greedy = [graded(3, 0, "greedy", 0.0, group="eval-greedy/00000")]
        write_rollouts(folder.held_out_file(step), greedy * step + evaluated)
    return folder


def opened(page, url, view):
    page.goto("about:blank")
    page.goto(f"{url}#/{view}")
    page.wait_for_selector("main h1")
    return page.locator("main")


def first_row(page, *texts):
    page.wait_for_function(
        "texts => JSON.stringify([...(document.querySelector('a.row')?.querySelectorAll('.line') || [])]"
        ".map((one) => one.innerText)) === JSON.stringify(texts)",
        arg=list(texts),
    )


def test_a_row_says_what_was_asked_wanted_and_answered_and_the_misgraded_one_is_found(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url, "list/runs%2Ffirst/1")
        first_row(page, "question 0?", "wanted 0", "answered 0", "So it is 0.")
        row = main.locator("a.row").first
        assert [row.locator(f"[data-of={name}]").inner_text() for name in ("reward", "tokens", "turns", "status")] == [
            "1",
            "3",
            "1",
            "completed",
        ]
        main.get_by_label("Outcome").select_option("wrong")
        assert "31 of 60 episodes" in main.inner_text()
        main.get_by_label("Outcome").select_option("as wanted, and graded wrong")
        page.wait_for_function("() => document.querySelectorAll('a.row').length === 1")
        first_row(page, "question 17?", "wanted 17", "answered 17", "So it is 17.")
        page.reload()
        page.wait_for_function("() => document.querySelectorAll('a.row').length === 1")
        main.get_by_label("Outcome").select_option("answer not in the completion")
        first_row(page, "question 20?", "wanted 20", "answered X, not in the completion", "So it is x.")
        assert main.locator("a.row").count() == 1
        main.get_by_label("Outcome").select_option("")
        main.get_by_label("Task", exact=True).fill("train-2")
        assert main.locator("a.row").count() == 22  # 2, and 20 to 29
        assert "task=train-2" in page.url


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_misgraded_are_those_answered_as_wanted_below_the_full_score(tmp_path, suffix):
    right, wrong, other, unscored = (graded(n, 0, str(n), reward) for n, reward in enumerate((1.0, 0.5, 0.0, None)))
    other.answer = "9"
    write_episodes(path := tmp_path / f"some.{suffix}", [right, wrong, other, unscored])
    answers = Answers([path])
    [name] = answers.sources
    assert answers(f"misgraded|{name}|0") == [1]
    assert answers(f"unstated|{name}|0") == [2]


def test_the_histogram_has_an_axis_and_counts(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url, "list/runs%2Ffirst/1")
        assert main.locator(".histogram .axis span").all_inner_texts() == ["0", "0.500", "1"]
        counts = main.locator(".bars button").evaluate_all(
            "all => all.map((one) => getComputedStyle(one, '::before').content)"
        )
        assert counts == ['"31"', '"29"']
        bars, axis = (main.locator(f".histogram .{name}").bounding_box() for name in ("bars", "axis"))
        assert (bars["x"], bars["width"]) == (axis["x"], axis["width"])


def test_lanes_have_an_axis_of_seconds(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url, "lanes/runs%2Ffirst/1")
        inked = main.locator("canvas").evaluate("""(canvas) => {
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, 14).data;
            return pixels.filter((alpha, n) => n % 4 === 3 && alpha > 60).length;
        }""")
        assert inked > 300  # the ticks alone are 14 pixels each
        main = opened(page, url, "episode/runs%2Ffirst/1/0")
        page.wait_for_selector(".strip")
        assert (
            main.locator(".timeline .legend").inner_text().split("\n")
            == ["waiting 1 s", "generating 10 s", "environment 1 s"][1:]
        )


def test_episodes_are_walked_by_buttons_and_say_how_to_run_them_again(run, tmp_path, page, monkeypatch, capsys):
    with viewing(tmp_path) as url:
        main = opened(page, url, "list/runs%2Ffirst/1?status=wrong")
        main.locator("a.row").first.click()
        page.wait_for_selector(".talk")
        assert main.get_by_role("button", name="‹ previous").is_disabled()
        assert "1 of 31" in main.inner_text()
        main.get_by_role("button", name="next ›").click()
        page.wait_for_function("() => document.title.startsWith('episode 3 ')")
        main.get_by_role("button", name="‹ previous").click()
        page.wait_for_function("() => document.title.startsWith('episode 1 ')")
        page.wait_for_selector("code")
        commands = main.locator("code").all_inner_texts()
        assert commands == [
            "envgym show runs/first --step 1 --task train-0",
            "envgym replay runs/first --step 1 --episode step-000001-0/00000:001:0",
            "envgym rollout --config runs/first/config.yaml --model runs/first --task train-0 --out again.jsonl",
        ]
        opened(page, url, "episode/runs%2Ffirst%2Fheld_out/1/2")
        page.wait_for_selector("code")
        assert main.locator("code").all_inner_texts() == [
            "envgym show runs/first --step 1 --task train-3 --eval",
            "envgym rollout --config runs/first/config.yaml --model runs/first --task train-3 --split test "
            "--out again.jsonl",
        ]
    monkeypatch.chdir(tmp_path)
    for words in (commands[0], "envgym show runs/first --step 1 --task train-3 --eval"):
        assert command(words.split()[1:]) == 0
        assert "So it is" in capsys.readouterr().out


def test_a_groups_members_show_what_differs_and_their_advantages(tmp_path, page):
    make_run(tmp_path / "runs" / "first", steps=1)
    with viewing(tmp_path) as url:
        main = opened(page, url, "group/runs%2Ffirst/1/4")
        headers = main.locator("article > header").all_inner_texts()
        shown = [header.split("\n")[2] for header in headers]  # of 0.5, 0.5 and -1, -1.25, -1.5, -1.75
        assert shown == ["advantage 0", "advantage −0.083", "advantage −0.167", "advantage −0.250"]
        assert [one.inner_text() for one in main.locator("article mark").all()] == ["0", "1", "2", "3"]
        assert main.locator("article .hint").first.inner_text() == "answer 1 "
        members = [made(0, m, text, reward=0.0) for m, text in enumerate(("five 5", "five 6", "five 6", "none"))]
        write_episodes(tmp_path / "runs" / "some.jsonl", members)
        main = opened(page, url, "group/runs%2Fsome.jsonl/0/0")
        marks = [text.locator("mark").all_inner_texts() for text in main.locator("article .text").all()]
        assert marks == [["5"], [], [], ["none"]]  # against the member that is most alike


def test_what_the_policy_said_to_a_held_out_task_before_and_after(run, tmp_path, page):
    with viewing(tmp_path) as url:
        main = opened(page, url, "episode/runs%2Ffirst%2Fheld_out/1/2")
        main.get_by_role("link", name="This task over the run").click()
        page.wait_for_selector("article")
        assert main.locator("article .turn .text").all_inner_texts() == ["So it is no idea.", "So it is 3."]
        assert main.locator("article header a").all_inner_texts() == ["step 0", "step 1"]
        rows = [row.locator("td").all_inner_texts() for row in main.locator("tbody tr").all()]
        assert [row[:4] for row in rows] == [
            ["step 0", "0", "0", "no idea"],
            ["step 1", "1", "1", "3"],
        ]  # without greedy
        main.get_by_role("link", name="see greedy").click()
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
        assert "pass greedy (see sampled) · wanted 3" in main.inner_text()
        main.get_by_role("link", name="step 1").first.click()
        page.wait_for_selector(".fact:has-text('greedy')")
        assert "pass\ngreedy" in main.locator(".facts").inner_text()
        opened(page, url, "list/runs%2Ffirst%2Fheld_out/1")
        assert main.locator("a.row [data-of=key]").all_inner_texts() == [
            "greedy · train-3",
            "sampled · train-2",
            "sampled · train-3",
        ]
        main.get_by_label("Pass").select_option("greedy")
        assert main.locator("a.row").count() == 1
        assert "pass=greedy" in page.url


FIRST = "runs%2Ffirst"
VIEWS = [f"list/{FIRST}/1", f"episode/{FIRST}/1/0", f"group/{FIRST}/1/0", f"task/{FIRST}%2Fheld_out/1/1",
         f"lanes/{FIRST}/1"]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_overlaps_or_is_wider_than_a_phone(run, tmp_path, browser, view):
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": 390, "height": 800})
    with viewing(tmp_path) as url:
        opened(page, url, view)
        if view.startswith("list"):
            first_row(page, "question 0?", "wanted 0", "answered 0", "So it is 0.")
        page.wait_for_timeout(400)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        wide = (
            "all => all.map((one) => one.getBoundingClientRect()).filter((box) => box.width && box.right > innerWidth)"
        )
        assert (
            page.locator(".tools > *, .fact, article, .histogram, a.row > span, .legend span").evaluate_all(wide) == []
        )
        overlaps = page.locator("a.row").evaluate_all("""rows => rows.slice(0, 3).flatMap((row) => {
            const all = [...row.children].map((one) => one.getBoundingClientRect());
            const boxes = all.filter((box) => box.width && box.height);
            const bottom = row.getBoundingClientRect().bottom + 1;
            return boxes.filter((a, n) => a.bottom > bottom || boxes.slice(n + 1).some((b) =>
                a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3));
        })""")
        assert overlaps == []
        problems = Axe().run(page).response["violations"]
        assert [one["id"] for one in problems if one["impact"] in ("serious", "critical")] == []
    page.close()
