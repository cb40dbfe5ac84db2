"""Cost of `envgym view`: the page with many episodes, and a training run that is viewed.

    .venv/bin/python benchmarks/view.py

100,000 episodes with log-normal lengths (median 500 tokens, 99th percentile 8 thousand) in one file; measured in a
headless browser: the first rows of the list, an episode with its tokens, and the longest frame while the list is
scrolled; 40 curves of 5,000 steps, drawn and drawn again with one more; the server's memory after a list and after 200
episodes. Also the seconds per step of the main job with and without a client that follows it, alternating, five times
each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

from envgym.episodes import parquet
from envgym.types import (
    Episode,
    Message,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    Turn,
    float_array,
    int_array,
)  # fmt: skip

ENVGYM = Path(sys.executable).with_name("envgym")
MEDIAN, P99 = 500, 8000
CURVES = """async () => {
    const { chart } = await import("/page/charts.js"), records = [], names = [...Array(40).keys()].map((n) => `m${n}`);
    for (let step = 0; step < 5000; step++) {
        const record = { step };
        names.forEach((name, n) => {
            record[name] = Math.sin(step / 300 + n) + Math.random();
            record[name + "low"] = record[name] - 0.3;
            record[name + "high"] = record[name] + 0.3;
        });
        records.push(record);
    }
    const frame = () => new Promise(requestAnimationFrame);
    const painted = async () => { await frame(); await frame(); await new Promise((done) => setTimeout(done)); };
    await painted();
    const began = performance.now();
    const line = (name, n) => (n % 4 ? { name } : { name, low: `${name}low`, high: `${name}high` });
    const charts = names.map((name, n) => chart(name, [line(name, n)]));
    const box = document.createElement("div");
    box.className = "charts";
    box.append(...charts.map((one) => one.element));
    document.getElementById("main").replaceChildren(box);
    charts.forEach((one) => one.set(records));
    await painted();
    const first = performance.now();
    records.push({ ...records.at(-1), step: 5000 });
    charts.forEach((one) => one.set(records));
    await painted();
    return [first - began, performance.now() - first];
}"""
"""Milliseconds from data to the screen, the first time and with one more step."""


def episodes(count: int) -> Iterator[Episode]:
    """Episodes whose lengths are log-normal; texts and numbers repeat, which only compression notices."""
    draw, sigma = random.Random(0), math.log(P99 / MEDIAN) / 2.326
    ids = int_array([draw.randrange(150_000) for _ in range(40_000)])
    logprobs = float_array([-draw.expovariate(3.0) for _ in range(40_000)])
    for number in range(count):
        length = min(32_000, max(4, int(draw.lognormvariate(math.log(MEDIAN), sigma))))
        at = draw.randrange(len(ids) - length)
        segment = Segment("action", ids[at : at + length], logprobs=logprobs[at : at + length], temperature=1.0)
        row = Row([Segment("prompt", ids[:40]), segment], turns=[Turn(draw.random(), StopReason.STOP)])
        group, member = divmod(number, 8)
        name, task = f"step-000001-0/{group:05d}", Task(f"task-{group}", "ask")
        episode = Episode(f"{name}:{member:03d}:0", task, Outcome.finish(), [row], group_id=name)
        episode.member, episode.reward, episode.score = member, row.turns[0].reward, row.turns[0].reward
        episode.messages = [Message("user", "ask"), Message("assistant", "word " * min(length, 400))]
        yield episode


def write(path: Path, count: int) -> None:
    """Write the file of `write_rollouts`, a few episodes at a time: all of them do not fit into memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, drawn = parquet._schema(pa), episodes(count)
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        while some := list(itertools.islice(drawn, parquet.ROW_GROUP_SIZE * 4)):
            table = pa.Table.from_pylist([parquet._columns(episode, {}) for episode in some], schema)
            file.write_table(table, row_group_size=parquet.ROW_GROUP_SIZE)


