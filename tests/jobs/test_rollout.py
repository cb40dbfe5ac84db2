"""Rollouts into a file: which tasks, what is kept, and what a kill, Ctrl-C or other settings do to them."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from envgym import registry
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.env import EnvSpec, SeededTasks, TaskList
from envgym.episodes.files import Journal, read_episodes
from envgym.errors import ConfigError, DataError, RunError
from envgym.hashing import task_hash
from envgym.jobs.folder import UnfinishedFile
from envgym.jobs.parts import DEFAULT_TASKS, part_of_rollout
from envgym.jobs.rollout import best_of
from envgym.types import Episode, Outcome, Task

ENVGYM = Path(sys.executable).with_name("envgym")

SLOW = '''
import asyncio
import envgym


class Slow(envgym.Env):
    """Takes its time, writes down every reset, and pays the share of lower-case letters."""

    async def reset(self, *, seed=None, options=None):
        with open("resets.txt", "a") as file:
            file.write(options["task"].id + "\\n")
        return [{"role": "user", "content": f"Say something about {self.rng.randint(1, 99)}."}], {}

    async def step(self, action):
        await asyncio.sleep(0.2)
        share = sum("a" <= letter <= "z" for letter in action.text) / max(1, len(action.text))
        return None, share, True, False, {}
'''

TASKS, SAMPLES = 12, 3
QUICK = ["engine.kind=transformers", "rollout.max_tokens=4", "rollout.concurrency=3"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def words(model, *others, out="out.jsonl", samples=("--samples", SAMPLES)):
    options = ["rollout", "--env", "slow.py", "--model", model, "--tasks", f"0:{TASKS}", *samples, "--out", out]
    return [ENVGYM, *map(str, [*options, *QUICK, *others])]


def run(folder, command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def stopped(folder, command, how, after):
    """Start a command and send it a signal when so many episodes have ended."""
    journal = folder / "out.jsonl.unfinished" / "episodes.jsonl"
    program = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not journal.exists() or journal.read_bytes().count(b"\n") < after:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program.send_signal(how)
    _, stderr = program.communicate(timeout=60)
    return program.returncode, stderr


# -- a rollout that is stopped ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_rollout_that_is_stopped_goes_on_with_nothing_repeated_and_nothing_lost(folder, tiny_model, how):
    status, stderr = stopped(folder, words(tiny_model), how, after=10)
    journal = Journal(folder / "out.jsonl.unfinished" / "episodes.jsonl")
    before = journal.originals()
    assert 10 <= len(before) < TASKS * SAMPLES
    assert not (folder / "out.jsonl").exists()
    if how == signal.SIGINT:
        assert status == 130
        [line] = stderr.splitlines()
        assert line == (
            f"envgym: interrupted: {len(before)} episodes are saved in out.jsonl.unfinished; the same command resumes "
            "from there"
        )
    done = run(folder, words(tiny_model))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(before)} saved episodes are reused" in done.stdout
    episodes = read_episodes(folder / "out.jsonl")
    # Every place once, in order; what had ended is there as it was.
    places = [(f"rollout-train-00000/{task:05d}", member) for task in range(TASKS) for member in range(SAMPLES)]
    assert [(each.group_id, each.member) for each in episodes] == places
    after = {(each.group_id, each.member): each for each in episodes}
    assert all(after[place] == old for place, old in before.items())
    # Played again was at most what was in play.
    resets = Counter((folder / "resets.txt").read_text().split())
    assert len(resets) == TASKS
    assert TASKS * SAMPLES <= resets.total() <= TASKS * SAMPLES + 3
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"out.jsonl", "resets.txt", "slow.py"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_settings_are_refused_and_named(folder, tiny_model):
    stopped(folder, words(tiny_model), signal.SIGKILL, after=3)
    kept = (folder / "out.jsonl.unfinished" / "episodes.jsonl").read_bytes()
    other = ["rollout.temperature=0.5", "seed=3"]
    refused = run(folder, words(tiny_model, *other, samples=("--best-of", 4)))
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    for said in ("temperature was 1.0 and is 0.5", "seed was 0 and is 3", "samples was 3 and is 4", "--overwrite"):
        assert said in line
    (folder / "slow.py").write_text(SLOW.replace("lower-case", "small"))  # the environment's code is a setting, too
    changed = run(folder, words(tiny_model))
    assert changed.returncode == 2
    assert re.search("before the code or the settings of environment .*slow.py changed", changed.stderr)
    assert (folder / "out.jsonl.unfinished" / "episodes.jsonl").read_bytes() == kept
    anew = run(folder, words(tiny_model, "--overwrite", *other, samples=("--best-of", 4)))
    assert (anew.returncode, anew.stderr) == (0, "")
    assert "episodes are reused" not in anew.stdout
    # --best-of keeps one of each group, and --overwrite is needed to replace a file.
    assert len(read_episodes(folder / "out.jsonl")) == TASKS
    finished = run(folder, words(tiny_model))
    assert finished.returncode == 2
    assert "out.jsonl exists" in finished.stderr


def test_two_at_once_are_refused(folder, tiny_model):
    program = subprocess.Popen(words(tiny_model), cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "out.jsonl.unfinished" / "config.yaml").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = run(folder, words(tiny_model))
    finally:
        program.kill()
        program.wait()
    assert second.returncode == 2
    assert "another envgym is writing to out.jsonl.unfinished" in second.stderr


def unfinished(folder, *, overwrite=False, **settings):
    part = part_of_rollout(resolve({"env": "math_verify", **settings}))
    work = UnfinishedFile(folder / "out.jsonl", part, overwrite=overwrite)
    with work.open():
        work.check_model(str(folder / "model"))
    return work


def test_what_is_kept_goes_on_only_from_the_same_settings_and_weights(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert unfinished(tmp_path).saved == {}
    assert unfinished(tmp_path, seed=9).saved == {}  # nothing is kept yet that could differ
    unfinished(tmp_path).write(member(0, 1.0))
    assert [each.score for each in unfinished(tmp_path).saved.values()] == [1.0]
    with pytest.raises(RunError, match=r"rollout.temperature was 1.0 and is 0.5; seed was 0 and is 1\)"):
        unfinished(tmp_path, rollout={"temperature": 0.5}, seed=1)
    # Settings on which episodes do not depend may change.
    assert len(unfinished(tmp_path, rollout={"concurrency": 2}, eval={"tasks": 3}).saved) == 1
    (tmp_path / "model" / "config.json").write_text("{ }")
    with pytest.raises(RunError, match="before the model's weights changed"):
        unfinished(tmp_path)
    assert len(unfinished(tmp_path, overwrite=True).journal.originals()) == 0
    assert unfinished(tmp_path).saved == {}


@pytest.mark.parametrize("content", [None, b"", b"{", b"- 1", b"\xff"])
@pytest.mark.parametrize("name", ["config.yaml", "episodes.jsonl"])
def test_what_is_kept_and_damaged_is_told_and_begins_anew_when_told(tmp_path, name, content):
    (tmp_path / "model").mkdir()
    unfinished(tmp_path).write(member(0, 1.0))
    file = tmp_path / "out.jsonl.unfinished" / name
    if content is None:
        file.unlink()
    elif name == "episodes.jsonl":
        file.write_bytes(content + b"\n" + file.read_bytes())
    else:
        file.write_bytes(content)
    if name == "episodes.jsonl" and content is None:
        assert unfinished(tmp_path).saved == {}  # nothing is there that could differ
        return
    with pytest.raises(RunError, match=f"(?s)out.jsonl.unfinished holds episodes that .*{name}.*--overwrite"):
        unfinished(tmp_path)
    assert unfinished(tmp_path, overwrite=True).saved == {}
    unfinished(tmp_path).write(member(0, 0.5))
    assert [each.score for each in unfinished(tmp_path).saved.values()] == [0.5]


def test_what_an_earlier_version_kept_is_refused_in_a_line(tmp_path):
    """It wrote other settings, in a file of another name."""
    (tmp_path / "model").mkdir()
    unfinished(tmp_path).write(member(0, 1.0))
    work = tmp_path / "out.jsonl.unfinished"
    (work / "config.yaml").unlink()
    (work / "settings.yaml").write_text("temperature: 1.0\n")
    with pytest.raises(RunError, match=r"an earlier version of envgym saved.*settings.yaml\): name another file"):
        unfinished(tmp_path)
    assert unfinished(tmp_path, overwrite=True).saved == {}


def test_where_the_folder_cannot_be_is_one_line(tmp_path):
    (tmp_path / "out.jsonl.unfinished").write_text("")
    with pytest.raises(RunError, match="for unfinished episodes, cannot be created: File exists"):
        unfinished(tmp_path)


def test_a_file_that_cannot_be_written_in_the_end_leaves_the_episodes(tmp_path):
    (tmp_path / "model").mkdir()
    work = unfinished(tmp_path)
    work.write(member(0, 1.0))
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(
        DataError, match=r"cannot be written: Is a directory; 1 episodes are saved in .*unfinished; the"
    ):
        work.finish([member(0, 1.0)])
    (tmp_path / "out.jsonl").rmdir()
    assert len(unfinished(tmp_path).saved) == 1


def test_what_is_kept_goes_on_only_with_the_same_tasks_and_code(tmp_path):
    spec, tasks = registry.spec("math_verify"), [Task("a", "1 + 1"), Task("b", "1 + 2")]
    episode = member(0)
    episode.group_id = "rollout-train-00000/00001"
    episode.fingerprints = {**spec.fingerprint(), "task": task_hash(tasks[1])}
    work = unfinished(tmp_path)
    work.saved = {(episode.group_id, 0): episode}
    work.check_tasks("rollout-train-00000", tasks, spec)
    with pytest.raises(RunError, match="are of other tasks"):
        work.check_tasks("rollout-train-00000", tasks[::-1], spec)
    with pytest.raises(RunError, match="before the code or the settings of environment math_verify-v0 changed"):
        work.check_tasks("rollout-train-00000", tasks, registry.spec("math_verify", digits=3))


# -- which tasks and which episodes -----------------------------------------------------------------------


class Finite(EnvSpec):
    size = 7

    def tasks(self, split):
        return TaskList([Task(f"{split}-{number}") for number in range(self.size)])


class Endless(EnvSpec):
    def tasks(self, split):
        return SeededTasks(split)


def chosen(spec_class, *split, **selection):
    part = part_of_rollout(resolve({"env": "math_verify"}), *split, **selection)
    return [task.id for task in asyncio.run(part.tasks(spec_class("e-v0")))]


def test_slices_of_tasks():
    assert chosen(Finite) == [f"train-{number}" for number in range(7)]
    assert chosen(Finite, "test", first=2, tasks=2) == ["test-2", "test-3"]
    assert chosen(Finite, first=5, tasks=None) == ["train-5", "train-6"]
    assert chosen(Finite, first=5, tasks=90) == ["train-5", "train-6"]
    assert chosen(Endless, first=3, tasks=2) == ["seed-3", "seed-4"]


def test_tasks_without_end_and_very_many_are_bounded(monkeypatch):
    ids = chosen(Endless)
    assert (len(ids), ids[-1]) == (DEFAULT_TASKS, f"seed-{DEFAULT_TASKS - 1}")
    monkeypatch.setattr(Finite, "size", 1000)
    assert len(chosen(Finite)) == DEFAULT_TASKS


def test_a_slice_that_holds_nothing_or_has_no_end_is_refused():
    with pytest.raises(ConfigError, match="has train tasks without end: give their number"):
        chosen(Endless, tasks=None)
    with pytest.raises(DataError, match="has 7 train tasks, none from 7 on"):
        chosen(Finite, first=7, tasks=2)


def test_one_task_by_its_key():
    assert chosen(Finite, "test", key="test-2") == ["test-2"]
    assert chosen(Endless, key="seed-7") == ["seed-7"]
    with pytest.raises(DataError, match="has no test task 'train-2'"):
        chosen(Finite, "test", key="train-2")


def member(number, score=None, reward=None, *, failed=False):
    outcome = Outcome.fail("timeout", "") if failed else Outcome.finish()
    return Episode(str(number), Task("t"), outcome, score=score, reward=reward)


@pytest.mark.parametrize(
    ("episodes", "best"),
    [
        ([member(0, 0.5), member(1, 0.75), member(2, 0.75)], "1"),
        ([member(0, 0.5, reward=9.0), member(1, 0.75, reward=-1.0)], "1"),  # the score, where there is one
        ([member(0, reward=-2.0), member(1, reward=-1.0)], "1"),
        ([member(0), member(1, reward=-1.0)], "1"),
        ([member(0, reward=5.0), member(1, 0.0)], "1"),
        ([member(0, failed=True), member(1), member(2)], "1"),
        ([member(0, failed=True)], None),
    ],
)
def test_the_best_of_a_group(episodes, best):
    chosen = best_of(episodes)
    assert (chosen and chosen.id) == best


def test_a_temperature_of_0_is_greedy_as_in_an_evaluation(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "greedy.yaml").write_text("rollout: {temperature: 0, top_p: 0.5}\n")
    policy = Path(__file__).parents[2] / "envgym/config/recipes/starter"
    for how in (["rollout.temperature=0"], ["--config", "greedy.yaml"]):
        _, *command = words(policy, *how, "--overwrite", "debug=true", samples=("--samples", 2))
        command[command.index("0:12")] = "0:1"
        assert main(command) == 0
        first, second = read_episodes(folder / "out.jsonl")
        sampled = [part for episode in (first, second) for part in episode.rows[0].segments if part.role == "action"]
        assert [part.temperature for part in sampled] == [0, 0]
        assert first.messages[-1].text == second.messages[-1].text


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs --model"),
        (["--model", "starter"], "needs --out"),
        (["--model", "starter", "--out", "o.jsonl"], "which environment?"),
        (["--model", "starter", "--out", "o.txt", "--env", "math_verify"], ".jsonl or .parquet"),
        (["--model", "starter", "--out", "o.jsonl", "--env", "math_verfy"], "Did you mean 'math_verify'?"),
        (["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--split", "dev"], "invalid choice: 'dev'"),
        (["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--tasks", "100"], "FIRST:LAST"),
        (["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--tasks", "5:5"], "holds no task"),
        (
            ["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--task", "train-1", "--tasks", "0:2"],
            "--tasks: not allowed with argument --task",
        ),
        (["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--samples", "0"], "1 or more"),
        (
            ["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--samples", "2", "--best-of", "4"],
            "--best-of: not allowed with argument --samples",
        ),
        (
            ["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "rollout.group_size=4"],
            "envgym rollout takes --samples N",
        ),
        (
            ["--model", "starter", "--out", "o.jsonl", "--env", "math_verify", "--split", "test", "--tasks", "600:"],
            "none from 600 on",
        ),
        (["--model", "./none", "--out", "o.jsonl", "--env", "math_verify"], "model folder ./none does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, words, said):
    done = run(tmp_path, [ENVGYM, "rollout", *words])
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_starter_s_episodes_are_judged_as_they_were_played(tmp_path):
    """vLLM samples, math_verify judges, in Parquet and again from it."""
    command = [ENVGYM, "rollout", "--env", "math_verify", "--model", "starter", "--split", "test", "--tasks", "8:24"]
    done = run(tmp_path, [*command, "--samples", "2", "--out", "played.parquet"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "16 tasks, 32 episodes" in done.stdout
    played = read_episodes(tmp_path / "played.parquet")
    assert [each.task.id for each in played[::2]] == [f"test-{number}" for number in range(8, 24)]
    assert all(each.rows[0].segments[1].logprobs for each in played)
    scores = Counter(each.score for each in played)
    assert set(scores) == {0.0, 1.0}  # it solves some

    again = run(tmp_path, [ENVGYM, "score", "played.parquet", "--env", "math_verify", "--out", "again.jsonl"])
    assert (again.returncode, again.stderr) == (0, "")
    assert re.search(r"^changed +0 episodes$", again.stdout, re.MULTILINE)
    judged = read_episodes(tmp_path / "again.jsonl")
    assert [(e.id, e.score, e.reward, e.answer) for e in judged] == [
        (e.id, e.score, e.reward, e.answer) for e in played
    ]
    assert all(e.metrics["score_before"] == e.score for e in judged)

    best = run(tmp_path, [*command, "--best-of", "4", "--out", "best.jsonl"])
    assert (best.returncode, best.stderr) == (0, "")
    kept = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert len(kept) == 16
    assert re.search(r"^kept +16 episodes, the best of 4$", best.stdout, re.MULTILINE)
    mean = sum(record["score"] for record in kept) / 16
    assert mean > float(re.search(r"^score +(\S+)", best.stdout, re.MULTILINE)[1])


SHORTEST = """
import envgym

