"""Branches: episodes that continue others of their group from one of their turns (`rollout.branches`)."""

import asyncio
import copy
import itertools
import random
import socket
from dataclasses import replace

import pytest

import envgym
from envgym import Env, EnvSpec
from envgym.agents.token_level import MultiTurn, ToolCalling
from envgym.engine import Generation, SamplingParams
from envgym.engines.spec import EngineSpec
from envgym.engines.transformers import TransformersEngine
from envgym.env.tools import ToolEnvSpec
from envgym.episodes.record import from_record, read_rollouts, to_record, write_rollouts
from envgym.errors import InvalidStep
from envgym.monitoring.metrics import rollout_metrics
from envgym.processes import event_loop
from envgym.remote.admission import ServerLimits
from envgym.remote.application import Application
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.branches import Branch, choose_branches, rounds
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Episode, Message, Outcome, Row, Segment, StopReason, Tally, Task, Turn
from tests.agents.test_multi_turn import THINKING

SIZE, BRANCHES, TURNS = 2, 5, 4
TASKS = [Task(f"t{index}") for index in range(2)]


class Walk(Env):
    """Answers every action with what it was and a number drawn from the instance's generator."""

    async def reset(self, *, seed=None, options=None):
        self.actions = []
        return [Message("user", f"begin {self.rng.randrange(100)}")], {}

    async def step(self, action):
        self.actions.append(action.text)
        said = f"{len(action.text)} {self.rng.randrange(1000)}"
        return [Message("user", said)], self.rng.random(), len(self.actions) == TURNS, False, {"metrics": {"n": 1}}


class Lottery(Walk):
    """Draws from a generator that no seed sets."""

    async def step(self, action):
        _, reward, *ends = await super().step(action)
        return [Message("user", f"{random.SystemRandom().random()}")], reward, *ends


class Copied(Lottery):
    """The same with a fork."""

    n_closed = 0

    def fork(self):
        fork = copy.copy(self)
        fork.actions = [*self.actions]
        return fork

    async def close(self):
        type(self).n_closed += 1


class Shared(Lottery):
    """Its fork is none: both count the same actions."""

    def fork(self):
        return copy.copy(self)


class Adder(envgym.ToolEnv):
    """A tool that answers with a sum and a drawn number; any answer without a call ends the episode."""

    def begin(self):
        return [Message("user", "add")]

    def tools(self):
        return [self.add]

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"{a + b} {self.rng.random():.3f}"

    def grade(self, action):
        return self.rng.random()


class Choices:
    """An engine whose answer depends on the context, the request's seed and the policy's version. `seeds` replace those
    of requests by their ids."""

    def __init__(self, engine, seeds=()):
        self.engine, self.seeds, self.requests = engine, dict(seeds), {}

    async def generate(self, request):
        seed = self.seeds.get(request.id, request.sampling.seed)
        self.requests[request.id] = (tuple(request.token_ids), seed)
        return await self.engine.generate(replace(request, sampling=replace(request.sampling, seed=seed)))


class Words:
    """Draws words by the seed, with tool calls among them."""

    numbers = itertools.count()

    def __init__(self, renderer):
        self.renderer = renderer

    async def generate(self, request):
        seed = request.sampling.seed or next(self.numbers)
        rng = random.Random(f"{seed} {list(request.token_ids)}")
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": {rng.randrange(9)}}}}}\n</tool_call>'
        text = f"<think>hm</think>{call}" if rng.random() < 0.7 else rng.choice(["yes", "naïve", "no no", ""])
        ids = [*self.renderer.tokenizer.encode(text, add_special_tokens=False), self.renderer.stop_token_ids[0]]
        return Generation(ids, [-rng.random() for _ in ids], StopReason.STOP, ())


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return make_renderer("chat", load_tokenizer(str(tiny_model)))


def play(renderer, engine, env=Walk, **settings):
    return event_loop.run(asyncio.wait_for(rolling(renderer, engine, env, **settings), 120))


def rolling(
    renderer, engine, env=Walk, *, agent=MultiTurn, size=SIZE, branches=BRANCHES, at="evenly", completed=None,
    deterministic=True, notes=None, tasks=TASKS, spec=None, max_tokens=6,
    seeds="episode", **config,
):  # fmt: skip
    runner = Runner(
        spec or EnvSpec("Walk-v0", env),
        agent(renderer, agent.Config()),
        engine,
        RolloutConfig(retries=0, refills=0, **config),
        max_model_len=512,
        seed=3,
        deterministic=deterministic,
    )
    runner.first_answers.note = (lambda text: None) if notes is None else notes.append
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=renderer.stop_token_ids)
    plan = SamplingPlan("p", sampling, size, seeds, branches, at)
    return runner.roll_out(tasks, plan, completed=completed)