def resident(process: subprocess.Popen[str]) -> float:
    """MiB of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def served(folder: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    command = [str(ENVGYM), "view", "--port", "0", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[0]


def look(folder: Path, count: int) -> dict[str, float]:
    """Seconds and MiB of viewing a file of `count` episodes."""
    from playwright.sync_api import sync_playwright

    write(folder / "many.parquet", count)
    size = (folder / "many.parquet").stat().st_size
    server, url = served(folder, "many.parquet")
    figures: dict[str, float] = {"episodes": count, "file_mib": size / 2**20, "server_start_mib": resident(server)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector("main h1")
        for what in ("first", "again"):  # the server reads the columns once
            page.goto("about:blank")
            began = time.monotonic()
            page.goto(f"{url}#/list/many.parquet/0")
            page.wait_for_selector("a.row")
            figures[f"list_{what}_paint_s"] = time.monotonic() - began
        page.wait_for_function(
            f"() => document.querySelector('.hint').innerText.startsWith('{count:,}')", timeout=120_000
        )
        figures["list_whole_s"] = time.monotonic() - began
        page.wait_for_timeout(1000)
        figures["longest_frame_ms"] = page.evaluate(
            """async () => {
                const list = document.querySelector('.list'); let longest = 0, last = performance.now();
                for (let n = 0; n < 240; n++) {
                    list.scrollTop = n * 977; await new Promise(requestAnimationFrame);
                    const now = performance.now(); longest = Math.max(longest, now - last); last = now;
                }
                return longest;
            }"""
        )
        figures["server_list_mib"] = resident(server)
        times = []
        for number in range(0, count, max(1, count // 200)):
            began = time.monotonic()
            with urllib.request.urlopen(f"{url}api?q=episode%7Cmany.parquet%7C0%7C{number}") as answer:
                answer.read()
            times.append(time.monotonic() - began)
        figures |= {"episode_answer_median_s": statistics.median(times), "episode_answer_max_s": max(times)}
        began = time.monotonic()
        page.goto(f"{url}#/episode/many.parquet/0/{count // 2}?as=tokens&by=logprob")
        page.wait_for_selector(".tokens span")
        figures["episode_paint_s"] = time.monotonic() - began
        figures["server_episodes_mib"] = resident(server)
        drawn: list[list[float]] = [page.evaluate(CURVES) for _ in range(11)]
        figures |= {"curves_ms": statistics.median(first for first, _ in drawn)}
        figures |= {"curves_again_ms": statistics.median(again for _, again in drawn)}
        browser.close()
    server.terminate()
    server.wait()
    return figures


def train(folder: Path, name: str, *, followed: bool) -> float:
    """Median seconds per step of the main job, with or without a client that polls twice per second."""
    words = ["train", "--env", "math_verify", "--name", name, "steps=40", "eval.every=0", "checkpoint.every=0"]
    (folder / "runs").mkdir(exist_ok=True)
    server, url = served(folder, "runs") if followed else (None, "")  # its start is not what is measured
    run = subprocess.Popen([str(ENVGYM), *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    offset = 0
    while run.poll() is None:
        if server is not None and (folder / "runs" / name / "metrics.jsonl").exists():
            with urllib.request.urlopen(f"{url}api?q=metrics%7Cruns/{name}%7C{offset}") as answer:
                offset = json.load(answer)["offset"]
        time.sleep(0.5)
    if server is not None:
        server.terminate()
        server.wait()
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["seconds/step"] for record in records[4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        figures = look(folder, options.episodes)
        ratios = []
        for pair in range(options.pairs):
            order = (True, False) if pair % 2 else (False, True)
            seconds = {followed: train(folder, f"{pair}-{followed}", followed=followed) for followed in order}
            ratios.append(seconds[True] / seconds[False])
    if ratios:
        figures["followed_step_ratio"] = statistics.median(ratios)
        figures |= {"followed_step_ratio_low": min(ratios), "followed_step_ratio_high": max(ratios)}
    for name, value in figures.items():
        print(f"{name:26} {value:,.3f}")
    where = conditions(["aiohttp", "pyarrow", "playwright"])
    store("view", {"conditions": where, **figures})
    report(figures, where)


def report(figures: dict[str, float], where: dict[str, Any]) -> None:
    """Write the figures into the page of the docs."""
    rows = [
        (name.replace("_", " "), f"{value:,.3f}" if value < 100 else f"{value:,.0f}") for name, value in figures.items()
    ]
    text = (
        f"    .venv/bin/python benchmarks/view.py\n\n{table(['figure', 'value'], rows)}\n\n{conditions_in_words(where)}"
    )
    fill_docs("view", text, ROOT / "docs" / "training" / "viewer.md")


if __name__ == "__main__":
    main()
