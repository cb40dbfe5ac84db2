"""Rolling out tasks: groups, failures and their kinds, limits, cancellation, saved episodes, group judging."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from envgym.agent import Agent, AgentConfig
from envgym.engine import Generation, SamplingParams
from envgym.env import Env, EnvSpec
from envgym.episodes.scores import apply_reward
from envgym.errors import InvalidOutcome, PromptTooLong, WorkerDied, WorkerError
from envgym.evaluation.result import result_of
from envgym.monitoring.display import Display
from envgym.processes import cancellation, event_loop, watch
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.training.trainer import Interrupts, Stop
from envgym.types import Action, Episode, Message, Outcome, Reward, Row, Segment, Status, StopReason, Task, Turn

TASKS = [Task(f"t{index}", prompt=f"{index}?") for index in range(3)]
SAMPLING = SamplingParams(max_tokens=4)


class OneToken:
    """An engine that answers every request with one token. `errors` maps a part of a request's id to the error that it
    raises instead."""

    def __init__(self, errors=()):
        self.errors = dict(errors)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        for piece, error in self.errors.items():
            if piece in request.id:
                raise error
        await asyncio.sleep(0)
        return Generation((7,), (-1.0,), StopReason.STOP, ())


class OneAnswer(Agent):
    """Samples one completion and steps once."""

    async def run(self, env, task, engine, *, seed):
        await env.reset(seed=seed, options={"task": task})
        generation = await engine.generate([1, 2])
        _, reward, _, _, info = await env.step(Action("", generation.token_ids))
        row = Row([Segment("prompt", [1, 2]), Segment("action", [7], logprobs=[-1.0])], turns=[Turn(reward, "stop")])
        score = info.get("score")
        return Episode("", task, Outcome.finish(), rows=[row], reward=reward, score=score, messages=[Message("a", "")])


@dataclass
class World:
    """The behaviour of the test's environment, and a record of its calls."""

    on_step: object = None
    on_close: object = None
    seeds: list = field(default_factory=list)
    closed: int = 0
    n_made: int = 0
    finished_closing: int = 0


@pytest.fixture
def world():
    return World()


def make_spec(world, **methods):
    class Scripted(Env):
        def __init__(self):
            world.n_made += 1

        async def reset(self, *, seed=None, options=None):
            world.seeds.append((options["task"].id, seed))
            return "", {}

        async def step(self, action):
            return world.on_step() if world.on_step else ("", 1.0, True, False, {})

        async def close(self):
            world.closed += 1
            if world.on_close:
                await world.on_close()

    return type("Spec", (EnvSpec,), {"env_class": Scripted, **methods})("Scripted-v0")


def play(
    spec,
    *,
    tasks=TASKS,
    size=2,
    engine=None,
    agent=OneAnswer,
    seed=0,
    deterministic=False,
    purpose="p",
    on_progress=None,
    completed=None,
    on_episode=None,
    **config,
):
    engine = engine or OneToken()
    settings = RolloutConfig(**{"refills": 0, **config})
    runner = Runner(
        spec, agent(None, AgentConfig()), engine, settings, max_model_len=64, seed=seed, deterministic=deterministic
    )
    plan = SamplingPlan(purpose, SAMPLING, size)
    rollout = runner.roll_out(tasks, plan, on_progress, completed=completed, on_episode=on_episode)
    return event_loop.run(asyncio.wait_for(rollout, 30))


def outcomes(groups):
    return [episode.outcome for group in groups for episode in group.episodes]


# -- groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concurrency", [1, 5, 100])
def test_groups_come_in_the_order_of_tasks_with_all_their_members(world, deterministic, concurrency):
    groups = play(make_spec(world), size=4, concurrency=concurrency, deterministic=deterministic)
    assert [group.task for group in groups] == TASKS
    assert [[episode.member for episode in group.episodes] for group in groups] == [[0, 1, 2, 3]] * 3
    assert {episode.group_id for group in groups for episode in group.episodes} == {group.id for group in groups}
    assert all(episode.task is group.task for group in groups for episode in group.episodes)


def test_members_of_a_group_share_the_environments_seed(world):
    groups = play(make_spec(world), size=3)
    seeds = {task: {seed for id, seed in world.seeds if id == task} for task in ("t0", "t1", "t2")}
    assert [len(seeds_of_task) for seeds_of_task in seeds.values()] == [1, 1, 1]
    assert len(set.union(*seeds.values())) == 3
    assert {(episode.task.id, episode.seed) for group in groups for episode in group.episodes} == set(world.seeds)


