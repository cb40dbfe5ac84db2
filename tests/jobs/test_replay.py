"""`envgym replay`: what an environment does when a run's recorded actions are run again in it."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from envgym.agent import Agent, AgentConfig
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.engine import SamplingParams
from envgym.episodes.record import write_rollouts
from envgym.errors import ConfigError
from envgym.render import NoRenderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.rollout.scripted import ScriptedEpisode, action_of, script_of
from envgym.run_folder import RunFolder
from envgym.services import start_services
from envgym.types import Action, Message, Outcome
from tests.check.test_shipped import SHIPPED, TAKE_DATA, data, judgement, settings_of
from tests.programs import ENVGYM

GAME = '''
import random

import envgym


class Game(envgym.Env):
    """Say three words; each is answered with a number that depends on the seed and on the words so far."""

    async def reset(self, *, seed=None, options=None):
        self.random, self.words = random.Random(seed), []
        return "begin", {}

    async def step(self, action):
        self.words.append(action.text)
        number = self.random.randrange(1000) + len(action.text)
        is_over = len(self.words) == 3
        info = {"score": 0.5, "answer": action.text, "metrics": {"number": float(number)}} if is_over else {}
        return f"{action.text}: {number}", float(number) / 2000, is_over, False, info
'''


class Says(Agent):
    async def run(self, env, task, sampler, *, seed):
        turns = [Action(f"{word} {task.id} {seed}") for word in ("a", "b", "c")]
        episode = await ScriptedEpisode(task, seed, script_of(turns)).play(env)
        if task.id.endswith("1"):  # as agents that do not record what follows the last turn
            episode.messages.pop()
        return episode


async def episodes_of(spec, agent, step):
    """Episodes of a step with three tasks, two of each."""
    tasks = [await spec.tasks("train").get(number) for number in range(3)]
    settings = {"max_model_len": 64, "seed": 0, "deterministic": True}
    runner = Runner(spec, agent, None, RolloutConfig(), **settings)
    plan = SamplingPlan(f"step-{step:06d}-0", SamplingParams(max_tokens=1), 2, "group")
    return [episode for group in await runner.roll_out(tasks, plan) for episode in group.episodes]


def run_folder(settings):
    """The folder of a run with these settings that has no step yet."""
    config = resolve(settings)
    folder = RunFolder(Path("runs", settings["name"]).absolute())
    folder.create()
    (folder.path / "config.yaml").write_text(config.to_yaml())
    return folder, config.stages[0].make_spec()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of the game with two steps; returns a function that saves it again with changed episodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    folder, made = run_folder({"env": "game.py:Game", "name": "game", "steps": 2})

    async def episodes(step):
        async with made as spec:
            return await episodes_of(spec, Says(NoRenderer(), AgentConfig()), step)

    recorded = {step: asyncio.run(episodes(step)) for step in (1, 2)}
    for step, of_step in recorded.items():
        write_rollouts(folder.rollout_file(step), of_step)

    def save(change):
        change(recorded[2])
        write_rollouts(folder.rollout_file(2), recorded[2])

    return save


class Answers(Agent):
    """Takes the turns of a demonstration of its environment, and for the second member other words before them."""

    def __init__(self, spec):
        super().__init__(NoRenderer(), AgentConfig())
        self.spec = spec

    async def run(self, env, task, sampler, *, seed):
        try:
            turns = self.spec.spec_for(task).demonstrations(task, seed)
        except ConfigError:  # it has none
            turns = [str(task.answer)] * 9
        actions = [*[action_of(f"no, {seed}", ()) for _ in range(seed % 2)], *[action_of(turn, ()) for turn in turns]]
        return await ScriptedEpisode(task, seed, script_of(actions)).play(env)


def replay(capsys, *words, status):
    assert main(["replay", "game", *words]) == status
    return capsys.readouterr().out.partition("scoring\n")[2]


def replay_changed(tmp_path, old, new):
    """The output for another version of the game's code."""
    (tmp_path / "game.py").write_text(GAME.replace(old, new))
    done = subprocess.run([ENVGYM, "replay", "game"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_an_environment_that_repeats(run, capsys):
    assert "6 of 6 episodes of runs/game/rollouts/step_000002.parquet repeat exactly" in replay(capsys, status=0)
    assert "step_000001" in replay(capsys, "--step", "1", status=0)
    out = replay(capsys, "--step", "1", "--episode", "step-000001-0/00002:001:0", status=0)
    assert out.endswith("1 of 1 episodes of runs/game/rollouts/step_000001.parquet repeat exactly\n")


def test_a_stage_of_a_run_is_replayed_by_its_folder(run, capsys, tmp_path):
    folder = tmp_path / "runs" / "game"
    settings = {"env": "game.py:Game", "recipe": "sft_grpo", "name": "game"}
    (folder / "config.yaml").write_text(resolve(settings).to_yaml())
    for name in ("1-sft/model", "2-grpo"):
        (folder / name).mkdir(parents=True)
    (folder / "1-sft" / "model" / "config.json").write_text("{}")
    (folder / "rollouts").rename(folder / "2-grpo" / "rollouts")
    for name in ("game", "runs/game/2-grpo"):
        assert main(["replay", name, "--step", "1"]) == 0
        assert "6 of 6 episodes of runs/game/2-grpo/rollouts/step_000001.parquet repeat" in capsys.readouterr().out
    assert main(["replay", "runs/game/1-sft"]) == 2
    assert "runs/game/1-sft holds no episodes: it has taken no step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.messages.__setitem__(2, Message("user", "x")), r"after turn 1 it observed 'x', and now 'a "),
        (lambda e: e.messages.__setitem__(0, Message("user", "x")), "at the start it observed 'x', and now 'begin'"),
        (lambda e: setattr(e.rows[0].turns[1], "reward", 0.75), "turn 2 had the reward 0.75, and now "),
        (lambda e: setattr(e, "reward", 0.75), "reward was 0.75, and is "),
        (lambda e: setattr(e, "score", 0.75), "score was 0.75, and is 0.5"),
        (lambda e: setattr(e, "answer", "x"), "answer was x, and is c "),
        (lambda e: e.metrics.update(number=0.5), "metric number was 0.5, and is "),
        (lambda e: setattr(e, "outcome", Outcome.truncate("environment")), "end was truncated environment, and is com"),
    ],
)
def test_a_difference_is_named(run, capsys, change, says):
    run(lambda episodes: change(episodes[3]))
    out = replay(capsys, status=1)
    assert out.startswith("step-000002-0/00001:001:0 (task seed-1): ")
    assert says in out
    assert "5 of 6 episodes" in out


