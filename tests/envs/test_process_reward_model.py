"""process_reward_model: an answer is paid step by step, and read as the model that pays was trained."""

import asyncio
import json
import shutil

import pytest

import envgym
from envgym.agents.replay import Replay
from envgym.cli import main
from envgym.env import CheckedEnv
from envgym.episodes.files import read_episodes
from envgym.errors import ConfigError
from envgym.processes.runtime import InlineRuntime
from envgym.render import load_tokenizer, make_renderer
from envgym.render.renderer import tokens_with
from envgym.services import RewardModel, start_services
from envgym.services.reward_worker import RewardWorker
from envgym.types import Action, Message, StopReason

STEPS = ["1 + 2 is 3.\n", "3 + 4 is 7.\n", "So it is 7.\n"]


@pytest.fixture
def process_model(tiny_reward_model, tmp_path):
    """A reward model as the recipe `prm` leaves it."""
    folder = shutil.copytree(tiny_reward_model, tmp_path / "prm")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "reward_at": "end_of_turn"}))
    return folder


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "add 1, 2 and 4", "steps": STEPS, "labels": [1, 1, 0]}))
    return {"path": str(tmp_path / "rows.jsonl"), "test_fraction": 0}


def test_a_step_is_scored_as_it_was_trained_on(process_model, rows):
    renderer = make_renderer("auto", load_tokenizer(process_model))

    async def replayed():
        async with envgym.spec("recorded", data=rows, separator="\n") as spec, spec.make() as env:
            task = await spec.tasks("train").get(0)
            agent = Replay(renderer, Replay.Config())
            return (await agent.replay(CheckedEnv(env, spec), task, seed=0, recording_index=0)).rows[0]

    row = asyncio.run(replayed())
    worker = RewardWorker(RewardModel(model=str(process_model)))
    asked = {"before": [{"role": "user", "content": "add 1, 2 and 4"}], "steps": STEPS}
    assert worker._encode({**asked, "is_last": True}) == list(row.token_ids)
    first_two = sum(len(segment.token_ids) for segment in row.segments[:3])
    assert worker._encode({**asked, "steps": STEPS[:2], "is_last": False}) == list(row.token_ids)[:first_two]


def test_each_step_is_paid_and_the_worst_is_the_score(process_model, rows):
    async def play():
        settings = {"model": str(process_model), "separator": "\n", "data": rows}
        spec = envgym.spec("process_reward_model", **settings)
        async with spec, start_services(spec, InlineRuntime()), spec.make() as env:
            task = await spec.tasks("train").get(0)
            observation, _ = await env.reset(seed=0, options={"task": task})
            paid = []
            for step in STEPS[:2]:
                answer = await env.step(Action(step, stop_reason=StopReason.STOP))
                paid.append(answer)
            return observation, [*paid, await env.step(Action("So it is 7.", stop_reason=StopReason.STOP))]

    observation, steps = asyncio.run(play())
    assert observation.sampling == {"stop": "\n"}
    assert [(terminated, truncated) for _, _, terminated, truncated, _ in steps] == [(False, False)] * 2 + [
        (True, False)
    ]
    worker = RewardWorker(RewardModel(model=str(process_model)))
    before = [Message("user", "add 1, 2 and 4").as_dict()]
    asked = [{"before": before, "steps": STEPS[:n], "is_last": n == 3} for n in (1, 2, 3)]
    expected = [1 / (1 + 2.718281828459045**-value) for value, _, _ in worker.score(asked)]
    rewards = [reward for _, reward, _, _, _ in steps]
    assert rewards == pytest.approx(expected, abs=1e-6)
    assert len(set(rewards)) == 3
    assert steps[-1][4]["score"] == min(rewards)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_policy_is_trained_on_it(process_model, rows, tiny_model, tmp_path, monkeypatch):
    """Its steps follow each other in one row, with nothing between them."""
    monkeypatch.chdir(tmp_path)
    words = [f"env.model={process_model}", "env.separator=a", f"data.path={rows['path']}", "data.test_fraction=0"]
    words += [
        "engine.kind=transformers",
        "rollout.tasks_per_step=1",
        "rollout.group_size=8",
        "rollout.max_tokens=40",
        "steps=1",
    ]
    words += ["eval.every=0", "--model", str(tiny_model), "--name", "run"]
    assert main(["train", "--env", "process_reward_model", "--learner", "rloo", *words]) == 0
    episodes = read_episodes(tmp_path / "runs" / "run")
    assert any(len(episode.rows[0].turns) > 1 for episode in episodes)
    for episode in episodes:
        [row] = episode.rows
        assert [segment.role for segment in row.segments] == ["prompt"] + ["action"] * len(row.turns)
        assert all(0 < turn.reward < 1 for turn in row.turns[:-1])


def test_a_text_that_no_token_holds_is_refused(tiny_model):
    renderer = make_renderer("auto", load_tokenizer(tiny_model))
    assert all("a" in renderer.text([token]) for token in tokens_with("a", renderer))
    with pytest.raises(envgym.errors.InvalidStep, match="no token of the policy's tokenizer contains"):
        tokens_with("a stop that is much longer than any token", renderer)


def test_without_a_model_it_says_what_it_wants(rows):
    async def set_up():
        async with envgym.spec("process_reward_model", data=rows):
            pass

    with pytest.raises(ConfigError, match=r"which process reward model\? Give env.model=FOLDER"):
        asyncio.run(set_up())


def test_another_reward_model_is_refused(tiny_reward_model):
    with pytest.raises(ConfigError, match="is not a process reward model"):
        RewardWorker(RewardModel(model=str(tiny_reward_model))).score([{"before": [], "steps": ["a"], "is_last": True}])