def test_the_seed_of_a_task_is_the_same_in_every_step_and_changes_with_the_runs_seed(world):
    for seed, purpose in ((0, "step-1"), (0, "step-2"), (1, "step-1")):
        play(make_spec(world), tasks=TASKS[:1], size=1, seed=seed, purpose=purpose)
    first, second, other_run = (seed for _, seed in world.seeds)
    assert first == second != other_run


def test_an_agent_that_samples_nothing_gets_a_reproducible_seed_per_step_task_and_member(world):
    """It may pick a demonstration at random, which should differ between steps, tasks and members."""

    class Replaying(OneAnswer):
        uses_policy = False

    for purpose in ("step-1", "step-2", "step-1"):
        play(make_spec(world), agent=Replaying, purpose=purpose)
    first, second, repeated = world.seeds[:6], world.seeds[6:12], world.seeds[12:]
    assert len({seed for _, seed in [*first, *second]}) == 12
    assert sorted(first) == sorted(repeated)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_task_that_comes_twice_in_a_step_is_two_groups(world, deterministic):
    """A small task set may repeat within one step: no two requests in flight may share an id or a seed."""
    engine = OneToken()
    groups = play(make_spec(world), tasks=TASKS[:1] * 3, size=2, engine=engine, deterministic=deterministic)
    assert len({group.id for group in groups}) == 3
    assert len({request.id for request in engine.requests}) == 6
    assert len({episode.id for group in groups for episode in group.episodes}) == 6
    if deterministic:
        assert len({request.sampling.seed for request in engine.requests}) == 6


def test_deterministic_requests_do_not_depend_on_the_concurrency(world):
    def requests(concurrency):
        engine = OneToken()
        play(make_spec(world), engine=engine, deterministic=True, concurrency=concurrency)
        return [(request.id, request.sampling.seed) for request in engine.requests]

    assert requests(6) == requests(6)
    assert sorted(requests(2)) == sorted(requests(6))


def test_at_most_concurrency_episodes_are_in_flight(world):
    in_flight, maximum = 0, 0

    class Counting(OneAnswer):
        async def run(self, *args, **kwargs):
            nonlocal in_flight, maximum
            in_flight += 1
            maximum = max(maximum, in_flight)
            try:
                return await super().run(*args, **kwargs)
            finally:
                in_flight -= 1

    play(make_spec(world), agent=Counting, size=5, concurrency=4)
    assert maximum == 4


# -- failures ---------------------------------------------------------------------------------------------


def raising(error):
    def step():
        raise error

    return step


class Flaky(Exception):
    retryable = True


class Outside(BaseException):
    pass


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (raising(KeyError("board")), "environment", "KeyError: 'board'"),
        (raising(AssertionError()), "environment", "AssertionError"),
        (raising(TimeoutError("the sandbox")), "environment", "TimeoutError: the sandbox"),
        (raising(SystemExit(0)), "environment", "SystemExit: 0"),
        (raising(KeyboardInterrupt()), "environment", "KeyboardInterrupt"),
        (raising(asyncio.CancelledError()), "environment", "CancelledError"),
        (raising(Outside("of Exception")), "environment", "Outside: of Exception"),
        (lambda: ("", float("nan"), True, False, {}), "invalid_environment", "finite"),
        (lambda: ("", "one", True, False, {}), "invalid_environment", "a reward is a number"),
        (lambda: ("", 1.0, True), "invalid_environment", "step must return"),
        (lambda: ("x" * 4_000_001, 1.0, True, False, {}), "invalid_environment", "has 4,000,001 characters, more than"),
    ],
)
def test_an_error_of_the_environment_is_a_failure_and_never_a_reward(world, step, kind, message):
    world.on_step = step
    groups = play(make_spec(world), size=1, tasks=TASKS[:1])
    [episode] = groups[0].episodes
    assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, kind)
    assert message in episode.outcome.message
    assert (episode.reward, episode.score, episode.rows) == (None, None, [])
    assert (world.n_made, world.closed) == (1, 1)  # closed, and not retried