def segments(episode):
    return [segment for row in episode.rows for segment in row.segments]


def n_turns(episode):
    return sum(len(row.turns) for row in episode.rows)


def check_tree(group, size=SIZE, branches=BRANCHES):
    """Every branch begins with the tokens of its parent."""
    by_id = {episode.id: episode for episode in group.episodes}
    assert [episode.member for episode in group.episodes] == list(range(size + branches))
    assert not any(episode.failed for episode in group.episodes), [e.outcome for e in group.episodes]
    for episode in group.episodes[:size]:
        assert not episode.parent
    for episode in group.episodes[size:]:
        parent = by_id[episode.parent]
        assert 1 <= episode.parent_turn < n_turns(parent)
        ends = [index for index, part in enumerate(segments(parent)) if part.role == "action"]
        shared = ends[episode.parent_turn - 1] + 2  # with the observation that follows
        assert segments(episode)[:shared] == segments(parent)[:shared]
        assert segments(episode) != segments(parent)
        turns, parent_turns = ([turn for row in e.rows for turn in row.turns] for e in (episode, parent))
        assert turns[: episode.parent_turn] == parent_turns[: episode.parent_turn]
        assert episode.seed == parent.seed
        assert episode.messages[: 2 * episode.parent_turn] == parent.messages[: 2 * episode.parent_turn]
        assert episode.reward == sum(turn.reward for turn in turns)
        assert episode.tally in (None, Tally()) or episode.tally.rewards == episode.reward  # not in a server's process


@pytest.mark.parametrize("at", ["evenly", "entropy", "spread"])
def test_a_branch_is_what_an_episode_sampled_whole_with_the_same_choices_is(renderer, tiny_model, at):
    """Bit for bit, with a real model whose batches have one request."""
    model = TransformersEngine(EngineSpec(str(tiny_model)))
    sampled = Choices(model)
    groups = play(renderer, sampled, at=at, concurrency=1, seeds="group")
    for group in groups:
        check_tree(group)
    branches = {e.id: e for group in groups for e in group.episodes if e.parent}
    assert len(branches) == len(TASKS) * BRANCHES
    assert len({(e.parent, e.parent_turn) for e in branches.values()}) > len(branches) / 2

    seeds, by_id = {}, {e.id: e for group in groups for e in group.episodes}
    for name, episode in branches.items():
        for turn in range(episode.parent_turn):
            source, turn_id = episode, f"{turn:04d}"
            while source.parent and turn < source.parent_turn:
                source = by_id[source.parent]
            assert f"{name}.{turn_id}" not in sampled.requests, "a parent's turn was sampled again"
            seeds[f"{name}.{turn_id}"] = sampled.requests[f"{source.id}.{turn_id}"][1]
    whole = Choices(model, seeds | {name: seed for name, (_, seed) in sampled.requests.items()})
    for group in play(renderer, whole, size=SIZE + BRANCHES, branches=0, concurrency=1, seeds="group"):
        for episode in group.episodes:
            if (branch := branches.get(episode.id)) is not None:
                assert branch.rows == episode.rows
                assert (branch.reward, branch.metrics) == (episode.reward, episode.metrics)
                assert branch.messages == episode.messages
    assert {name: context for name, (context, _) in sampled.requests.items()}.items() <= {
        name: context for name, (context, _) in whole.requests.items()
    }.items()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_in_which_some_episodes_are_there_already_completes_the_others(renderer, deterministic):
    def content(groups):
        for group in groups:
            for episode in group.episodes:
                episode.seconds = 0.0
                episode.rows[0].reset_arrays()
        return groups

    def again(**settings):
        return content(play(renderer, Choices(Words(renderer)), deterministic=deterministic, **settings))

    groups = again()
    for group in groups:
        check_tree(group)
    if deterministic:  # else samples have no seeds
        assert again() == groups
    for n_saved in (1, SIZE, SIZE + 1, SIZE + BRANCHES):
        saved = {(e.group_id, e.member): from_record(to_record(e)) for g in groups for e in g.episodes[:n_saved]}
        resumed = again(completed=saved)
        for group, first in zip(resumed, groups, strict=True):
            check_tree(group)
            assert group.episodes[:n_saved] == first.episodes[:n_saved]
        assert resumed == groups if deterministic else True