ROWS = [{"prompt": f"Say {number}."} for number in range(6)]

@envgym.reward(batch=True, tasks=lambda split: ROWS)
def shortest(completion):
    return [float(text == min(completion, key=len)) for text in completion]
"""


def test_the_best_answers_of_an_api_judged_with_their_group(tmp_path, serving):
    """Nothing but messages and counts: no tokens, no tokenizer."""
    asked = Counter()

    async def answer(request):
        content = (await request.json())["messages"][-1]["content"]
        asked[content] += 1
        message = {"role": "assistant", "content": "x" * (1 + asked[content] % 3)}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

    async def main():
        async with serving(answer) as url:
            api = ["engine.kind=openai", f"engine.base_url={url}/v1"]
            command = ["rollout", "--env", "shortest.py", "--model", "some-model", "--best-of", "3", "--out", "o.jsonl"]
            return await asyncio.to_thread(run, tmp_path, [ENVGYM, *command, *api])

    (tmp_path / "shortest.py").write_text(SHORTEST)
    done = asyncio.run(main())
    assert (done.returncode, done.stderr) == (0, "")
    assert "36 tokens sampled" in done.stdout
    episodes = read_episodes(tmp_path / "o.jsonl")
    assert [each.task.prompt for each in episodes] == [f"Say {number}." for number in range(6)]
    assert [(each.score, each.messages[-1].text) for each in episodes] == [(1.0, "x")] * 6
    again = run(tmp_path, [ENVGYM, "score", "o.jsonl", "--env", "shortest.py", "--out", "again.parquet"])
    assert (again.returncode, again.stderr) == (0, "")
    assert "changed  0 episodes" in again.stdout