def test_an_environment_that_cannot_be_made_is_a_failure(world):
    class Unmakable(Env):
        def __init__(self):
            raise FileNotFoundError("no board")

        async def reset(self, *, seed=None, options=None): ...

        async def step(self, action): ...

    [outcome] = outcomes(play(EnvSpec("Unmakable-v0", Unmakable), size=1, tasks=TASKS[:1]))
    line = Unmakable.__init__.__code__.co_firstlineno + 1
    assert (outcome.reason, outcome.message) == (
        "environment",
        f"FileNotFoundError: no board ({__file__}, line {line})",
    )


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Outside()])
def test_a_base_exception_fails_an_episode_wherever_it_is_raised(world, error):
    """In the constructor, the agent, `close`, group judging, and an asyncio task of the environment."""

    async def closing():
        raise error

    class Unmakable(Env):
        def __init__(self):
            raise error

        async def reset(self, *, seed=None, options=None): ...

        async def step(self, action): ...

    class Quitter(OneAnswer):
        async def run(self, *args, **kwargs):
            raise error

    async def failing_judge(self, task, episodes):
        raise error

    async def in_a_task(*args):
        async def work():
            raise error

        return await asyncio.create_task(work())

    name = type(error).__name__
    assert name in outcomes(play(EnvSpec("Unmakable-v0", Unmakable), size=1, tasks=TASKS[:1]))[0].message
    assert name in outcomes(play(make_spec(world), agent=Quitter, size=1, tasks=TASKS[:1]))[0].message
    assert name in outcomes(play(make_spec(world, score_group=failing_judge), size=1, tasks=TASKS[:1]))[0].message
    spec = make_spec(world)
    spec.env_class.step = in_a_task
    assert {name in outcome.message for outcome in outcomes(play(spec, size=2))} == {True}
    world.on_close = closing
    assert not outcomes(play(make_spec(world), size=1, tasks=TASKS[:1]))[0].reason


def test_a_failure_does_not_affect_other_members(world):
    steps = iter([("", 0.25, True, False, {}), None, ("", 0.5, True, False, {})])

    def step():
        result = next(steps)
        if result is None:
            raise ValueError("once")
        return result

    world.on_step = step
    [group] = play(make_spec(world), size=3, tasks=TASKS[:1])
    assert sorted(e.reward for e in group.episodes if not e.failed) == [0.25, 0.5]
    assert sum(e.failed for e in group.episodes) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(PromptTooLong("a prompt of 90 tokens"), "prompt_too_long"), (WorkerError("cuda"), "engine")]
)
def test_errors_of_the_engine_have_their_own_kinds(world, error, kind):
    groups = play(make_spec(world), engine=OneToken({"001:0": error}), tasks=TASKS[:1])
    assert [outcome.reason for outcome in outcomes(groups)] == ["", kind]
    assert str(error) in outcomes(groups)[1].message


def test_a_prompt_that_is_too_long_is_not_retried(world):
    engine = OneToken({":001:": PromptTooLong("a prompt of 90 tokens")})
    [group] = play(make_spec(world), engine=engine, tasks=TASKS[:1], refills=2, retries=2)
    assert [episode.outcome.reason for episode in group.episodes] == ["", "prompt_too_long"]
    assert (len(engine.requests), group.refills, group.superseded) == (2, 0, [])


def test_an_episode_beyond_its_deadline_is_a_timeout_and_is_retried(world):
    async def hang(*args, **kwargs):
        await asyncio.Event().wait()

    spec = make_spec(world)
    spec.env_class.step = hang
    [outcome] = outcomes(play(spec, size=1, tasks=TASKS[:1], episode_timeout=0.05, retries=1))
    assert (outcome.reason, outcome.retryable) == ("timeout", True)
    assert "0.05 s" in outcome.message
    assert (world.n_made, world.closed) == (2, 2)


class Slow(OneToken):
    """An engine that needs 0.1 s for a token, and stops as at the token limit at the policy's time limit."""

    async def generate(self, request):
        await asyncio.sleep(min(0.1, request.seconds))
        reason = StopReason.LENGTH if request.seconds < 0.1 else StopReason.STOP
        return Generation((7,), (-1.0,), reason, ())


def test_the_time_of_the_policy_is_not_that_of_the_episode(world):
    [outcome] = outcomes(play(make_spec(world), size=1, tasks=TASKS[:1], engine=Slow(), episode_timeout=0.05))
    assert outcome.completed


def test_a_policy_out_of_time_truncates_its_episode(world):
    class Cut(OneAnswer):
        async def run(self, env, task, engine, *, seed):
            episode = await super().run(env, task, engine, seed=seed)
            episode.outcome = Outcome.truncate("length")  # as a transcript has it for such a turn
            return episode

    settings = {"size": 1, "tasks": TASKS[:1], "engine": Slow(), "agent": Cut}
    [late] = outcomes(play(make_spec(world), **settings, policy_timeout=0.02))
    [long] = outcomes(play(make_spec(world), **settings, policy_timeout=10))
    assert (late.truncated, late.reason, long.reason) == (True, "time", "length")