def test_with_tools_and_another_template(renderer, tiny_model):
    """The ids of calls, the template's rows and the messages are the parent's."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = THINKING
    for each in (renderer, make_renderer("chat", tokenizer)):
        groups = play(each, Choices(Words(each)), spec=ToolEnvSpec("Adder-v0", Adder), agent=ToolCalling, max_tokens=99)
        for group in groups:
            check_tree(group)
        assert any(message.tool_calls for group in groups for e in group.episodes[SIZE:] for message in e.messages)
    assert any(len(episode.rows) > 1 for group in groups for episode in group.episodes), "the template makes rows"


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_environment_that_does_not_repeat_is_named_once_and_not_branched(renderer, deterministic):
    notes = []
    groups = play(renderer, Choices(Words(renderer)), Lottery, notes=notes, deterministic=deterministic)
    assert [len(group.episodes) for group in groups] == [SIZE] * len(TASKS)
    assert len(notes) == 1
    assert notes[0].startswith("Walk-v0 is not branched any more (rollout.branches), since it does not repeat: after ")
    assert " it observes something else with the same seed and actions" in notes[0]
    record = rollout_metrics(groups)
    assert record["branches/not_repeated"] == sum(group.unrepeated for group in groups) > 0
    assert record["failures/share"] == 0
    assert "branches/episodes" not in record


def test_a_reward_or_an_end_that_differs_is_named(renderer):
    class Pays(Walk):
        async def step(self, action):
            observation, _, *ends = await super().step(action)
            return observation, random.SystemRandom().random(), *ends

    class Ends(Walk):
        n_steps = itertools.count()

        async def step(self, action):
            observation, reward, _, *ends = await super().step(action)
            return observation, reward, len(self.actions) == TURNS or next(self.n_steps) >= SIZE * (TURNS - 1), *ends

    for env, says in ((Pays, "it gives the reward "), (Ends, "after turn 1 it ends with the same seed")):
        notes = []
        [group] = play(renderer, Choices(Words(renderer)), env, notes=notes, tasks=TASKS[:1], concurrency=1)
        assert len(group.episodes) == SIZE
        assert says in notes[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_fork_is_used_and_closed(renderer, deterministic):
    """This environment repeats by its fork alone."""
    Copied.n_closed = 0
    branches = 2 * SIZE * (TURNS - 1)  # two at each turn
    groups = play(renderer, Choices(Words(renderer)), Copied, branches=branches, deterministic=deterministic)
    for group in groups:
        check_tree(group, branches=branches)
        assert {n_turns(episode) for episode in group.episodes} == {TURNS}
    n_forks = len(TASKS) * SIZE * (TURNS - 1)  # one after each turn but the last
    assert Copied.n_closed == n_forks + len(TASKS) * (SIZE + branches)


def test_what_is_no_fork_is_refused(renderer):
    class Same(Walk):
        def fork(self):
            return self

    [group] = play(renderer, Choices(Words(renderer)), Same, tasks=TASKS[:1])
    assert [episode.outcome.reason for episode in group.episodes] == ["invalid_environment"] * SIZE
    assert "Walk-v0: fork must return another Same, not " in group.episodes[0].outcome.message

    async def steps():
        env = EnvSpec("Walk-v0", Walk).make()
        await env.reset(seed=1)
        with pytest.raises(NotImplementedError, match="Walk has no fork"):
            env.fork()
        env = EnvSpec("Copied-v0", Copied).make()
        await env.reset(seed=1)
        await env.step("a")
        fork = env.fork()
        assert fork.task is env.task
        assert (await fork.step("b"))[1] == (await env.step("c"))[1], "the fork draws what the instance draws"
        assert (env.unwrapped.actions, fork.unwrapped.actions) == (["a", "c"], ["a", "b"])

    asyncio.run(steps())
    assert issubclass(InvalidStep, envgym.errors.EnvgymError)


def test_the_record_on_the_disk_has_the_parent(renderer, tmp_path):
    groups = play(renderer, Choices(Words(renderer)), tasks=TASKS[:1])
    episodes = groups[0].episodes
    write_rollouts(tmp_path / "branches.parquet", episodes)
    places = [(episode.parent, episode.parent_turn) for episode in episodes]
    assert [(e.parent, e.parent_turn) for e in read_rollouts(tmp_path / "branches.parquet")] == places
    assert any(turn for _, turn in places)
    write_rollouts(tmp_path / "plain.parquet", episodes[:SIZE])
    import pyarrow.parquet as pq

    assert "parent" not in pq.read_schema(tmp_path / "plain.parquet").names
    assert "parent" not in to_record(episodes[0])


def test_tokens_and_rewards_of_a_step_count_what_was_sampled(renderer):
    groups = play(renderer, sampled := Choices(Words(renderer)))
    record, plain = rollout_metrics(groups), play(renderer, Choices(Words(renderer)), branches=0)
    assert record["branches/episodes"] == len(TASKS) * BRANCHES
    lengths = {}
    for group in groups:
        for episode in group.episodes:
            for turn, part in enumerate(part for part in segments(episode) if part.role == "action"):
                lengths[f"{episode.id}.{turn:04d}"] = len(part)
    assert record["tokens/sampled"] == sum(lengths[name] for name in sampled.requests)
    assert record["reward/mean"] == rollout_metrics(plain)["reward/mean"]


def test_an_environment_on_a_server_gets_the_actions_again(renderer):
    async def serve(run):
        application = Application({"walk": EnvSpec("Walk-v0", Walk)}, ServerLimits(), None)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with application.serve_requests(listener), envgym.registry.spec(url) as spec:
                return await run(spec)

    sampled = Choices(Words(renderer))
    [local] = play(renderer, sampled, tasks=TASKS[:1])
    [group] = event_loop.run(serve(lambda spec: rolling(renderer, sampled, spec=spec, tasks=TASKS[:1])))
    check_tree(group)
    assert [episode.rows for episode in group.episodes] == [episode.rows for episode in local.episodes]


# -- where branches begin ----------------------------------------------------------------------------------------


def episode(name, surprises, reward=0.0, parent="", turn=0):
    parts = [Segment("prompt", [1])]
    for value in surprises:
        parts += [Segment("action", [2, 3], logprobs=[-value, -9.0]), Segment("feedback", [4])]
    turns = [Turn(0.0, StopReason.STOP)] * len(surprises)
    rows = [Row(parts[:-1], turns=turns)]
    return Episode(name, TASKS[0], Outcome.finish(), rows, reward, parent=parent, parent_turn=turn)


def places(episodes, rule, count):
    return [(branch.parent.id, branch.turn) for branch in choose_branches(episodes, rule, count)]


def test_evenly():
    ten, four, single = episode("a", [0] * 10), episode("b", [0] * 4), episode("c", [0])
    assert places([ten], "evenly", 4) == [("a", 2), ("a", 4), ("a", 6), ("a", 8)]
    assert places([ten, four, single], "evenly", 3) == [("a", 3), ("b", 2), ("a", 7)]
    assert places([single], "evenly", 3) == []
    failed = replace(four, outcome=Outcome.fail("timeout", ""))
    assert places([failed], "evenly", 3) == []
    assert places([episode("d", [0, 0])], "evenly", 3) == [("d", 1)] * 3


def test_entropy_of_the_next_turns_first_token():
    episodes = [episode("a", [9.0, 0.5, 3.0]), episode("b", [8.0, 2.0, 2.0])]
    assert places(episodes, "entropy", 3) == [("a", 2), ("b", 1), ("b", 2)]
    assert places(episodes, "entropy", 5) == [("a", 2), ("b", 1), ("b", 2), ("a", 1), ("a", 2)]


def test_spread_of_the_returns_below():
    episodes = [
        episode("a", [0] * 3, 1.0),
        episode("b", [0] * 3, 0.0),
        episode("c", [0] * 3, 0.4, "a", 1),
        episode("d", [0] * 3, 1.0, "b", 2),
    ]
    # After turn 1: a and c below a, b and d below b. After turn 2 of b: b and d.
    assert places(episodes, "spread", 3) == [("b", 1), ("b", 2), ("a", 1)]
    assert rounds("spread", 5) == [("evenly", range(3)), ("spread", range(3, 5))]
    assert rounds("spread", 1) == rounds("evenly", 1) == [("evenly", range(1))]
    assert rounds("entropy", 0) == []


def test_the_recorded_turns_of_a_branch():
    turns = Branch(episode("a", [1, 2, 3]), 1).recorded_turns()
    assert [list(context) for context, _, _ in turns] == [[1], [1, 2, 3, 4]]
