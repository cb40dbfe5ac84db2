"""The multi-turn agent: the invariants over random episodes, and every way in which an episode ends."""

import asyncio
import gc
import math
import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym import Action, Env, EnvSpec, spec
from envgym.agents.token_level import MultiTurn, MultiTurnConfig, ToolCalling
from envgym.engine import Generation, SamplingParams
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Message, Observation, Status, StopReason, Task, TextPart, ToolSpec, VersionSpan

LOOK_UP = ToolSpec("look_up", "Look a name up.", {"type": "object", "properties": {"name": {"type": "string"}}})

THINKING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' and not loop.last and '</think>' in "
    "message.content %}{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops earlier thoughts and writes tool calls its own way."""

WORDS = ["", "yes", " no ", "<think>hm</think>answer", "naïve 🙂", "\n\n", "<|im_end|>", "</tool_call>", "�"]
CALLS = [
    '<tool_call>\n{"name": "look_up", "arguments": {"name": "x"}}\n</tool_call>',
    '<tool_call>{"arguments":{"name":"x"},"name":"look_up"}</tool_call> and so on',
    "<tool_call>\n{not json\n</tool_call>",
]


class Babble:
    """An engine that says anything: random ids, words, calls, with and without an end."""

    def __init__(self, tokenizer, seed):
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    async def generate(self, request):
        rng, room = self.rng, request.sampling.max_tokens
        if rng.random() < 0.4:
            ids = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randint(1, 12))]
        else:
            text = "".join(rng.choice([*WORDS, *CALLS]) for _ in range(rng.randint(1, 3)))
            ids = self.tokenizer.encode(text, add_special_tokens=False) or [5]
        if rng.random() < 0.7:
            ids.append(self.tokenizer.eos_token_id)
        cut = len(ids) > room or ids[-1] != self.tokenizer.eos_token_id
        ids = tuple(ids[:room])
        stop = StopReason.LENGTH if cut else StopReason.STOP
        return Generation(ids, tuple(-rng.random() for _ in ids), stop, (VersionSpan(0, 0, len(ids)),))


class Wander(Env):
    """Says anything for a random number of turns: messages, tool results, nothing, raw text."""

    style = "messages"

    async def reset(self, *, seed=None, options=None):
        self.left = self.rng.randint(1, 5)
        first = self.say() if self.style == "text" else Observation((Message("user", self.words()),), None)
        return Observation(first.messages, first.text, None, (LOOK_UP,) if self.style != "text" else ()), {}

    def words(self):
        return " ".join(self.rng.choice(WORDS) for _ in range(3)) + "?"

    def say(self):
        if self.style == "text" or (self.style == "mixed" and self.rng.random() < 0.1):
            return Observation(text=f"\n\nHuman: {self.words()}\n</s>\n\nAssistant: ")
        return Observation((Message("user", self.words()),))

    async def step(self, action):
        self.left -= 1
        results = [Message("tool", (TextPart(self.words()),), (), call.id, call.name) for call in action.tool_calls]
        observation = Observation(tuple(results)) if results else self.say()
        sampling = {"temperature": 0.5} if self.rng.random() < 0.3 else None
        observation = Observation(observation.messages, observation.text, sampling)
        return observation, self.rng.choice([None, 0.5, -1.0]), self.left == 0, False, {}


def renderer_of(folder, template):
    tokenizer = load_tokenizer(str(folder))
    if template:
        tokenizer.chat_template = template
    return make_renderer("text" if template == "" else "chat", tokenizer)


@pytest.fixture(scope="module", params=["chatml", "thinking", "text"])
def renderer(request, tiny_model):
    return renderer_of(tiny_model, {"chatml": None, "thinking": THINKING, "text": ""}[request.param])


@pytest.fixture(scope="module")
def tekken(tekken_folder):
    return renderer_of(tekken_folder, None)