@pytest.mark.parametrize(("scope", "distinct"), [("task", 1), ("group", 2), ("episode", 4)])
def test_environment_seeds(world, scope, distinct):
    """The seeds of one task in two groups of two, twice the same in a second run."""
    spec = make_spec(world)
    for _ in range(2):
        runner = Runner(
            spec, OneAnswer(None, AgentConfig()), OneToken(), RolloutConfig(), max_model_len=64, seed=0,
            deterministic=False,
        )  # fmt: skip
        for purpose in ("first", "second"):
            event_loop.run(runner.roll_out(TASKS[:1], SamplingPlan(purpose, SAMPLING, 2, scope)))
    seeds = [seed for _, seed in world.seeds]
    assert len(set(seeds)) == distinct
    assert seeds[:4] == seeds[4:]


def test_a_fair_coin_that_is_thrown_four_times(world):
    """pass^4 of a coin is 1/16 where each episode has its own throw, and 1/2 where all have the same."""

    async def step(self, action):
        heads = float(self.rng.random() < 0.5)
        return "", heads, True, False, {"score": heads}

    spec = make_spec(world)
    spec.env_class.step = step
    tasks = [Task(f"t{index}", prompt="?") for index in range(400)]
    shares = {}
    for scope in ("task", RolloutConfig().scope_in_evaluation(4)):
        runner = Runner(
            spec, OneAnswer(None, AgentConfig()), OneToken(), RolloutConfig(), max_model_len=64, seed=0,
            deterministic=False,
        )  # fmt: skip
        result = result_of(event_loop.run(runner.roll_out(tasks, SamplingPlan("eval", SAMPLING, 4, scope))))
        shares[scope] = result["pass^k"]["4"]
        low, high = result["ci95"]
        assert low < 0.5 < high
    assert abs(shares["task"] - 1 / 2) < 4 * (0.25 / 400) ** 0.5
    assert abs(shares["episode"] - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 400) ** 0.5


def test_the_rewards_of_a_coin_vary_over_the_visits_of_a_task(world):
    async def step(self, action):
        return "", float(self.rng.random() < 0.5), True, False, {}

    spec = make_spec(world)
    spec.env_class.step = step
    runner = Runner(
        spec, OneAnswer(None, AgentConfig()), OneToken(), RolloutConfig(), max_model_len=64, seed=0, deterministic=False
    )
    for scope, distinct in (("task", 1), ("group", 2)):
        visits = [
            event_loop.run(runner.roll_out(TASKS[:1], SamplingPlan(f"step-{n}", SAMPLING, 4, scope)))[0]
            for n in range(12)
        ]
        rewards = [{episode.reward for episode in group.episodes} for group in visits]
        assert all(len(members) == 1 for members in rewards)  # members of a group share the throw
        assert len(set().union(*rewards)) == distinct


def test_scopes_of_evaluations():
    assert [RolloutConfig().scope_in_evaluation(n) for n in (1, 4)] == ["task", "episode"]
    assert [RolloutConfig(seed_scope="group").scope_in_evaluation(n) for n in (1, 4)] == ["group", "group"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("breaks", "attempts", "fails"), [(0, 1, False), (2, 3, False), (9, 3, True)])
def test_retryable_failures_are_retried_at_most_so_often(world, deterministic, breaks, attempts, fails):
    tries = 0

    def step():
        nonlocal tries
        tries += 1
        if tries <= breaks:
            raise Flaky
        return "", 1.0, True, False, {}

    world.on_step = step
    engine = OneToken()
    [group] = play(make_spec(world), size=1, tasks=TASKS[:1], engine=engine, retries=2, deterministic=deterministic)
    [episode] = group.episodes
    if deterministic:  # the same tokens would fail in the same way
        assert len({request.sampling.seed for request in engine.requests}) == attempts
    assert (tries, episode.attempt, episode.failed) == (attempts, attempts - 1, fails)
    assert world.closed == attempts


def test_a_group_replaces_permanently_failed_members_up_to_a_maximum(world):
    results = iter([None, ("", 0.25, True, False, {}), ("", 0.5, True, False, {}), None, None])

    def step():
        result = next(results)
        if result is None:
            raise ValueError("broken")
        return result

    world.on_step = step
    engine = OneToken()
    [group] = play(make_spec(world), size=3, tasks=TASKS[:1], engine=engine, refills=2)
    assert sorted(e.reward for e in group.episodes if not e.failed) == [0.25, 0.5]
    assert [e.failed for e in group.episodes].count(True) == 1  # two were replaced, the third failure stayed
    assert (group.refills, len(group.superseded)) == (2, 2)
    assert len({request.id for request in engine.requests}) == 5  # another attempt, another sampling seed
    assert {seed for _, seed in world.seeds} == {group.episodes[0].seed}  # the same problem


