"""Episodes of a script instead of a policy."""

import asyncio

import pytest

from envgym.env import Env, EnvSpec
from envgym.rollout.episode import run_episode
from envgym.rollout.runner import score_group
from envgym.rollout.scripted import Scripted, ScriptedEpisode, script_of
from envgym.types import Action, Group, Limit, Message, Outcome, StopReason, Task, ToolCall

TASK = Task("t")


class Counts(Env):
    """Rewards each turn with its number; completes at `stop`, truncates at `enough`, and raises at `break`."""

    closed = 0

    async def reset(self, *, seed=None, options=None):
        self.n = 0
        return f"seed {seed}", {"seed": seed}

    async def step(self, action):
        self.n += 1
        if action.text == "break":
            raise KeyError("board")
        metrics = {"calls": len(action.tool_calls)}
        return str(self.n), float(self.n), action.text == "stop", action.text == "enough", {"metrics": metrics}

    async def close(self):
        Counts.closed += 1


class Ranked(EnvSpec):
    env_class = Counts

    async def score_group(self, task, episodes):
        return [0.5 for _ in episodes]


def play(script, spec=None, **settings):
    episode = ScriptedEpisode(TASK, 7, script, **settings)
    return episode, asyncio.run(run_episode(spec or EnvSpec("Counts-v0", Counts), TASK, episode.play, 10.0))


def say(*texts):
    return script_of([Action(text, tuple(text.encode())) for text in texts])


@pytest.mark.parametrize(
    ("texts", "outcome", "reward"),
    [
        (("on", "stop", "unused"), Outcome.finish(), 3.0),
        (("enough",), Outcome.truncate(Limit.ENVIRONMENT), 1.0),
        (("on",), Outcome.truncate(Limit.TURNS), 1.0),
        ((), Outcome.truncate(Limit.TURNS), None),
    ],
)
def test_an_episode_ends_with_the_environment_or_with_its_script(texts, outcome, reward):
    closed = Counts.closed
    scripted, episode = play(say(*texts))
    assert (episode.outcome, episode.reward) == (outcome, reward)
    assert Counts.closed == closed + 1
    assert (scripted.opening.text, scripted.info) == ("seed 7", {"seed": 7})
    transcript = [message.text for message in episode.messages]
    assert transcript == [
        "seed 7",
        *(text for n, turn in enumerate(scripted.turns, 1) for text in (turn.action.text, str(n))),
    ]


def test_a_script_that_ends_early_may_set_the_outcome():
    assert play(say("on"), unfinished=Outcome.truncate("left"))[1].outcome.reason == "left"


def test_a_script_may_be_a_function_of_the_last_observation():
    def echo(turn, observation):
        return Action(observation.text) if turn < 3 else None

    scripted, _ = play(echo)
    assert [turn.action.text for turn in scripted.turns] == ["seed 7", "1", "2"]


def test_the_row_holds_the_tokens_and_stop_reasons_of_the_actions():
    call = ToolCall("1", "look", {})
    actions = [Action("a", (1, 2), (call,)), Action("b", (3,), stop_reason=StopReason.LENGTH)]
    _, episode = play(script_of(actions))
    [row] = episode.rows
    actions = [list(segment.token_ids) for segment in row.segments if segment.role == "action"]
    assert actions == [[1, 2], [3]]
    assert [(turn.reward, turn.stop_reason) for turn in row.turns] == [(1.0, "stop"), (2.0, "length")]
    assert (episode.outcome, episode.metrics) == (Outcome.truncate(Limit.LENGTH), {"calls": 0})


def test_an_error_of_the_environment_is_a_failure_and_is_stored():
    scripted, episode = play(say("on", "break", "on"))
    assert (episode.outcome.reason, isinstance(scripted.error, KeyError), len(scripted.turns)) == (
        "environment",
        True,
        1,
    )


def test_a_group_of_one_episode_is_judged_like_any_other():
    _, episode = play(say("stop"), Ranked("Ranked-v0"))
    changed = asyncio.run(score_group(Ranked("Ranked-v0"), Group("g", TASK, [episode]), 10.0))
    assert changed == [episode]
    assert [episode.reward, episode.rows[0].turns[0].reward] == [0.5, 0.5]


def test_the_agent_runs_the_script_of_each_task():
    agent = Scripted(lambda task: ScriptedEpisode(task, 7, say(task.id)))
    spec = EnvSpec("Counts-v0", Counts)

    async def main(task):
        async with spec.make() as env:
            return await agent.run(env, task, None, seed=0)

    assert asyncio.run(main(Task("stop"))).messages == [
        Message("user", "seed 7"), Message("assistant", "stop"), Message("user", "1")
    ]  # fmt: skip
    assert not Scripted.uses_policy
