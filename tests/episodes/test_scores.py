"""Scores that stand in for those an environment does not give: rewards, where they all lie in [0, 1]."""

import asyncio
from types import SimpleNamespace

import pytest

from envgym.agent import Agent, AgentConfig
from envgym.config.schema import CheckpointConfig
from envgym.engine import SamplingParams
from envgym.env import Env, EnvSpec
from envgym.episodes.scores import is_flat, reward_as_score
from envgym.errors import RunError
from envgym.evaluation.result import result_of
from envgym.evaluation.table import evaluation_text
from envgym.jobs.rollout import best_of
from envgym.monitoring.metrics import held_out_metrics, rollout_metrics
from envgym.monitoring.report import score, tasks_behind
from envgym.rollout.buffer import Buffer
from envgym.rollout.config import FilterConfig, RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.run_folder import RunFolder
from envgym.training.checkpoints import Checkpoints, Progress
from envgym.training.components import Components
from envgym.transcript import Transcript
from envgym.types import Action, Outcome, Row, Segment, StopReason, Task, Turn

PLAN = SamplingPlan("p", SamplingParams(max_tokens=1), 1)


class Pays(Env):
    """Pays what the task says, with the score that it says, if any."""

    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        return "", {}

    async def step(self, action):
        said = {} if "score" not in self.task.fields else {"score": self.task.fields["score"]}
        return "", self.task.fields["reward"], True, False, said


class OneTurn(Agent):
    uses_policy = False

    async def run(self, env, task, engine, *, seed):
        await env.reset(seed=seed, options={"task": task})
        transcript = Transcript(None)
        transcript.rows = [Row([Segment("action", [1])], turns=[Turn(None, StopReason.STOP)])]
        _, reward, _, _, info = await env.step(Action("a"))
        transcript.add_reward(reward, info)
        return transcript.episode(task, Outcome.finish())


def runner_of(env=Pays):
    spec = type("Spec", (EnvSpec,), {"env_class": env})("Pays-v0")
    agent = OneTurn(None, AgentConfig())
    return Runner(spec, agent, None, RolloutConfig(), max_model_len=0, seed=0, deterministic=False)


def play(*rewards, runner=None, told=None, **said):
    tasks = [Task(f"t{number}", fields={"reward": reward, **said}) for number, reward in enumerate(rewards)]
    return asyncio.run((runner or runner_of()).roll_out(tasks, PLAN, on_episode=told))


def scores(groups):
    return [episode.score for group in groups for episode in group.episodes]


def test_the_wins_of_a_game_that_pays_1_and_minus_1_are_not_its_score():
    """Of 256 episodes 72 are won, which used to be a score of 1.000."""
    groups = play(*[1.0] * 72, *[-1.0] * 184)
    assert set(scores(groups)) == {None}
    result = result_of(groups)
    assert (result["score"], result["success"]["rate"], result["unscored"]) == (None, None, 256)
    assert result["reward"]["score"] == pytest.approx(-0.4375)
    record = held_out_metrics(result)
    assert (record["eval/score"], record["eval/success_rate"], record["eval/reward"]) == (None, None, -0.4375)
    assert "score/mean" not in rollout_metrics(groups)
    assert score(result).startswith("no score, reward -0.438 [")
    assert tasks_behind(result) == 256


def test_the_table_of_an_evaluation_shows_the_reward_and_says_why_there_is_no_score(tmp_path):
    result = {**result_of(play(1.0, -1.0, -1.0)), "weight": 1.0}
    whole = {**result, "envs": {"game": result}, "suite": None, "model": "m", "seconds": 1.0}
    text = evaluation_text(whole, tmp_path)
    header, row = text.splitlines()[:2]
    assert header.split()[:4] == ["environment", "score", "reward", "tasks"]
    assert row.split()[:3] == ["game", "none", "-0.333"]
    assert "none: game gives none, and its rewards are not all in [0, 1]" in text


@pytest.mark.parametrize("rewards", [(0.0, 1.0, 0.25), (1 / 3 + 1 / 3 + 1 / 3, 1.0000002, 0.0)])
def test_rewards_that_all_lie_in_0_to_1_but_for_rounding_are_scores(rewards):
    found = scores(play(*rewards))
    assert found == pytest.approx(rewards, abs=1e-6)
    assert max(found) == 1.0 or max(found) < 1