def test_a_call_beyond_its_deadline_is_a_timeout_even_if_it_blocks(world):
    release, returned = threading.Event(), []

    class Sleeper(Env):
        def reset(self, *, seed=None, options=None):
            return "", {}

        def step(self, action):
            release.wait(60)
            returned.append(True)
            return "", 1.0, True, False, {}

    spec = EnvSpec("Sleeper-v0", Sleeper, call_timeout=0.05)
    try:
        [outcome] = outcomes(play(spec, size=1, tasks=TASKS[:1], retries=0))
        assert (outcome.reason, outcome.message) == ("timeout", "Sleeper-v0: step took longer than 0.05 s")
        assert returned == []  # the runner does not wait for the blocked call
    finally:
        release.set()


def test_a_call_that_blocks_the_loop_past_its_deadline_is_reported_and_is_a_timeout(world, monkeypatch):
    printed = []
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_print", printed.append)

    def on_step():
        while not printed:  # no timer can fire meanwhile
            pass
        return "", 1.0, True, False, {}

    world.on_step = on_step
    timed_out, *completed = outcomes(play(short_call_spec(world), tasks=TASKS, size=1, retries=0))
    assert (timed_out.reason, timed_out.message) == ("timeout", "Scripted-v0: step took longer than 0.05 s")
    assert [outcome.status for outcome in completed] == [Status.COMPLETED] * 2  # printed once: these do not wait
    line = on_step.__code__.co_firstlineno
    [text] = printed
    assert text.startswith("Scripted-v0: step has blocked everything else for more than 0.05 s, in on_step (")
    assert int(re.search(rf"{re.escape(__file__)}, line (\d+)\)", text).group(1)) in (line + 1, line + 2)


def short_call_spec(world):
    spec = make_spec(world)
    spec.config.call_timeout = 0.05
    return spec


@pytest.mark.parametrize("trains", [False, True])
def test_a_second_signal_ends_a_blocking_call_and_every_following_one(world, trains):
    steps = []

    def on_step():
        steps.append(1)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        while True:
            pass

    world.on_step = on_step
    stop = Stop()
    runner = Runner(
        make_spec(world), OneAnswer(None, AgentConfig()), OneToken(), RolloutConfig(), max_model_len=64, seed=0,
        deterministic=False,
    )  # fmt: skip

    async def main():
        interrupts = Interrupts(Display())
        with interrupts if trains else contextlib.nullcontext():
            interrupts.listen(stop.set)
            await runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, 4))

    with pytest.raises(KeyboardInterrupt):
        event_loop.run(main())
    assert len(steps) == 1
    assert world.closed == world.n_made


UNSTOPPABLE = """
import signal
from envgym.processes import cancellation, event_loop

cancellation.GRACE_SECONDS = 0.2
signals = [signal.SIGINT, signal.SIGTERM]

async def main():
    while True:
        try:
            while signals:
                signal.raise_signal(signals.pop())
            while True:
                pass
        except BaseException:
            pass

event_loop.run(main())
"""


def test_a_second_signal_ends_even_code_that_catches_every_exception():
    process = subprocess.run([sys.executable, "-c", UNSTOPPABLE], capture_output=True, text=True, timeout=60)
    assert process.returncode == 130
    assert process.stderr == "envgym: ended immediately: a call blocks the event loop and does not end\n"


def test_blocking_environments_run_concurrently(world):
    barrier = threading.Barrier(10)

    class Meeting(Env):
        def reset(self, *, seed=None, options=None):
            return "", {}

        def step(self, action):
            barrier.wait(60)
            return "", 1.0, True, False, {}

    groups = play(EnvSpec("Meeting-v0", Meeting), size=10, tasks=TASKS)
    assert all(outcome.status is Status.COMPLETED for outcome in outcomes(groups))


def test_the_environments_concurrency_holds_and_the_wait_does_not_count_as_the_episodes_time(world):
    in_flight = maximum = 0

    async def step(*args):
        nonlocal in_flight, maximum
        in_flight += 1
        maximum = max(maximum, in_flight)
        await asyncio.sleep(0.05)
        in_flight -= 1
        return "", 1.0, True, False, {}

    spec = make_spec(world)
    spec.env_class.step = step
    spec.config.concurrency = 2
    groups = play(spec, size=4, episode_timeout=0.2)
    assert maximum == 2
    assert all(outcome.status is Status.COMPLETED for outcome in outcomes(groups))


def test_an_episodes_seconds_do_not_count_its_wait(world, monkeypatch):
    """By a clock that only steps advance: each takes ten seconds while the others wait."""
    clock = 0.0
    monkeypatch.setattr("envgym.rollout.episode.time", SimpleNamespace(monotonic=lambda: clock, time=lambda: clock))

    def step():
        nonlocal clock
        clock += 10.0
        return "", 1.0, True, False, {}

    world.on_step = step
    spec = make_spec(world)
    spec.config.concurrency = 1
    groups = play(spec)
    assert [episode.seconds for group in groups for episode in group.episodes] == [10.0] * 6