def play(renderer, engine, env_class=Wander, agent=ToolCalling, context=4096, turn_tokens=64, size=2, **settings):
    runner = Runner(
        EnvSpec("Wander-v0", env_class),
        agent(renderer, agent.Config(**settings)),
        engine,
        RolloutConfig(retries=0, refills=0),
        max_model_len=context,
        seed=engine.engine.rng.randrange(99) if hasattr(engine, "engine") else 0,
        deterministic=False,
    )
    sampling = SamplingParams(max_tokens=turn_tokens, stop_token_ids=renderer.stop_token_ids)
    [group] = asyncio.run(runner.roll_out([Task("t")], SamplingPlan("p", sampling, size)))
    return group.episodes


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    style=st.sampled_from(["messages", "mixed", "text"]),
    context=st.sampled_from([90, 4096]),
)
def test_random_episodes_keep_the_invariants(renderer, recording, check_episode, seed, style, context):
    engine = recording(Babble(renderer.tokenizer, seed))
    env_class = type("Wander", (Wander,), {"style": style})
    for episode in play(renderer, engine, env_class, context=context):
        if episode.failed:  # raw text and then messages through a template, or a first prompt that is too long
            assert episode.outcome.reason in ("invalid_environment", "prompt_too_long")
            assert episode.reward is None
        else:
            check_episode(episode, engine.answers)
            assert all(len(row.token_ids) <= context for row in episode.rows)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_episodes_keep_the_invariants_with_a_real_vocabulary(tekken, recording, check_episode, seed):
    engine = recording(Babble(tekken.tokenizer, seed))
    for episode in play(tekken, engine, agent=MultiTurn):
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)


# -- how episodes end -------------------------------------------------------------------------------------


class Says:
    """An engine that says the same words each turn."""

    def __init__(self, renderer, text="ok", length=False):
        ids = renderer.tokenizer.encode(text, add_special_tokens=False)
        self.ids = tuple(ids if length else [*ids, renderer.tokenizer.eos_token_id])
        self.stop = StopReason.LENGTH if length else StopReason.STOP
        self.requests = []

    async def generate(self, request):
        self.requests.append(replace(request, token_ids=request.token_ids[:]))  # the context grows
        return Generation(self.ids, (-0.5,) * len(self.ids), self.stop, (VersionSpan(0, 0, len(self.ids)),))


def endless(reward=0.25, **flags):
    class Endless(Env):
        async def reset(self, *, seed=None, options=None):
            self.turn = 0
            return [Message("user", "go")], {}

        async def step(self, action):
            self.turn += 1
            ends = self.turn == flags.get("after", 10**9)
            info = {"score": 0.5, "metrics": {"turn": self.turn}} if flags.get("scored") else {}
            return (
                [Message("user", f"go on {self.turn}")],
                reward,
                ends and not flags.get("truncates"),
                ends and bool(flags.get("truncates")),
                info,
            )

    return Endless


@pytest.fixture(scope="module")
def chatml(tiny_model):
    return renderer_of(tiny_model, None)


@pytest.mark.parametrize(
    ("flags", "settings", "context", "reason", "turns"),
    [
        ({"after": 3}, {}, 4096, "", 3),
        ({"after": 3, "truncates": True}, {}, 4096, "environment", 3),
        ({}, {"max_turns": 2}, 4096, "turns", 2),
        ({}, {"max_tokens": 7}, 4096, "tokens", 3),
        ({}, {}, 96, "context", 4),
    ],
)
def test_an_episode_ends_for_a_reason(chatml, flags, settings, context, reason, turns):
    [episode] = play(chatml, Says(chatml), endless(**flags), context=context, size=1, **settings)
    assert (episode.outcome.status, episode.outcome.reason) == (
        Status.TRUNCATED if reason else Status.COMPLETED,
        reason,
    )
    said = [turn for row in episode.rows for turn in row.turns]
    assert episode.reward == 0.25 * len(said)
    if reason != "context":
        assert len(said) == turns


def test_the_last_score_and_metrics_stand_and_rewards_are_kept_by_turn(chatml):
    [episode] = play(chatml, Says(chatml), endless(after=3, scored=True), size=1)
    assert (episode.reward, episode.score, episode.metrics) == (0.75, 0.5, {"turn": 3.0})
    assert [turn.reward for turn in episode.rows[0].turns] == [0.25, 0.25, 0.25]
    assert [m.text for m in episode.messages] == ["go", "ok", "go on 1", "ok", "go on 2", "ok", "go on 3"]


def test_a_turn_cut_by_its_limit_goes_on_with_the_templates_end_of_turn(chatml):
    [episode] = play(chatml, Says(chatml, length=True), endless(after=2), size=1)
    text = chatml.tokenizer.decode(episode.rows[0].token_ids)
    expected = (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\ngo on 1<|im_end|>\n"
        "<|im_start|>assistant\nok"
    )
    assert text == expected
    assert episode.outcome.reason == "length"  # the last answer was cut as well