def test_an_environments_own_scores_stay_whatever_its_rewards_are():
    assert scores(play(-3.0, 0.5, 7.0, score=0.25)) == [0.25] * 3
    assert scores(play(-1.0, 1.0, score=1.0)) == [1.0, 1.0]


def test_that_rewards_are_no_scores_is_known_from_then_on_and_of_that_environment_alone():
    runner = runner_of()
    assert scores(play(1.0, 0.0, runner=runner)) == [1.0, 0.0]
    assert scores(play(1.0, -1.0, runner=runner)) == [None, None]
    assert scores(play(1.0, 1.0, runner=runner)) == [None, None]
    other = [Task("t", fields={"reward": 1.0}, env="other"), Task("t", fields={"reward": -1.0}, env="game")]
    assert scores(asyncio.run(runner_of().roll_out(other, PLAN))) == [1.0, None]


def test_episodes_that_lose_their_score_are_told_of_again_and_stay_so_when_kept():
    told, runner = [], runner_of()
    groups = play(1.0, -1.0, told=lambda episode: told.append((episode.task.id, episode.score)), runner=runner)
    assert sorted(told[:2], key=str) == [("t0", 1.0), ("t1", None)]
    assert told[2:] == [("t0", None)]
    assert not any(episode.score_is_reward for group in groups for episode in group.episodes)


def test_the_best_of_a_group_goes_by_rewards_that_are_no_scores():
    episodes = [episode for group in play(0.5, 3.0, 1.0) for episode in group.episodes]
    assert best_of(episodes).reward == 3.0


def test_filters_do_not_see_the_winners_alone():
    game = play(1.0, -1.0, -1.0, 1.0)
    game[0].episodes = [episode for group in game for episode in group.episodes]
    buffer = Buffer(2, needs_reward=True, filter=FilterConfig(zero_variance=True))
    assert buffer.add(game[:1]) == 1
    with pytest.raises(RunError, match=r"its rewards are not all in \[0, 1\]"):
        Buffer(2, needs_reward=True, filter=FilterConfig(min_score=0.5)).add(game[:1])


def test_a_member_without_a_score_does_not_make_a_group_flat():
    groups = [*play(1.0, score=1.0), *play(0.25)]
    groups[1].episodes[0].score = None
    groups[0].episodes += groups[1].episodes
    buffer = Buffer(2, needs_reward=True, filter=FilterConfig(zero_variance=True))
    assert buffer.add(groups[:1]) == 1


@pytest.mark.parametrize(
    ("members", "flat"),
    [
        ([(1.0, 0.5), (1.0, 0.5)], True),
        ([(1.0, 0.5), (1.0, 0.25)], False),
        ([(1.0, 0.5), (0.0, 0.5)], True),  # rewards differ, scores do not: scores are what filters go by
        ([(1.0, 1.0), (1.0, None)], True),  # one has no score, so rewards are compared
        ([(1.0, 1.0), (0.0, None)], False),
        ([(2.0, None), (2.0, None)], True),
        ([], True),
    ],
)
def test_a_group_is_flat_by_scores_or_where_one_is_missing_by_rewards(members, flat):
    assert is_flat([SimpleNamespace(reward=reward, score=score) for reward, score in members]) is flat


def test_a_run_that_goes_on_knows_whose_rewards_are_no_scores(tmp_path):
    """Checkpoints of components that hold nothing else."""

    def checkpoints(unscored):
        nothing = SimpleNamespace(state=dict, load_state=lambda state: None, roles={})
        nothing.state_dict, nothing.load_state_dict = nothing.state, nothing.load_state
        runner = SimpleNamespace(envs_without_scores=unscored)
        components = Components(nothing, runner, {}, SamplingParams(max_tokens=1))
        return Checkpoints(CheckpointConfig(), RunFolder(tmp_path), components, Progress(), nothing, nothing)

    after: set[str] = set()
    asyncio.run(checkpoints(after).load(tmp_path, checkpoints({"game"}).state()))
    assert after == {"game"}


@pytest.mark.parametrize(
    ("reward", "expected"), [(None, None), (0.5, 0.5), (-1e-7, 0.0), (1 + 1e-7, 1.0), (-0.1, None), (1.1, None)]
)
def test_a_reward_as_a_score(reward, expected):
    assert reward_as_score(reward) == expected