def test_each_episode_has_fingerprints(world):
    groups = play(make_spec(world), size=2)
    prints = [[e.fingerprints for e in group.episodes] for group in groups]
    assert all(mine == prints[0][0] | {"task": mine["task"]} for group in prints for mine in group)
    assert len({group[0]["task"] for group in prints}) == 3
    assert all(set(mine) == {"code", "spec", "task"} and all(mine.values()) for group in prints for mine in group)


def test_a_close_that_fails_or_hangs_changes_nothing(world):
    async def hang():
        if world.closed % 2:
            raise OSError("broken pipe")
        await asyncio.Event().wait()

    world.on_close = hang
    spec = make_spec(world)
    spec.config.call_timeout = 0.05
    groups = play(spec, size=2, tasks=TASKS[:1])
    assert [episode.reward for episode in groups[0].episodes] == [1.0, 1.0]


class Uncancellable:
    """A coroutine function that ignores cancellation until `may_end` is set."""

    def __init__(self):
        self.n_cancelled = 0
        self.may_end = asyncio.Event()

    async def __call__(self, *args):
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.n_cancelled += 1


@pytest.fixture
def uncancellable(monkeypatch):
    monkeypatch.setattr(cancellation, "GRACE_SECONDS", 0.05)
    return Uncancellable()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_environment_that_ignores_cancellation_is_abandoned(world, uncancellable, deterministic):
    """Its slot goes to the next episode, even if there is only one and if `close` does not end either."""

    async def step(*args):
        if len(world.seeds) == 1:
            await uncancellable()
        return "", 1.0, True, False, {}

    world.on_close = uncancellable
    spec = make_spec(world)
    spec.env_class.step = step
    spec.config.concurrency, spec.config.call_timeout = 1, 0.05
    abandoned, completed = outcomes(play(spec, tasks=TASKS[:2], size=1, deterministic=deterministic))
    assert (abandoned.reason, completed.reason) == ("does_not_end", "")
    assert abandoned.message.startswith("Scripted-v0 still runs ")
    assert world.closed == world.n_made == 2


def test_a_result_returned_after_a_cancellation_is_a_timeout(world):
    async def step(*args):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "", 1.0, True, False, {}

    spec = make_spec(world)
    spec.env_class.step = step
    for limits in ({"call": 0.05, "episode": 60}, {"call": 60, "episode": 0.05}):
        spec.config.call_timeout = limits["call"]
        [outcome] = outcomes(play(spec, size=1, tasks=TASKS[:1], retries=0, episode_timeout=limits["episode"]))
        assert (outcome.reason, outcome.message.endswith("took longer than 0.05 s")) == ("timeout", True)


def test_group_judging_that_ignores_cancellation_fails_its_group(world, uncancellable):
    spec = make_spec(world, score_group=lambda self, task, episodes: uncancellable())
    assert {o.reason for o in outcomes(play(spec, tasks=TASKS[:1], episode_timeout=0.05))} == {"does_not_end"}


def test_an_abandoned_episode_samples_no_more(world, uncancellable):
    class UncancellableAgent(OneAnswer):
        async def run(self, env, task, engine, *, seed):
            await uncancellable()
            await engine.generate([1, 2])

    earlier = cancellation.abandoned_tasks()

    async def main():
        engine, config = OneToken(), RolloutConfig(episode_timeout=0.05)
        agent = UncancellableAgent(None, AgentConfig())
        runner = Runner(make_spec(world), agent, engine, config, max_model_len=64, seed=0, deterministic=False)
        [group] = await runner.roll_out(TASKS[:1], SamplingPlan("p", SAMPLING, 1))
        assert outcomes([group])[0].reason == "does_not_end"
        abandoned = cancellation.abandoned_tasks() - earlier
        uncancellable.may_end.set()
        await asyncio.wait(abandoned)
        assert engine.requests == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_stop_abandons_tasks_that_ignore_cancellation(world, uncancellable):
    """Episodes and the tasks they have started, even at the end of the event loop."""

    async def step(*args):
        started.append(asyncio.create_task(uncancellable()))
        if len(started) == 3:
            all_started.set()
        await uncancellable()

    async def main():
        agent = OneAnswer(None, AgentConfig())
        runner = Runner(spec, agent, OneToken(), RolloutConfig(), max_model_len=64, seed=0, deterministic=False)
        rollout = asyncio.ensure_future(runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, 1)))
        await all_started.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert len(cancellation.abandoned_tasks() - earlier) == 3 == world.closed

    started, all_started, spec = [], asyncio.Event(), make_spec(world)
    spec.env_class.step = step
    earlier = cancellation.abandoned_tasks()
    event_loop.run(main())
    assert len(cancellation.abandoned_tasks() - earlier) == 6
    assert uncancellable.n_cancelled >= 6


