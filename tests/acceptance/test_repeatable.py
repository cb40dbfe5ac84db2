"""Deterministic mode: the same seed gives the same run, also through a kill and a resume."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgym.episodes.files import read_episodes
from tests.learned_tasks import check_learned_once
from tests.weight_files import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVGYM = Path(sys.executable).with_name("envgym")
SMALL = (
    "train", "--env", "math_verify", "deterministic=true", "steps=8", "rollout.tasks_per_step=8",
    "rollout.group_size=4",
    "eval.every=3", "eval.tasks=32", "checkpoint.every=2",
)  # fmt: skip


def lasting(folder: Path) -> list[dict[str, object]]:
    """The metrics without times and rates, and without the policy's movement in its first ten steps, which a run that
    is resumed in one of these does not measure."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    passing = ("seconds/", "tokens/per_second", "tflops", "mfu", "memory/", "policy/movement")
    return [
        {name: value for name, value in record.items() if not name.removeprefix("critic/").startswith(passing)}
        for record in records
    ]


FILTERED = (
    "learner.minibatches=2", "rollout.filter.zero_variance=true", "rollout.filter.max_score=0.9", "pretrain.rows=3",
    "pretrain.path=text.txt", "learner.pretrain_coef=0.1",
)  # fmt: skip
"""Groups are carried over from step to step, and every step takes the next documents of a text."""


