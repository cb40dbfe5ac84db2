"""The whole program once, with the real parts: vLLM samples, DeepSpeed learns, and what a run leaves can be used."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from envgym.cli import main
from tests.programs import ENVGYM, LETTERS, program

STEPS, TASKS, MEMBERS = 2, 4, 4


@dataclass
class Run:
    """A finished run: its folder, and what the program printed."""

    folder: Path
    printed: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    folder = tmp_path_factory.mktemp("end_to_end")
    (folder / "letters.py").write_text(LETTERS)
    printed = program(
        folder, "train", "--env", "letters.py", "--model", tiny_model, "--name", "first", "learner.lr=1e-3",
        f"steps={STEPS}", f"rollout.tasks_per_step={TASKS}", f"rollout.group_size={MEMBERS}", "rollout.max_tokens=12",
        "eval.tasks=8", "learner.ema_decay=0.5",
    )  # fmt: skip
    return Run(folder / "runs" / "first", printed)


def test_what_a_run_prints_says_how_it_went_and_what_to_type_next(run):
    assert "step 2/2" in run.printed
    for name in ("completed: 2 steps", "held-out", "runs/first", "curve.png", "envgym eval"):
        assert name in run.printed


def test_summary_is_the_contract_with_scripts(run):
    summary = run.summary
    assert (summary["status"], summary["seed"], summary["steps"], summary["failures"]) == ("completed", 0, STEPS, {})
    for when in ("before", "after"):
        evaluation = summary["eval"][when]
        low, high = evaluation["ci95"]
        assert low <= evaluation["score"] <= high
        assert evaluation["n_tasks"] == 8
    total, spent = summary["seconds"].pop("total"), summary["seconds"]
    phases = {"start", "rollout", "prepare", "learn", "sync", "eval", "checkpoint", "save"}
    assert {name for name, seconds in spent.items() if seconds} == phases
    assert total >= sum(spent.values())
    assert summary["tokens"]["sampled"] == summary["tokens"]["trained"] > 0
    assert 0 < summary["mismatch"]["max_abs_logprob"] < 1e-4


def test_metrics_have_a_line_a_step(run):
    before, *steps = run.metrics
    assert before["step"] == 0
    assert "eval/score" in before
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert {"reward/mean", "score/mean", "loss", "lr", "env/characters"} <= set(record)
        assert record["grad_norm"] > 0
        assert record["mismatch/max"] < 1e-4
        assert record["sync/max_abs"] < 1e-4
    assert steps[-1]["eval/score"] == run.summary["eval"]["after"]["score"]


def test_the_page_on_metrics_has_a_line_for_every_name(run, documented_metrics):
    logged = {name for record in run.metrics for name in record}
    assert [name for name in logged if not any(pattern.fullmatch(name) for pattern in documented_metrics)] == []
    always = [pattern for pattern, in_every_run in documented_metrics.items() if in_every_run]
    assert len(always) > 35
    assert [pattern.pattern for pattern in always if not any(map(pattern.fullmatch, logged))] == []


def test_rollouts_hold_exactly_what_was_sampled(run, tiny_model):
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for step, record in enumerate(run.metrics[1:], 1):
        episodes = pq.read_table(run.folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        assert len({episode["id"] for episode in episodes}) == len(episodes) == TASKS * MEMBERS
        assert len({episode["group"] for episode in episodes}) == TASKS
        sampled = 0
        for episode in episodes:
            [row] = episode["rows"]
            prompt, action = row["segments"]
            assert (prompt["role"], action["role"]) == ("prompt", "action")
            assert set(prompt["weights"]) == {0.0}
            assert prompt["logprobs"] is None
            assert set(action["weights"]) == {1.0}
            assert len(action["logprobs"]) == len(action["weights"]) == len(action["token_ids"])
            assert all(logprob < 0 for logprob in action["logprobs"])
            assert action["versions"] == [{"version": step - 1, "start": 0, "end": len(action["token_ids"])}]
            question, answer = episode["messages"]
            assert question["content"] in tokenizer.decode(prompt["token_ids"])
            assert answer["content"] == tokenizer.decode(action["token_ids"], skip_special_tokens=True)
            assert episode["outcome"]["status"] in ("completed", "truncated")
            sampled += len(action["token_ids"])
        assert sampled == record["tokens/sampled"]
        mean = sum(episode["reward"] for episode in episodes) / len(episodes)
        assert record["reward/mean"] == pytest.approx(mean)


def test_the_run_folder_holds_the_rest(run, tiny_model, monkeypatch):
    from safetensors.torch import load_file

    from envgym.config.resolve import resolve

    monkeypatch.chdir(run.folder.parents[1])
    config = resolve(file=run.folder / "config.yaml")
    assert config.to_yaml() == (run.folder / "config.yaml").read_text()
    assert (run.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (run.folder / "logs").iterdir()} == {"engine.log", "actor-0.log"}
    [checkpoint] = (run.folder / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002"
    start, end = load_file(tiny_model / "model.safetensors"), load_file(run.folder / "model" / "model.safetensors")
    assert start.keys() == end.keys()
    assert any((start[name] != end[name]).any() for name in start)
    average = load_file(run.folder / "model_ema" / "model.safetensors")
    # After one step it is halfway, after two nearer to the end: 1/4 start, 1/4 the weights between, 1/2 end.
    assert {(run.folder / name / "tokenizer.json").is_file() for name in ("model", "model_ema")} == {True}
    name = max(start, key=lambda name: float((start[name] - end[name]).abs().max()))
    assert 0 < float((average[name] - end[name]).norm()) < float((start[name] - end[name]).norm())


def test_a_finished_run_is_told_again_and_not_trained_again(run):
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()}
    assert "completed: 2 steps" in program(run.folder.parents[1], "train", "--resume", "first")
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_demonstrations_are_learned_without_an_engine_and_a_finished_run_goes_further(tmp_path, tiny_model):
    program(
        tmp_path, "train", "--env", "math_verify", "--model", tiny_model, "--name", "taught", "agent=replay",
        "--learner", "sft", "learner.lr=1e-2", "steps=2", "rollout.tasks_per_step=8", "eval.tasks=8",
    )  # fmt: skip
    run = Run(tmp_path / "runs" / "taught", "")
    assert {path.name for path in (run.folder / "logs").iterdir()} == {"actor-0.log"}
    assert list((run.folder / "rollouts").iterdir()) == []  # they would only copy the data
    assert run.summary["eval"]["after"]["eval/loss"] < run.summary["eval"]["before"]["eval/loss"]
    assert run.summary["tokens"] == {"sampled": 0, "trained": run.summary["tokens"]["trained"]}
    assert run.summary["tokens"]["trained"] > 0
    before, records, config = run.summary, run.metrics, (run.folder / "config.yaml").read_text()
    assert "completed: 3 steps" in program(tmp_path, "train", "--resume", "taught", "steps=3")
    assert run.metrics[: len(records)] == records
    assert [record["step"] for record in run.metrics[len(records) :]] == [3]
    assert run.summary["eval"]["before"] == before["eval"]["before"]
    assert run.summary["eval"]["after"]["eval/loss"] < before["eval"]["after"]["eval/loss"]
    assert (run.folder / "config.yaml").read_text() == config.replace("  steps: 2\n", "  steps: 3\n") != config


HALF = '''
import envgym

class Half(envgym.Env):
    """Of odd numbers it pays the share of lower-case letters, of even ones nothing: half of the groups are flat."""

    async def reset(self, *, seed=None, options=None):
        self.number = self.rng.randint(1, 99)
        return [{"role": "user", "content": f"Say something about {self.number}."}], {}

    async def step(self, action):
        share = sum("a" <= letter <= "z" for letter in action.text) / max(1, len(action.text))
        return None, share * (self.number % 2), True, False, {}
'''


def test_with_a_critic_a_filter_text_and_a_tracker_a_step_is_full_and_all_of_it_is_told(
    tmp_path, tiny_model, documented_metrics, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.py").write_text(HALF)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "the answer is {n}."}}\n' for n in range(20)))
    settings = (
        "steps=2", "learner.lr=1e-3", "learner.minibatches=2", "learner.kl.coef=0.01", "rollout.tasks_per_step=4",
        "rollout.group_size=4", "rollout.max_tokens=12", "rollout.filter.zero_variance=true", "eval.every=0",
        "pretrain.path=text.jsonl", "pretrain.rows=3", "engine.kind=transformers", "report_to=tensorboard",
        "debug=true",
    )  # fmt: skip
    words = ("train", "--env", "half.py", "--model", tiny_model, "--name", "full", "--learner", "ppo", *settings)
    assert main(list(map(str, words))) == 0
    run = Run(tmp_path / "runs" / "full", "")
    for record in run.metrics[-2:]:
        assert record["filter/kept_share"] < 1
        assert record["filter/rounds"] > 1
        assert record["episodes"] > record["learner/episodes"] == 16  # what is dropped is played and told all the same
        assert (record["filter/filled_share"], record["tokens/pretrain"] > 0) == (1, True)
        assert record["policy/ratio/min"] < 1 < record["policy/ratio/max"]
        assert {"critic/grad_norm", "critic/memory/max", "value/explained_variance", "pretrain/loss"} <= record.keys()
    assert run.summary["filtered_groups"]["zero_variance"] > 0
    assert run.summary["alarms"].keys() <= {"truncation", "cut_turns"}  # random weights seldom end a turn
    logged = {name for record in run.metrics for name in record}
    assert [name for name in logged if not any(pattern.fullmatch(name) for pattern in documented_metrics)] == []
    assert run.summary["trackers"] == {"tensorboard": {"failures": 0}}
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))


FRAGILE = '''
import pathlib, envgym

class Fragile(envgym.Env):
    """Two turns; breaks once the folder holds a file named `broken`."""

    async def reset(self, *, seed=None, options=None):
        self.turns = 0
        return [{"role": "user", "content": "Say something."}], {}

    def step(self, action):
        self.turns += 1
        if pathlib.Path("broken").exists() and self.turns == 2:
            raise ConnectionError("the world is gone")
        return [{"role": "user", "content": "And?"}], len(action.text) % 5, self.turns == 2, False, {}
'''


@pytest.mark.slow
def test_a_world_that_breaks_stops_the_run_with_everything_kept(tmp_path, tiny_model):
    """Steps are made of several turns; then too many episodes fail, and the mended run goes on."""
    (tmp_path / "fragile.py").write_text(FRAGILE)
    words = [
        "train", "--env", "fragile.py", "--model", tiny_model, "--name", "fragile", "steps=2",
        "rollout.tasks_per_step=4",
        "rollout.group_size=2", "rollout.max_tokens=6", "eval.every=0", "engine.kind=transformers",
    ]  # fmt: skip
    (tmp_path / "broken").touch()
    done = subprocess.run(
        [ENVGYM, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert "8 of 8 episodes failed; the most common failure is environment: ConnectionError: the world is gone" in line
    assert "resume" not in line  # no step is taken yet: there is nothing in a checkpoint
    run = Run(tmp_path / "runs" / "fragile", "")
    assert (run.summary["status"], run.summary["steps"]) == ("failed", 0)
    assert run.summary["failures"] == {"environment": 12}  # a round of 8, and 4 places filled anew
    assert (run.summary["played_again"], run.summary["refills"]) == (4, 4)
    (tmp_path / "broken").unlink()
    program(tmp_path, "train", "--resume", "runs/fragile")
    assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
    assert run.metrics[-1]["length/max"] > 6  # two turns of at most 6 tokens