class StuckEngine(OneToken):
    """An engine that answers no request, and dies at the last of `n` requests if `dies`."""

    def __init__(self, n, dies):
        super().__init__()
        self.n, self.dies = n, dies
        self.has_all_requests = asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        if len(self.requests) == self.n:
            self.has_all_requests.set()
            if self.dies:
                raise WorkerDied("engine: killed")
        await asyncio.Event().wait()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("size", [2, 10**9])  # a billion: members start as slots become free
def test_the_engines_death_or_a_stop_ends_the_rollout_once_every_environment_is_closed(
    world, deterministic, dies, size
):
    """Some environments take longer to close than others."""

    async def some_turns_of_the_loop():
        for _ in range(3 * world.closed):
            await asyncio.sleep(0)
        world.finished_closing += 1

    world.on_close = some_turns_of_the_loop

    async def main():
        engine, agent, config = StuckEngine(6, dies), OneAnswer(None, AgentConfig()), RolloutConfig(concurrency=6)
        spec = make_spec(world)
        runner = Runner(spec, agent, engine, config, max_model_len=64, seed=0, deterministic=deterministic)
        rollout = asyncio.ensure_future(runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, size)))
        await engine.has_all_requests.wait()
        if not dies:
            rollout.cancel()
        with pytest.raises(WorkerDied if dies else asyncio.CancelledError):
            await rollout
        assert world.finished_closing == world.closed == world.n_made <= (6 if size == 2 else 7)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_stop_takes_effect_while_members_start(world):
    """Regardless of the number of slots."""

    async def main():
        config = RolloutConfig(concurrency=10**9)
        agent = OneAnswer(None, AgentConfig())
        runner = Runner(
            make_spec(world), agent, StuckEngine(1, False), config, max_model_len=64, seed=0, deterministic=False
        )
        async with asyncio.timeout(0):
            await runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, 10**9))

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert world.closed == world.n_made


def test_members_of_an_earlier_concurrent_rollout_start_first(world):
    async def main():
        engine, agent = OneToken(), OneAnswer(None, AgentConfig())
        config = RolloutConfig(concurrency=2)
        runner = Runner(make_spec(world), agent, engine, config, max_model_len=64, seed=0, deterministic=False)
        await asyncio.gather(*(runner.roll_out(TASKS[:1], SamplingPlan(name, SAMPLING, 6)) for name in ("a", "b")))
        return "".join(request.id[0] for request in engine.requests)

    assert asyncio.run(main()) == "a" * 6 + "b" * 6


# -- episodes of an earlier call --------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_completed_episodes_are_not_run_again(world, deterministic):
    first = play(make_spec(world), deterministic=deterministic)
    completed = {(episode.group_id, episode.member): episode for episode in (first[0].episodes[1], *first[2].episodes)}
    world.seeds.clear()
    progress, finished = [], []
    second = play(
        make_spec(world),
        deterministic=deterministic,
        completed=completed,
        on_progress=lambda *counts: progress.append(counts[:2]),
        on_episode=finished.append,
    )
    assert [task for task, _ in world.seeds] == ["t0", "t1", "t1"]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert [episode.id for group in second for episode in group.episodes] == [
        episode.id for group in first for episode in group.episodes
    ]
    assert second[0].episodes[1] is first[0].episodes[1]
    assert sorted(episode.id for episode in finished) == ["p/00000:000:0", "p/00001:000:0", "p/00001:001:0"]


def test_progress_counts_failures_by_kind(world):
    calls = []
    play(
        make_spec(world),
        engine=OneToken({"p/00001": WorkerError("no")}),
        on_progress=lambda count, total, failures: calls.append((count, total, dict(failures))),
        concurrency=1,
    )
    assert calls[0] == (1, 6, {})
    assert calls[-1] == (6, 6, {"engine": 2})


def test_members_of_a_judged_group_are_reported_again_even_if_completed_before(world):
    reported = []
    spec = judged_by(world, lambda task, episodes: [0.25] * len(episodes) if task.id == "t1" else None)
    groups = play(spec, on_episode=lambda episode: reported.append((episode.group_id, episode.member, episode.reward)))
    assert reported[6:] == [("p/00001", 0, 0.25), ("p/00001", 1, 0.25)]
    reported.clear()
    completed = {(episode.group_id, episode.member): episode for group in groups for episode in group.episodes}
    play(
        spec,
        completed=completed,
        on_episode=lambda episode: reported.append((episode.group_id, episode.member, episode.reward)),
    )
    assert reported == [("p/00001", 0, 0.25), ("p/00001", 1, 0.25)]