@pytest.mark.parametrize("more", [(), FILTERED], ids=["plain", "filtered"])
def test_same_seed_same_run_and_a_killed_one_ends_with_the_same_bytes(envgym, tmp_path, store, more):
    (tmp_path / "text.txt").write_text("".join(f"The sum of {n} and 1 is {n + 1}.\n" for n in range(20)))
    runs, words = tmp_path / "runs", (*SMALL, *more)
    envgym(*words, "--name", "one")
    envgym(*words, "--name", "two")
    assert lasting(runs / "one") == lasting(runs / "two")
    assert weights(runs / "one") == weights(runs / "two")

    kill_at = random.randint(2, 7)
    killed = subprocess.Popen([str(ENVGYM), *words, "--name", "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    metrics = runs / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count("\n") <= kill_at:
        assert killed.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    envgym("train", "--resume", "killed")
    assert lasting(runs / "killed") == lasting(runs / "one")
    assert weights(runs / "killed") == weights(runs / "one")
    if more:
        assert any(record.get("filter/carried_over") for record in lasting(runs / "one"))
    else:
        store("repeatable", killed_after_step=kill_at, weights=weights(runs / "one"), steps=8)


KILLS = 20


@pytest.mark.timeout(1800)
def test_a_run_killed_twenty_times_at_random_ends_with_the_same_bytes(envgym, tmp_path, store):
    """At any moment: while it starts, plays, learns, gives weights away or writes a checkpoint."""
    words = (*SMALL, "steps=150", "checkpoint.every=1", "eval.every=0", "--name")
    envgym(*words, "whole")
    runs, drawn, killed_at = tmp_path / "runs", random.Random(), []
    command = [*words, "killed"]
    while len(killed_at) < KILLS:
        run = subprocess.Popen([str(ENVGYM), *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
        time.sleep(drawn.uniform(5.0, 13.0))
        if run.poll() is not None:
            break
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        metrics = runs / "killed" / "metrics.jsonl"
        killed_at.append(metrics.read_text().count("\n") - 1 if metrics.exists() else None)
        if (runs / "killed" / "config.yaml").exists():
            command = ["train", "--resume", "killed"]
    envgym("train", "--resume", "killed")
    assert len(killed_at) == KILLS, "the run ended before it could be killed so often"
    assert lasting(runs / "killed") == lasting(runs / "whole")
    assert weights(runs / "killed") == weights(runs / "whole")
    store("killed_twenty_times", killed_after_steps=killed_at, weights=weights(runs / "whole"))


SHOWN = '''
from envgym.envs.pictures import Pictures, PicturesEnv

class ByLength(PicturesEnv):
    """Rewards long answers: random weights do not give those that are asked for."""
    async def step(self, action):
        feedback, _, terminated, truncated, info = await super().step(action)
        return feedback, len(action.text) % 7 / 6, terminated, truncated, info

class Shown(Pictures):
    env_class = ByLength
'''


def images(folder: Path) -> list[str]:
    """The names of a run's images, after each was compared with its content."""
    files = sorted((folder / "images").iterdir())
    for file in files:
        assert file.name == f"{hashlib.sha256(file.read_bytes()).hexdigest()}.png"
    return [file.name for file in files]


@pytest.mark.timeout(1800)
def test_a_run_with_images_killed_at_random_ends_with_the_same_bytes(envgym, tmp_path, store, vision_model):
    """Its pictures are stored once, though the steps after a checkpoint are played again."""
    (tmp_path / "shown.py").write_text(SHOWN)
    words = (
        "train", "--env", "shown.py:Shown", "env.kind=walk", "env.max_turns=3", "deterministic=true", "steps=40",
        "--model", str(vision_model("qwen2_5_vl")), "rollout.tasks_per_step=4", "rollout.group_size=4", "seed=3",
        "rollout.max_tokens=8", "engine.max_model_len=512", "eval.every=7", "eval.tasks=8", "checkpoint.every=2",
        "learner.lr=1e-3", "--name",
    )  # fmt: skip
    envgym(*words, "whole")
    runs, drawn, killed_at = tmp_path / "runs", random.Random(), []
    metrics, command = runs / "killed" / "metrics.jsonl", [*words, "killed"]
    while len(killed_at) < 4:
        run = subprocess.Popen([str(ENVGYM), *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
        before, deadline = len(lasting(runs / "killed")) if killed_at else 0, time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count("\n") < before + 3:
            assert run.poll() is None, "the run ended before it could be killed so often"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(drawn.uniform(0, 3))
        assert run.poll() is None, "the run ended before it could be killed so often"
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        killed_at.append(metrics.read_text().count("\n") - 1)
        command = ["train", "--resume", "killed"]
    envgym("train", "--resume", "killed")
    assert lasting(runs / "killed") == lasting(runs / "whole")
    assert weights(runs / "killed") == weights(runs / "whole")
    assert images(runs / "killed") == images(runs / "whole")
    shown = [
        [image.read() for message in episode.messages for image in message.images]
        for episode in read_episodes(runs / "killed")
    ]
    assert len(shown) == 40 * 4 * 4
    assert max(map(len, shown)) == 3
    moved = [record["grad_norm"] for record in lasting(runs / "whole") if "grad_norm" in record]
    assert min(moved) > 0
    store("images_killed", killed_after_steps=killed_at, images=len(images(runs / "whole")),
          weights=weights(runs / "whole"))  # fmt: skip


STRAGGLERS = """
import asyncio
import zlib

from envgym.envs.math_verify import MathVerify, MathVerifyEnv

class Slow(MathVerifyEnv):
    async def step(self, action):
        await asyncio.sleep(4.0 if zlib.crc32(self.task.id.encode()) % 16 == 0 else 0.05)
        return await super().step(action)

class Stragglers(MathVerify):
    env_class = Slow
"""


@pytest.mark.timeout(1800)
def test_an_asynchronous_run_killed_twenty_times_learns_from_every_task_once(envgym, tmp_path, store):
    """Those that were in play are played again, the slowest too: no task is lost, and none is learned from twice."""
    (tmp_path / "slow.py").write_text(STRAGGLERS)
    tasks, runs, drawn, kills = 8, tmp_path / "runs", random.Random(), 0
    command = [
        "train", "--env", "slow.py:Stragglers", "rollout.max_staleness=2", f"rollout.tasks_per_step={tasks}",
        "rollout.group_size=2", "eval.every=0", "checkpoint.every=1", "checkpoint.keep=1", "steps=100000",
        "--name", "run",
    ]  # fmt: skip
    metrics = runs / "run" / "metrics.jsonl"
    while kills < KILLS:
        run = subprocess.Popen([str(ENVGYM), *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
        time.sleep(drawn.uniform(7.0, 14.0))
        assert run.poll() is None
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        kills += 1
        if (runs / "run" / "config.yaml").exists():
            command = ["train", "--resume", "run"]
    steps = max(json.loads(line)["step"] for line in metrics.read_text().splitlines()) + 6
    envgym("train", "--resume", "run", f"steps={steps}")
    env = f"{tmp_path / 'slow.py'}:Stragglers"
    played = check_learned_once(runs / "run", env, steps=steps, tasks=tasks, max_staleness=2)
    store("killed_twenty_times_asynchronous", steps=steps, tasks=played)


def test_another_seed_gives_another_run(envgym, tmp_path):
    envgym(*SMALL, "--name", "one", "steps=2")
    envgym(*SMALL, "--name", "two", "steps=2", "seed=1")
    assert lasting(tmp_path / "runs" / "one") != lasting(tmp_path / "runs" / "two")


def test_a_pipeline_killed_in_each_of_its_stages_ends_with_the_same_bytes(envgym, tmp_path, store):
    """SFT, reward model, PPO: the recipe `rlhf`, whole and killed three times."""
    rows = [
        {"prompt": f"What is {n} + {n}?", "chosen": f"\\boxed{{{2 * n}}}", "rejected": f"{2 * n}"} for n in range(90)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        "train",
        "--recipe",
        "rlhf",
        "deterministic=true",
        "rollout.tasks_per_step=8",
        "eval.tasks=16",
        "eval.every=2",
    ]
    words += [f"stages.{name}.data.path=pairs.jsonl" for name in ("sft", "rm", "ppo")]
    words += ["stages.sft.epochs=0.5", "stages.rm.epochs=0.5", "stages.ppo.steps=4", "learner.lr=1e-4"]
    words += ["checkpoint.every=1", "rollout.max_tokens=16", "engine.max_model_len=512"]
    envgym(*words, "--name", "whole")
    runs, resumed = tmp_path / "runs", []
    for number, stage in enumerate(("1-sft", "2-rm", "3-ppo")):
        command = [*words, "--name", "killed"] if number == 0 else ["train", "--resume", "killed"]
        run = subprocess.Popen([str(ENVGYM), *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
        metrics, deadline = runs / "killed" / stage / "metrics.jsonl", time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count("\n") < 3:  # step 0's among them
            assert run.poll() is None, f"the run ended before it could be killed in {stage}"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        resumed.append({stage: metrics.read_text().count("\n") - 1})
    envgym("train", "--resume", "killed")
    hashes = {}
    for stage in ("1-sft", "2-rm", "3-ppo"):
        assert lasting(runs / "killed" / stage) == lasting(runs / "whole" / stage), stage
        hashes[stage] = weights(runs / "whole" / stage)
        assert weights(runs / "killed" / stage) == hashes[stage], stage
    store("rlhf_killed", killed_after_steps=resumed, weights=hashes)


@pytest.mark.parametrize("env", ["math_verify", "tool_use", "guess.py:Guess"])
def test_a_step_is_replayed_and_sampled_again_token_for_token(envgym, tmp_path, store, env):
    (tmp_path / "guess.py").write_bytes((Path(__file__).parents[2] / "examples" / "guess.py").read_bytes())
    settings = ("deterministic=true", "steps=3", "rollout.tasks_per_step=13", "rollout.group_size=8", "eval.every=0")
    envgym("train", "--env", env, *settings, "checkpoint.every=1", "checkpoint.keep=3", "--name", "run")
    replayed = envgym("replay", "run", "--step", "2").stdout
    assert "104 of 104 episodes of runs/run/rollouts/step_000002.parquet repeat exactly" in replayed
    sampled = envgym("replay", "run", "--step", "3", "--sample").stdout
    assert "104 of 104 episodes of runs/run/rollouts/step_000003.parquet were sampled again, token for token" in sampled
    first, second = (tmp_path / "runs" / "run" / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    shutil.rmtree(second)
    first.rename(second)  # other weights
    assert "(task " in envgym("replay", "run", "--step", "3", "--sample", status=1).stdout
    assert (
        "which sampled step 2; there are weights for 1, 3"
        in envgym("replay", "run", "--step", "2", "--sample", status=2).stderr
    )
    store(f"replayed_{env.partition('.')[0]}", replayed=104, sampled_again=104)
