"""Things that go wrong with such files where they come from (numbered as in our study of it), and not here."""

import pytest

from envgym.types import Status, StopReason

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.steps = 0

    async def reset(self, states, **kwargs):
        self.observation = states["observation"]
        {reset}

    async def step(self, states, **kwargs):
        self.steps += 1
        {step}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture
def agent_file(write):
    def make(step, reset='return {"observation": states["observation"]}'):
        return write(AGENT.format(step=step, reset=reset))

    return make


def test_1_sampling_parameters_are_no_episodes_but_its_own(play, ok, agent_file, task):
    """Where they are shared, what one episode sets cuts the prompts of the others."""
    file = agent_file(
        """if int(states["action_text"]) % 2:
            states["sampling_params"].max_tokens = 1 + int(states["action_text"])
        return {"rewards": 0.0, "environment_feedback": " more. " * 8, "done": self.steps == 3}""",
        reset="""import random
        return {"observation": "word " * random.Random(id(self)).randint(5, 60)}""",
    )
    groups, engine = play(file, [task()], lambda member, turn: str(member), size=6)
    for member, episode in enumerate(ok(groups, engine)):
        asked = [r for r in engine.engine.requests if r.id.startswith(f"p/00000:{member:03d}")]
        then = 1 + member if member % 2 else 256
        assert [request.sampling.max_tokens for request in asked] == [256, then, then]
        assert engine.engine.prompts(member)[0].startswith("word word"), "no prompt is cut"
        assert len(episode.rows) == 1


def test_2_truncation_is_said(play, ok, agent_file, task):
    step = 'return {"rewards": 0.0, "environment_feedback": " and so on, and so on", "done": self.steps == 9}'
    groups, engine = play(agent_file(step), [task()], "answer", size=1, context=60)
    [episode] = ok(groups, engine)
    assert (episode.outcome.status, episode.outcome.reason) == (Status.TRUNCATED, "context")
    groups, engine = play(agent_file(step), [task()], "a long answer", size=1, sampling={"max_tokens": 3},
                          agent_settings={"max_turns": 2})  # fmt: skip
    [episode] = ok(groups, engine)
    assert (episode.outcome.status, episode.outcome.reason) == (Status.TRUNCATED, "length")
    assert [turn.stop_reason for turn in episode.rows[0].turns] == [StopReason.LENGTH] * 2


def test_3_every_turn_keeps_its_reward(play, ok, agent_file, task):
    step = """return {"rewards": 0.5 * self.steps, "environment_feedback": " ", "done": self.steps == 3,
                **({"scores": 0.75} if self.steps == 2 else {})}"""
    groups, engine = play(agent_file(step), [task()], "x")
    for episode in ok(groups, engine):
        assert [turn.reward for turn in episode.rows[0].turns] == [0.5, 1.0, 1.5]
        assert episode.reward == 3.0
        assert episode.score == 0.75, "the last step gave none"


def test_4_logs_need_not_have_the_same_names_everywhere(play, ok, agent_file, task):
    step = """logs = [{"first": 1}, {}, {"last": [2.0], "note": "text"}][self.steps - 1]
        if states["action_text"] == "odd":
            logs = {"odd": True, "nothing": None}
        return {"rewards": 1.0, "environment_feedback": " ", "done": self.steps == 3,
                **({} if self.steps == 2 else {"extra_logs": logs})}"""
    groups, engine = play(agent_file(step), [task()], lambda member, turn: ["even", "odd"][member])
    assert [episode.metrics for episode in ok(groups, engine)] == [{"first": 1.0, "last": 2.0}, {"odd": 1.0}]


def test_5_what_breaks_is_a_failed_episode_and_everything_is_closed(play, agent_file, task, tmp_path):
    """An exception, a hang that awaits, a hang that does not, the end of the process."""
    step = """what = states["action_text"]
        if what == "raise":
            raise ValueError("broken board")
        if what == "wait":
            import asyncio
            await asyncio.sleep(600)
        return {"rewards": 1.0, "environment_feedback": "", "done": True}

    def close(self):
        print("closed")"""
    answers = ["raise", "wait", "fine", "fine"]
    settings = {"call_timeout": 1.5, "logs": str(tmp_path / "logs")}
    groups, _ = play(agent_file(step), [task()], lambda member, turn: answers[member], size=4, env=settings)
    found = [(e.outcome.reason, e.reward) for e in groups[0].episodes]
    assert found == [("environment", None), ("timeout", None), ("", 1.0), ("", 1.0)]
    assert "ValueError: broken board" in groups[0].episodes[0].outcome.message
    [log] = (tmp_path / "logs").glob("*.log")
    assert log.read_text().count("closed") == 4


@pytest.mark.parametrize("ends", ["while True: pass", "import os; os._exit(3)"])
def test_5_a_process_that_hangs_or_dies_is_replaced(play, ok, write, agent_file, task, tmp_path, monkeypatch, ends):
    """Its other episodes are lost with it, and played again."""
    monkeypatch.setattr("envgym.processes.pool.PING_SECONDS", 0.5)
    step = f"""import pathlib
        mark = pathlib.Path({str(tmp_path)!r}, "mark")
        if not mark.exists():
            mark.touch()
            {ends}
        return {{"rewards": 1.0, "environment_feedback": "", "done": True}}"""
    groups, _ = play(agent_file(step), [task()], "x", size=3, env={"call_timeout": 1.5}, retries=3)
    assert [episode.reward for group in groups for episode in group.episodes] == [1.0] * 3
    assert {lost.outcome.reason for lost in groups[0].superseded} <= {"timeout", "crash"}
    assert groups[0].superseded


@pytest.mark.parametrize("custom", [False, True])
def test_6_a_prompt_is_never_cut(play, write, agent_file, task, custom):
    step = 'return {"rewards": 1.0, "environment_feedback": "", "done": True}'
    file = agent_file(step)
    if custom:
        text = file.read_text()
        file.write_text(
            text
            + "\n    async def execute(self, *args, **kwargs):\n        return await super().execute(*args, **kwargs)\n"
        )
    groups, engine = play(file, [task("A system message that matters. " * 20)], "x", size=1, context=64)
    [episode] = groups[0].episodes
    assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, "prompt_too_long")
    assert engine.engine.requests == []