# -- group judging ----------------------------------------------------------------------------------------


def judged_by(world, judge):
    async def score_group(self, task, episodes):
        return judge(task, episodes)

    return make_spec(world, score_group=score_group)


def test_group_judging_sees_the_finished_members_and_sets_their_rewards(world):
    fails = iter([True, False, False])

    def step():
        if next(fails):
            raise ValueError
        return "", None, True, False, {}

    world.on_step = step
    spec = judged_by(world, lambda task, episodes: [0.5, 3.0] if len(episodes) == 2 else None)
    [group] = play(spec, size=3, tasks=TASKS[:1])
    members = [(episode.failed, episode.reward, episode.score) for episode in group.episodes]
    assert members == [
        (True, None, None),
        (False, 0.5, None),
        (False, 3.0, None),
    ]  # 3 is no score, nor is 0.5
    assert ["score" in [kind for kind, _, _ in episode.spans] for episode in group.episodes] == [False, True, True]


def test_a_judges_rewards_do_not_replace_the_environments_own_score(world):
    world.on_step = lambda: ("", None, True, False, {"score": 0.25})
    [group] = play(judged_by(world, lambda task, episodes: [1.0, 0.0]), tasks=TASKS[:1])
    assert [(episode.reward, episode.score) for episode in group.episodes] == [(1.0, 0.25), (0.0, 0.25)]


@pytest.mark.parametrize("verdict", [1.0, None])
def test_a_judges_reward_replaces_the_rewards_of_turns(verdict):
    rows = [Row([], turns=[Turn(3.0, "stop"), Turn(0.5, "stop")]), Row([], turns=[Turn(2.0, "stop")])]
    episode = Episode("e", TASKS[0], Outcome.finish(), rows=rows, reward=5.5)
    apply_reward(episode, Reward(verdict))
    assert [[turn.reward for turn in row.turns] for row in rows] == [[None, None], [verdict]]
    assert episode.reward == verdict


def test_a_judge_may_return_a_reward_with_a_score_or_fail_for_one_member(world):
    verdicts = [Reward(2.0, score=0.75, metrics={"style": 0.5}), None, InvalidOutcome("judge", "unreadable")]
    [group] = play(judged_by(world, lambda task, episodes: verdicts), size=3, tasks=TASKS[:1])
    scored, unrewarded, failed = group.episodes
    assert (scored.reward, scored.score, scored.metrics) == (2.0, 0.75, {"style": 0.5})
    assert (unrewarded.reward, unrewarded.score, unrewarded.failed) == (None, None, False)
    assert (failed.outcome.reason, failed.outcome.message, failed.reward) == ("judge", "unreadable", None)


def test_the_death_of_a_judges_model_ends_the_rollout(world):
    def judge(task, episodes):
        raise WorkerDied("judge: killed")

    with pytest.raises(WorkerDied, match="judge: killed"):
        play(judged_by(world, judge))


@pytest.mark.parametrize(
    ("judge", "kind"),
    [
        (lambda task, episodes: 1 / 0, "environment"),
        (lambda task, episodes: [1.0], "invalid_environment"),
        (lambda task, episodes: [1.0, float("nan")], "invalid_environment"),
        (lambda task, episodes: [1.0, "good"], "invalid_environment"),
        (lambda task, episodes: [1.0, Reward(1.0, score=1.5)], "invalid_environment"),
        (lambda task, episodes: [InvalidOutcome("judge", "mute")] * 2, "judge"),
    ],
)
def test_an_error_of_a_judge_fails_its_group_and_no_other(world, judge, kind):
    spec = judged_by(world, lambda task, episodes: judge(task, episodes) if task.id == "t1" else None)
    groups = play(spec)
    assert [{episode.outcome.reason for episode in group.episodes} for group in groups] == [{""}, {kind}, {""}]
    assert [{episode.reward for episode in group.episodes} for group in groups] == [{1.0}, {None}, {1.0}]


def test_an_engine_with_too_few_logprobs_is_a_failure_of_the_engine(world):
    class Short(OneToken):
        async def generate(self, request):
            return Generation((7, 8), (-1.0,), StopReason.STOP, ())

    [group, *_] = play(make_spec(world), engine=Short())
    outcome = group.episodes[0].outcome
    assert (outcome.reason, outcome.message) == (
        "engine",
        "the engine's generate returned 1 logprobs for 2 tokens",
    )