def test_an_environment_that_ignores_its_seed_is_seen(run, tmp_path):
    out = replay_changed(tmp_path, "random.Random(seed)", "random.Random()")
    assert "the environment's code changed since 6 of them were recorded" in out
    assert "0 of 6 episodes" in out


def test_failures_are_not_run_again_and_new_ones_are_differences(run, capsys, tmp_path):
    run(lambda episodes: setattr(episodes[0], "outcome", Outcome.fail("environment", "broken")))
    out = replay(capsys, status=0)
    assert "1 failed when they were recorded (environment), and are not replayed" in out
    assert "5 of 5 episodes" in out
    out = replay_changed(tmp_path, "is_over = ", "1 / (len(self.words) - 2)\n        is_over = ")
    assert "it fails: environment: ZeroDivisionError" in out
    assert "0 of 5 episodes" in out
    assert "it ends after turn 2 of 3" in replay_changed(tmp_path, "== 3", "== 2")


def test_what_cannot_be_replayed_says_so(run, capsys, tmp_path):
    def error(*words):
        assert main(["replay", *words]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        return line

    assert "has no episodes of step 3, but of steps 1 to 2" in error("game", "--step", "3")
    assert "has no episode 'x'" in error("game", "--episode", "x")
    assert "there is no run" in error("nothing")
    assert "is not a run" in error("game.py")
    for name in ("config.yaml", "episodes.jsonl"):
        (tmp_path / "evals" / "first").mkdir(parents=True, exist_ok=True)
        (tmp_path / "evals" / "first" / name).write_text("suite: null\n")
    assert "evals/first is not a run (see: envgym runs)" in error("evals/first")
    config = resolve({"env": "game.py:Game", "agent": {"name": "external", "command": ["true"]}, "name": "game"})
    (tmp_path / "runs" / "game" / "config.yaml").write_text(config.to_yaml())
    assert "episodes of agent external cannot be replayed: its turns are recorded" in error("game")
    for step in (1, 2):
        RunFolder(tmp_path / "runs" / "game").rollout_file(step).unlink()
    assert "holds no episodes" in error("game")


@pytest.mark.slow
@pytest.mark.parametrize("id", sorted({*SHIPPED} - {"recorded-v0"}))  # of which nothing is sampled
def test_what_ships_repeats(id, tmp_path, monkeypatch, capsys, serving, tiny_reward_model):
    monkeypatch.chdir(tmp_path)

    async def replayed():
        async with serving(judgement) as url:
            settings = settings_of(id, url, tmp_path, tiny_reward_model)
            rows = data(tmp_path, id) if id in TAKE_DATA else {}
            folder, made = run_folder({"env": {"name": id, **settings}, "name": "shipped", "steps": 1, **rows})
            async with made as spec, start_services(spec, eager=False):
                episodes = await episodes_of(spec, Answers(spec), 1)
            write_rollouts(folder.rollout_file(1), episodes)
            assert not [episode.outcome for episode in episodes if episode.reward is None]
            return await asyncio.to_thread(main, ["replay", "shipped"])

    assert asyncio.run(replayed()) == 0
    assert "6 of 6 episodes of runs/shipped/rollouts/step_000001.parquet repeat exactly" in capsys.readouterr().out