def test_the_first_prompt_is_never_cut(chatml):
    [episode] = play(chatml, Says(chatml), endless(), context=8, size=1)
    assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, "prompt_too_long")


def test_no_two_episodes_share_sampling_parameters(chatml):
    class Warmer(Env):
        async def reset(self, *, seed=None, options=None):
            return Observation((Message("user", "go"),), sampling={"max_tokens": 5}), {}

        async def step(self, action):
            return Observation((Message("user", "on"),), sampling={"temperature": 0.5}), 1.0, False, False, {}

    engine = Says(chatml)
    play(chatml, engine, Warmer, max_turns=3, size=4)
    asked = [(request.sampling.max_tokens, request.sampling.temperature) for request in engine.requests]
    assert sorted(asked) == [(5, 1.0)] * 4 + [(64, 0.5)] * 8


@pytest.mark.parametrize("sampling", [{"seed": 2**70}, {"temperature": math.nan}, {"stop": 5}, {"stop": ""}])
def test_impossible_sampling_parameters_fail_their_episode_alone(chatml, sampling):
    class Odd(Env):
        n_made = 0

        async def reset(self, *, seed=None, options=None):
            Odd.n_made += 1
            return Observation((Message("user", "go"),), sampling=sampling if Odd.n_made == 2 else None), {}

        async def step(self, action):
            return None, 1.0, True, False, {}

    episodes = play(chatml, Says(chatml), Odd, size=4)
    assert sorted((e.outcome.reason, e.reward) for e in episodes if e.failed) == [("invalid_environment", None)]
    assert [e.reward for e in episodes if not e.failed] == [1.0] * 3


def test_tools_are_offered_and_calls_answered_by_the_tool_calling_agent_alone(chatml):
    class Library(Env):
        async def reset(self, *, seed=None, options=None):
            return Observation((Message("user", "What is x?"),), tools=(LOOK_UP,)), {}

        async def step(self, action: Action):
            return None, float(len(action.tool_calls)), True, False, {}

    called = '<tool_call>\n{"name": "look_up", "arguments": {"name": "x"}}\n</tool_call>'
    renderer = renderer_of(chatml.tokenizer.name_or_path, THINKING)
    rewards, prompts = [], []
    for agent in (ToolCalling, MultiTurn):
        engine = Says(renderer, called)
        [episode] = play(renderer, engine, Library, agent=agent, size=1)
        rewards.append(episode.reward)
        prompts.append("look_up" in renderer.tokenizer.decode(list(engine.requests[0].token_ids)))
    assert (rewards, prompts) == ([1.0, 0.0], [True, False])


def test_an_environment_is_told_what_is_said_beside_the_calls(chatml):
    seen = []

    class Library(Env):
        async def reset(self, *, seed=None, options=None):
            return Observation((Message("user", "What is x?"),), tools=(LOOK_UP,)), {}

        async def step(self, action: Action):
            seen.append((action.text, action.content))
            return None, 0.0, True, False, {}

    renderer = renderer_of(chatml.tokenizer.name_or_path, THINKING)
    called = 'I look.<tool_call>\n{"name": "look_up", "arguments": {"name": "x"}}\n</tool_call>'
    for said in (called, "No."):
        play(renderer, Says(renderer, said), Library, agent=ToolCalling, size=1)
    assert seen == [(called, "I look."), ("No.", None)]


def test_an_episode_takes_as_many_bytes_as_is_counted_for_it(chatml):
    """The smallest ones of a shipped environment, held as a step holds them."""

    class Ends:
        async def generate(self, request):
            await asyncio.sleep(0)
            return Generation(request.sampling.stop_token_ids[:1], (-1.0,), StopReason.STOP, ())

    async def held(n):
        sums = spec("math_verify")
        agent = MultiTurn(chatml, MultiTurnConfig())
        runner = Runner(sums, agent, Ends(), RolloutConfig(), max_model_len=512, seed=0, deterministic=False)
        sampling, task = SamplingParams(8, stop_token_ids=chatml.stop_token_ids), await sums.tasks("train").get(0)
        await runner.roll_out([task], SamplingPlan("warm-up", sampling, 1))
        gc.collect()
        tracemalloc.start()
        try:
            [group] = await runner.roll_out([task], SamplingPlan("step-000001-0", sampling, n))
            gc.collect()
            assert len(group.episodes) == n
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert asyncio.run(held(300)) / 300 == pytest.approx(4_500, rel=0.3)  # as docs/training/train.md says
