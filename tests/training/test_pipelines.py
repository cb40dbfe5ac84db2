"""Runs of several stages, with real workers, and the models and episodes that stages pass on."""

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import envgym
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.episodes.files import read_episodes

SMALL = [
    "rollout.tasks_per_step=4",
    "eval.tasks=2",
    "engine.kind=transformers",
    "rollout.max_tokens=6",
    "checkpoint.every=0",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a file of preferences and one of answers."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"what is {n} + 1?", "chosen": f"{n + 1}", "rejected": "the answer"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in rows]
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    return tmp_path


def weights(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("lr", "moves"), [("1e-9", False), ("1e-3", True)])
def test_a_policy_that_does_not_move_is_told_of(folder, tiny_model, capsys, lr, moves):
    """Sixteen rows, of which four are held out, are twelve steps of one; after ten the policy is compared."""
    words = ["data.path=answers.jsonl", f"learner.lr={lr}", "learner.warmup_ratio=0", "eval.every=0", "debug=true"]
    assert main(["train", "--recipe", "sft", "--model", str(tiny_model), "--name", "run", *words]) == 0
    printed = "".join(capsys.readouterr())
    assert "12 training tasks are fewer than 10 steps of 256: rollout.tasks_per_step=1 for this run" in printed
    records = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert [record["step"] for record in records if "policy/movement" in record] == [10]
    assert (records[9]["policy/movement"] > 0.005) == moves
    assert ("after ten steps the policy has hardly moved" in printed) == (not moves)
    assert (records[9].get("alarms") == ["standstill"]) == (not moves)
    [line] = [line for line in printed.splitlines() if line.startswith("next ")]
    for command in line.removeprefix("next ").split("&&"):  # as it is, but for the engine
        engine = ["engine.kind=transformers", "rollout.max_tokens=4", "debug=true"] if "rollout" in command else []
        assert main([*command.split()[1:], *engine]) == 0
    printed = capsys.readouterr().out
    assert "saved  4 episodes" in printed
    assert "user:\nwhat is " in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rlhf_from_one_file(folder, tiny_model):
    """SFT, a reward model trained from it, and PPO from the SFT policy with a critic from the reward model."""
    data = [f"stages.{name}.data.path=pairs.jsonl" for name in ("sft", "rm", "ppo")]
    short = ["stages.sft.epochs=0.3", "stages.rm.epochs=0.3", "stages.ppo.steps=1", "learner.lr=1e-3"]
    assert main(["train", "--recipe", "rlhf", "--model", str(tiny_model), "--name", "run", *data, *short, *SMALL]) == 0
    run = folder / "runs" / "run"
    assert json.loads((run / "summary.json").read_text())["stages"] == ["1-sft", "2-rm", "3-ppo"]
    _, loading = AutoModelForSequenceClassification.from_pretrained(run / "2-rm/model", output_loading_info=True)
    assert not loading["missing_keys"]
    reward_model = json.loads((run / "2-rm/model/config.json").read_text())
    assert reward_model["std"] > 0
    assert reward_model["reward_at"] == "end_of_turn"
    assert reward_model["pad_token_id"] == 2
    base, sft, ppo = (weights(path) for path in (tiny_model, run / "1-sft/model", run / "3-ppo/model"))
    name = "model.layers.0.mlp.up_proj.weight"
    from_sft, from_base = (torch.dist(model[name], ppo[name]).item() for model in (sft, base))
    assert 0 < from_sft < from_base  # PPO started from the SFT policy
    record = json.loads((run / "3-ppo/metrics.jsonl").read_text().splitlines()[-1])
    assert record["critic/lr"] > 0


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_scored_answers_are_trained_on_with_their_score_in_the_prompt(folder, tiny_model, tiny_reward_model):
    overrides = ["stages.scored.data.path=answers.jsonl", f"stages.scored.env.models={tiny_reward_model}"]
    overrides += ["stages.taught.epochs=0.3", *SMALL]
    assert main(["train", "--recipe", "conditional_sft", "--model", str(tiny_model), "--name", "run", *overrides]) == 0
    run = folder / "runs" / "run"
    scored = read_episodes(run / "1-scored" / "episodes.parquet")
    assert len(scored) == 16
    assert all(episode.reward is not None and not episode.failed for episode in scored)
    stage = resolve(file=run / "config.yaml").stages[1]
    assert (stage.model, stage.data) == (str(tiny_model), {"path": "stage:scored"})

    async def prompts():
        data = {"path": str(run / "1-scored" / "episodes.parquet"), "test_fraction": 0}
        async with envgym.spec(stage.env.name, **stage.env.settings, data=data) as spec:
            return [spec.record(await spec.tasks("train").get(n)).prompt[-1].text for n in range(16)]

    expected = [f"{episode.messages[0].text} <rm_score>: {episode.reward:.2f} " for episode in scored]
    assert asyncio.run(prompts()) == expected


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_stage_trains_on_the_episodes_of_another(folder, tiny_model):
    """Its model is the run's own, as a rollout stage trains none."""
    (folder / "recipe.yaml").write_text(
        """
env: math_verify
stages:
  - {name: drawn, kind: rollout, learner: sft, rollout: {tasks_per_step: 3, group_size: 2}}
  - {name: taught, recipe: sft, data: {path: "stage:drawn"}, epochs: 1, learner: {lr: 1.0e-3}}
"""
    )
    assert main(["train", "--recipe", "recipe.yaml", "--model", str(tiny_model), "--name", "run", *SMALL[1:]]) == 0
    run = folder / "runs" / "run"
    drawn = read_episodes(run / "1-drawn" / "episodes.parquet")
    assert len(drawn) == 6
    assert (run / "2-taught" / "model" / "config.json").is_file()


@pytest.mark.timeout(600)
def test_a_run_whose_last_stage_rolls_out_ends_with_its_numbers(folder, tiny_model, capsys):
    (folder / "recipe.yaml").write_text(
        """
env: math_verify
stages:
  - {name: drawn, kind: rollout, learner: sft, rollout: {tasks_per_step: 3, group_size: 2}}
"""
    )
    words = ["--recipe", "recipe.yaml", "--model", str(tiny_model), "--name", "run", *SMALL[1:], "debug=true"]
    assert main(["train", *words]) == 0
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    assert (summary["status"], summary["do"], summary["episodes"]) == ("completed", "rollout", 6)
    assert summary["tokens"]["sampled"] > 0
    printed = capsys.readouterr().out
    assert "completed: 0 steps" in printed
    assert main(printed.split("next ")[-1].split()[1:]) == 0
    assert "Put the final answer in" in capsys.readouterr().out
    file = folder / "runs/run/episodes.parquet"
    before = file.stat().st_mtime_ns
    assert main(["train", "--resume", "run"]) == 0
    assert file.stat().st_mtime_ns == before  # nothing is rolled out twice


STOPPING_ENV = """
import os, signal
import envgym

class Env(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        self.id = options["task"].id
        return "say something", {}

    async def step(self, action):
        with open("steps", "a") as file:
            file.write(self.id + "\\n")
        if os.path.getsize("steps") > 2 * len(self.id) and not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGINT)
        return (), 0.5, True, False, {}
"""


@pytest.mark.timeout(600)
def test_a_rollout_stage_that_is_stopped_names_the_command_that_resumes_it(folder, tiny_model, capsys):
    (folder / "stopping.py").write_text(STOPPING_ENV)
    (folder / "recipe.yaml").write_text(
        """
env: stopping.py
stages:
  - {name: drawn, kind: rollout, learner: sft, rollout: {tasks_per_step: 5, group_size: 1, concurrency: 1}}
"""
    )
    words = ["--recipe", "recipe.yaml", "--model", str(tiny_model), "--name", "run", *SMALL[2:], "debug=true"]
    assert main(["train", *words]) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    saved = "episodes are saved in runs/run/episodes.parquet.unfinished"
    assert re.search(rf"\d {saved}; resume with: envgym train --resume runs/run$", line)
    assert main(["train", "--resume", "run"]) == 0
    assert len(read_episodes(folder / "runs/run/episodes.parquet")) == 5
    assert 5 <= len((folder / "steps").read_text().split()) <= 6  # at most the one in flight again


SLOW_ENV = """
import asyncio, os
import envgym

class Env(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return "say something", {}

    async def step(self, action):
        n_steps = os.path.getsize("steps") if os.path.exists("steps") else 0
        with open("steps", "a") as file:
            file.write(".")
        if n_steps >= 5 and not os.path.exists("continue"):
            await asyncio.sleep(600)
        return (), float(len(action.token_ids)), True, False, {}

from envgym.env.data import DataEnvConfig, DataEnvSpec

class Spec(DataEnvSpec):
    env_class = Env
    Config = DataEnvConfig
"""


@pytest.mark.timeout(600)
def test_a_killed_round_of_rejection_sampling_resumes_within_the_round(folder, tiny_model):
    """Its finished episodes are not run again, and all are trained on."""
    (folder / "slow.py").write_text(SLOW_ENV)
    arguments = ["--recipe", "rejection_sampling", "--env", "slow.py:Spec", "data.path=answers.jsonl", *SMALL]
    arguments += ["rollout.group_size=2", "rollout.tasks_per_step=4", "rollout.concurrency=2", "learner.minibatches=1"]
    arguments += ["steps=1", "checkpoint.episodes_every=0", "eval.every=0", "--model", str(tiny_model), "--name", "run"]
    run = subprocess.Popen([Path(sys.executable).with_name("envgym"), "train", *arguments])
    journal, step_log = folder / "runs/run/unfinished.jsonl", folder / "steps"
    try:
        while run.poll() is None and not (step_log.exists() and step_log.stat().st_size == 7):
            time.sleep(0.1)
        assert len(journal.read_text().splitlines()) == 5
    finally:
        run.kill()
        run.wait()
    (folder / "continue").touch()
    assert main(["train", "--resume", "run"]) == 0
    assert step_log.stat().st_size == 7 + 3  # the two interrupted ones again, and the last one
    *_, record = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert record["episodes"] == 8
    saved = read_episodes(folder / "runs/run")
    assert len(saved) == len({(episode.group_id, episode.member) for episode in saved}) == 8
    assert not journal.exists()
