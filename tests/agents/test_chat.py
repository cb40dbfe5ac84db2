"""The chat agent: episodes played by messages, with an engine that says what the test wants."""

import asyncio

import pytest

import envgym
from envgym.agents.chat import ChatAgent
from envgym.engine import ChatEngine, ChatReply, SamplingParams
from envgym.env import EnvSpec
from envgym.episodes.record import from_record, to_record
from envgym.errors import InvalidOutcome, PromptTooLong
from envgym.render import NoRenderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Message, Observation, Status, StopReason, Task, TextPart, ToolCall, ToolSpec

TOOL = ToolSpec("look", "Look.", {"type": "object", "properties": {}})


class Scripted(ChatEngine):
    """Gives prepared replies, or raises prepared errors, in order; remembers what it was asked."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []

    async def chat(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def said(text, *calls, stop=StopReason.STOP, used=(10, 3)):
    return ChatReply(Message("assistant", (TextPart(text),), calls), stop, *used)


class Counting(envgym.Env):
    """Wants three turns; pays 0.25 for each and answers with what it was told."""

    tools = (TOOL,)

    async def reset(self, *, seed=None, options=None):
        self.turns, self.actions = 0, []
        type(self).last = self
        return Observation(messages=(Message("system", "Count."), Message("user", "1?")), tools=self.tools), {}

    async def step(self, action):
        self.turns += 1
        self.actions.append(action)
        if action.tool_calls:
            observation = [
                {"role": "tool", "content": call.error or "seen", "tool_call_id": call.id, "name": call.name or "none"}
                for call in action.tool_calls
            ]
        else:
            observation = f"and {self.turns + 1}?"
        sampling = {"max_tokens": 5} if self.turns == 1 else None
        if isinstance(observation, str):
            observation = Observation(text=observation, sampling=sampling)
        info = {"metrics": {"turns_seen": self.turns}, "answer": action.text}
        return observation, 0.25, self.turns == 3, False, info


def play(engine, env=Counting, deterministic=False, **settings):
    spec = EnvSpec("counting", env)
    agent = ChatAgent(NoRenderer(), ChatAgent.Config(**settings))
    config = RolloutConfig(retries=0, refills=0)
    runner = Runner(spec, agent, engine, config, max_model_len=0, seed=0, deterministic=deterministic)
    sampling = SamplingParams(max_tokens=100)
    [group] = asyncio.run(runner.roll_out([Task("t")], SamplingPlan("eval", sampling, 1)))
    return group.episodes[0]


def test_an_episode_is_a_conversation_and_one_row_of_turns():
    engine = Scripted(said("one"), said("two"), said("three"))
    episode = play(engine)
    assert episode.outcome.status is Status.COMPLETED
    assert [(m.role, m.text) for m in episode.messages] == [
        ("system", "Count."), ("user", "1?"), ("assistant", "one"), ("user", "and 2?"), ("assistant", "two"),
        ("user", "and 3?"), ("assistant", "three"), ("user", "and 4?"),
    ]  # fmt: skip
    assert (episode.reward, episode.score, episode.answer) == (0.75, 0.75, "three")
    [row] = episode.rows
    assert (row.segments, [turn.reward for turn in row.turns]) == ([], [0.25] * 3)
    assert episode.metrics == {"turns_seen": 3, "prompt_tokens": 30, "completion_tokens": 9}
    assert all(len(action.token_ids) == 0 for action in Counting.last.actions)
    # Each turn was asked with everything said before it, the environment's wishes for it, and the tools.
    assert [len(request.messages) for request in engine.requests] == [2, 4, 6]
    assert [request.sampling.max_tokens for request in engine.requests] == [100, 5, 100]
    assert [request.tools for request in engine.requests] == [(TOOL,)] * 3
    assert len({request.id for request in engine.requests}) == 3
    assert from_record(to_record(episode)) == episode


def test_tool_calls_reach_the_environment_broken_ones_too():
    broken = ToolCall("b", "look", error="The tool call is not valid JSON.")
    engine = Scripted(said("", ToolCall("a", "look"), broken), said("", ToolCall("c", "look")), said("done"))
    episode = play(engine)
    assert episode.outcome.status is Status.COMPLETED
    assert [call.error for call in Counting.last.actions[0].tool_calls] == ["", "The tool call is not valid JSON."]
    results = [(m.tool_call_id, m.text) for m in engine.requests[1].messages[-2:]]
    assert results == [("a", "seen"), ("b", "The tool call is not valid JSON.")]
    assert engine.requests[2].messages[-2].tool_calls == (ToolCall("c", "look"),)


def test_tools_may_be_left_out():
    engine = Scripted(said("one"), said("two"), said("three"))
    play(engine, tools=False)
    assert [request.tools for request in engine.requests] == [()] * 3


@pytest.mark.parametrize(
    ("replies", "settings", "outcome", "n_turns"),
    [
        ([said("one"), said("two")], {"max_turns": 2}, ("truncated", "turns"), 2),
        ([said("one"), said("two")], {"max_tokens": 6}, ("truncated", "tokens"), 2),
        ([said("one"), said("two"), said("th", stop=StopReason.LENGTH)], {}, ("truncated", "length"), 3),
        ([said("o", stop=StopReason.LENGTH), said("two"), said("three")], {}, ("completed", ""), 3),
        ([said("one"), PromptTooLong("full")], {}, ("truncated", "context"), 1),
        ([PromptTooLong("full")], {}, ("failed", "prompt_too_long"), 0),
        ([said("one"), InvalidOutcome("engine", "gone")], {}, ("failed", "engine"), 1),
        ([said("one", used=(None, None))], {"max_tokens": 6}, ("failed", "engine"), 1),
    ],
)
def test_limits_and_failures(replies, settings, outcome, n_turns):
    episode = play(Scripted(*replies), **settings)
    assert (episode.outcome.status.value, episode.outcome.reason) == outcome
    assert sum(len(row.turns) for row in episode.rows) == n_turns
    assert episode.score == (None if episode.failed else 0.25 * n_turns)


def test_a_budget_of_the_episode_bounds_each_turn():
    engine = Scripted(said("one"), said("two"), said("three"))
    play(engine, max_tokens=10)
    assert [request.sampling.max_tokens for request in engine.requests] == [10, 5, 4]


def test_each_turn_has_a_seed_of_its_own_which_is_the_same_again():
    engines = [Scripted(said("one"), said("two"), said("three")) for _ in range(2)]
    for engine in engines:
        play(engine, deterministic=True)
    seeds = [[request.sampling.seed for request in engine.requests] for engine in engines]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], None}) == 4


def test_tokens_that_were_not_all_counted_are_not_summed():
    episode = play(Scripted(said("one"), said("two", used=(10, None)), said("three")))
    assert episode.metrics == {"turns_seen": 3, "prompt_tokens": 30}


class Mute(envgym.Env):
    """Begins with nothing said."""

    async def reset(self, *, seed=None, options=None):
        return (), {}

    async def step(self, action):
        raise AssertionError("it is never asked")


def test_an_environment_that_says_nothing_at_first_is_at_fault():
    engine = Scripted()
    assert play(engine, Mute).outcome.reason == "invalid_environment"
    assert engine.requests == []
