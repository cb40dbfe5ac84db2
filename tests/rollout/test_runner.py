"""Rolling out: what goes wrong in an episode is a failure of a named kind, and nothing else."""

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
from envgym.errors import InvalidOutcome, PromptTooLong, WorkerDied, WorkerError
from envgym.monitoring.display import Display
from envgym.processes import cancellation, event_loop, watch
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan, apply_reward
from envgym.training.stop import Interrupts, Stop
from envgym.types import Episode, Message, Outcome, Reward, Row, Segment, Status, StopReason, Task, Turn

TASKS = [Task(f"t{index}", prompt=f"{index}?") for index in range(3)]
SAMPLING = SamplingParams(max_tokens=4)


class OneToken:
    """An engine that answers every request with one token. `errors` maps a piece of a request's id to what it
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
    """Asks for one answer and takes the reward for it."""

    async def run(self, env, task, engine, *, seed):
        await env.reset(seed=seed, options={"task": task})
        generation = await engine.generate([1, 2])
        _, reward, _, _, info = await env.step(generation)
        row = Row([Segment("prompt", [1, 2]), Segment("action", [7], logprobs=[-1.0])], turns=[Turn(reward, "stop")])
        score = info.get("score")
        return Episode(
            "", task, Outcome.complete(), rows=[row], reward=reward, score=score, messages=[Message("a", "")]
        )


@dataclass
class World:
    """What the test's environment does, and what happened to it."""

    on_step: object = None
    on_close: object = None
    seeds: list = field(default_factory=list)
    closed: int = 0
    made: int = 0
    finished_closing: int = 0


@pytest.fixture
def world():
    return World()


def make_spec(world, **methods):
    class Scripted(Env):
        def __init__(self):
            world.made += 1

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
    playing = runner.roll_out(tasks, plan, on_progress, completed=completed, on_episode=on_episode)
    return event_loop.run(asyncio.wait_for(playing, 30))


def outcomes(groups):
    return [episode.outcome for group in groups for episode in group.episodes]


# -- what comes back --------------------------------------------------------------------------------------


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
    assert [len(found) for found in seeds.values()] == [1, 1, 1]
    assert len(set.union(*seeds.values())) == 3
    assert {(episode.task.id, episode.seed) for group in groups for episode in group.episodes} == set(world.seeds)


def test_the_problem_stays_the_same_from_step_to_step_and_changes_with_the_runs_seed(world):
    for seed, purpose in ((0, "step-1"), (0, "step-2"), (1, "step-1")):
        play(make_spec(world), tasks=TASKS[:1], size=1, seed=seed, purpose=purpose)
    first, again, other = (seed for _, seed in world.seeds)
    assert first == again != other


def test_who_samples_nothing_is_given_another_seed_each_time_and_the_same_again(world):
    """It may pick among demonstrations, and members of a group, steps and tasks should not all pick the same."""

    class Replaying(OneAnswer):
        uses_policy = False

    for purpose in ("step-1", "step-2", "step-1"):
        play(make_spec(world), agent=Replaying, purpose=purpose)
    first, second, again = world.seeds[:6], world.seeds[6:12], world.seeds[12:]
    assert len({seed for _, seed in [*first, *second]}) == 12
    assert sorted(first) == sorted(again)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_task_that_comes_twice_in_a_step_is_two_groups(world, deterministic):
    """A small task set comes round again within one step: no two requests in flight may share an id or a seed."""
    engine = OneToken()
    groups = play(make_spec(world), tasks=TASKS[:1] * 3, size=2, engine=engine, deterministic=deterministic)
    assert len({group.id for group in groups}) == 3
    assert len({request.id for request in engine.requests}) == 6
    assert len({episode.id for group in groups for episode in group.episodes}) == 6
    if deterministic:
        assert len({request.sampling.seed for request in engine.requests}) == 6


def test_deterministic_requests_do_not_depend_on_how_many_are_in_play(world):
    def requests(concurrency):
        engine = OneToken()
        play(make_spec(world), engine=engine, deterministic=True, concurrency=concurrency)
        return [(request.id, request.sampling.seed) for request in engine.requests]

    assert requests(6) == requests(6)
    assert sorted(requests(2)) == sorted(requests(6))


def test_no_more_than_concurrency_are_in_play(world):
    in_play, most = 0, 0

    class Counting(OneAnswer):
        async def run(self, *args, **kwargs):
            nonlocal in_play, most
            in_play += 1
            most = max(most, in_play)
            try:
                return await super().run(*args, **kwargs)
            finally:
                in_play -= 1

    play(make_spec(world), agent=Counting, size=5, concurrency=4)
    assert most == 4


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
    ("step", "kind", "says"),
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
def test_an_environment_that_breaks_is_a_failure_and_never_a_reward(world, step, kind, says):
    world.on_step = step
    groups = play(make_spec(world), size=1, tasks=TASKS[:1])
    [episode] = groups[0].episodes
    assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, kind)
    assert says in episode.outcome.message
    assert (episode.reward, episode.score, episode.rows) == (None, None, [])
    assert (world.made, world.closed) == (1, 1)  # closed, and not tried again


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
def test_what_is_no_exception_fails_an_episode_wherever_it_is_raised(world, error):
    """In the constructor, the agent, a close, a judgement of groups, and a task that the environment has made."""

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

    async def judged(self, task, episodes):
        raise error

    async def in_a_task(*args):
        async def work():
            raise error

        return await asyncio.create_task(work())

    name = type(error).__name__
    assert name in outcomes(play(EnvSpec("Unmakable-v0", Unmakable), size=1, tasks=TASKS[:1]))[0].message
    assert name in outcomes(play(make_spec(world), agent=Quitter, size=1, tasks=TASKS[:1]))[0].message
    assert name in outcomes(play(make_spec(world, score_group=judged), size=1, tasks=TASKS[:1]))[0].message
    spec = make_spec(world)
    spec.env_class.step = in_a_task
    assert {name in outcome.message for outcome in outcomes(play(spec, size=2))} == {True}
    world.on_close = closing
    assert not outcomes(play(make_spec(world), size=1, tasks=TASKS[:1]))[0].reason


def test_one_failure_leaves_the_others_alone(world):
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
def test_errors_of_the_engine_have_kinds_of_their_own(world, error, kind):
    groups = play(make_spec(world), engine=OneToken({"001:0": error}), tasks=TASKS[:1])
    assert [outcome.reason for outcome in outcomes(groups)] == ["", kind]
    assert str(error) in outcomes(groups)[1].message


def test_a_prompt_that_is_too_long_is_played_once(world):
    """It would be too long again."""
    engine = OneToken({":001:": PromptTooLong("a prompt of 90 tokens")})
    [group] = play(make_spec(world), engine=engine, tasks=TASKS[:1], refills=2, retries=2)
    assert [episode.outcome.reason for episode in group.episodes] == ["", "prompt_too_long"]
    assert (len(engine.requests), group.refills, group.superseded) == (2, 0, [])


def test_an_episode_beyond_its_deadline_is_a_timeout_and_is_tried_again(world):
    async def for_ever(*args, **kwargs):
        await asyncio.Event().wait()

    spec = make_spec(world)
    spec.env_class.step = for_ever
    [outcome] = outcomes(play(spec, size=1, tasks=TASKS[:1], episode_timeout=0.05, retries=1))
    assert (outcome.reason, outcome.retryable) == ("timeout", True)
    assert "0.05 s" in outcome.message
    assert (world.made, world.closed) == (2, 2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("breaks", "attempts", "fails"), [(0, 1, False), (2, 3, False), (9, 3, True)])
def test_what_is_retryable_is_tried_again_at_most_so_often(world, deterministic, breaks, attempts, fails):
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
    if deterministic:  # the same tokens again would fail in the same way
        assert len({request.sampling.seed for request in engine.requests}) == attempts
    assert (tries, episode.attempt, episode.failed) == (attempts, attempts - 1, fails)
    assert world.closed == attempts


def test_a_group_fills_the_place_of_an_episode_that_failed_for_good_a_bounded_number_of_times(world):
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
    assert [e.failed for e in group.episodes].count(True) == 1  # two places were filled, the third failure stayed
    assert (group.refills, len(group.superseded)) == (2, 2)
    assert len({request.id for request in engine.requests}) == 5  # another attempt, another sampling seed
    assert {seed for _, seed in world.seeds} == {group.episodes[0].seed}  # of the same problem


def test_a_call_beyond_its_deadline_is_a_timeout_also_where_it_blocks(world):
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
        assert returned == []  # nobody waits for the call that hangs
    finally:
        release.set()


def test_a_call_that_holds_the_loop_past_its_deadline_is_named_and_a_timeout(world, monkeypatch):
    said = []
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_print", said.append)

    def on_step():
        while not said:  # no timer can fire meanwhile
            pass
        return "", 1.0, True, False, {}

    world.on_step = on_step
    held, *others = outcomes(play(held_spec(world), tasks=TASKS, size=1, retries=0))
    assert (held.reason, held.message) == ("timeout", "Scripted-v0: step took longer than 0.05 s")
    assert [outcome.status for outcome in others] == [Status.COMPLETED] * 2  # said once: these do not wait
    line = on_step.__code__.co_firstlineno
    [text] = said
    assert text.startswith("Scripted-v0: step has blocked everything else for more than 0.05 s, in on_step (")
    assert int(re.search(rf"{re.escape(__file__)}, line (\d+)\)", text).group(1)) in (line + 1, line + 2)


def held_spec(world):
    spec = make_spec(world)
    spec.config.call_timeout = 0.05
    return spec


@pytest.mark.parametrize("trains", [False, True])
def test_a_second_signal_ends_what_holds_the_loop_and_all_that_would_hold_it_next(world, trains):
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
    assert world.closed == world.made


DEAF = """
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


def test_a_second_signal_ends_also_what_takes_no_notice():
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "envgym: ended immediately: a call blocks the event loop and does not end\n"


def test_blocking_environments_run_side_by_side(world):
    together = threading.Barrier(10)

    class Meeting(Env):
        def reset(self, *, seed=None, options=None):
            return "", {}

        def step(self, action):
            together.wait(60)
            return "", 1.0, True, False, {}

    groups = play(EnvSpec("Meeting-v0", Meeting), size=10, tasks=TASKS)
    assert all(outcome.status is Status.COMPLETED for outcome in outcomes(groups))


def test_an_environments_own_limit_holds_and_waiting_for_it_is_not_the_episodes_time(world):
    in_play = most = 0

    async def step(*args):
        nonlocal in_play, most
        in_play += 1
        most = max(most, in_play)
        await asyncio.sleep(0.05)
        in_play -= 1
        return "", 1.0, True, False, {}

    spec = make_spec(world)
    spec.env_class.step = step
    spec.config.concurrency = 2
    groups = play(spec, size=4, episode_timeout=0.2)
    assert most == 2
    assert all(outcome.status is Status.COMPLETED for outcome in outcomes(groups))


def test_an_episodes_seconds_are_those_it_was_played(world, monkeypatch):
    """By a clock that only steps move: each takes ten seconds, and the others wait for it."""
    now = 0.0
    monkeypatch.setattr("envgym.rollout.runner.time", SimpleNamespace(monotonic=lambda: now))

    def step():
        nonlocal now
        now += 10.0
        return "", 1.0, True, False, {}

    world.on_step = step
    spec = make_spec(world)
    spec.config.concurrency = 1
    groups = play(spec)
    assert [episode.seconds for group in groups for episode in group.episodes] == [10.0] * 6


def test_each_episode_says_what_was_played(world):
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


class Deaf:
    """What goes on whatever it is told, until the test lets go of it."""

    def __init__(self):
        self.heard = 0
        self.free = asyncio.Event()

    async def __call__(self, *args):
        while not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                self.heard += 1


@pytest.fixture
def deaf(monkeypatch):
    monkeypatch.setattr(cancellation, "GRACE_SECONDS", 0.05)
    return Deaf()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_environment_that_goes_on_when_cancelled_is_left_to_itself(world, deaf, deterministic):
    """The next takes its place, also where only one may be in play and where it does not close either."""

    async def step(*args):
        if len(world.seeds) == 1:
            await deaf()
        return "", 1.0, True, False, {}

    world.on_close = deaf
    spec = make_spec(world)
    spec.env_class.step = step
    spec.config.concurrency, spec.config.call_timeout = 1, 0.05
    left, other = outcomes(play(spec, tasks=TASKS[:2], size=1, deterministic=deterministic))
    assert (left.reason, other.reason) == ("does_not_end", "")
    assert left.message.startswith("Scripted-v0 goes on ")
    assert world.closed == world.made == 2


def test_an_answer_that_comes_of_a_cancellation_is_a_timeout(world):
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


def test_a_judge_of_groups_that_goes_on_when_cancelled_fails_its_group(world, deaf):
    spec = make_spec(world, score_group=lambda self, task, episodes: deaf())
    assert {o.reason for o in outcomes(play(spec, tasks=TASKS[:1], episode_timeout=0.05))} == {"does_not_end"}


def test_what_was_left_to_itself_samples_no_more(world, deaf):
    class Deafened(OneAnswer):
        async def run(self, env, task, engine, *, seed):
            await deaf()
            await engine.generate([1, 2])

    before = cancellation.abandoned_tasks()

    async def main():
        engine, config = OneToken(), RolloutConfig(episode_timeout=0.05)
        agent = Deafened(None, AgentConfig())
        runner = Runner(make_spec(world), agent, engine, config, max_model_len=64, seed=0, deterministic=False)
        [group] = await runner.roll_out(TASKS[:1], SamplingPlan("p", SAMPLING, 1))
        assert outcomes([group])[0].reason == "does_not_end"
        left = cancellation.abandoned_tasks() - before
        deaf.free.set()
        await asyncio.wait(left)
        assert engine.requests == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_stop_leaves_behind_what_goes_on(world, deaf):
    """Episodes and what they have started, and also where a loop ends with them in it."""

    async def step(*args):
        started.append(asyncio.create_task(deaf()))
        if len(started) == 3:
            all_started.set()
        await deaf()

    async def main():
        agent = OneAnswer(None, AgentConfig())
        runner = Runner(spec, agent, OneToken(), RolloutConfig(), max_model_len=64, seed=0, deterministic=False)
        playing = asyncio.ensure_future(runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, 1)))
        await all_started.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert len(cancellation.abandoned_tasks() - before) == 3 == world.closed

    started, all_started, spec = [], asyncio.Event(), make_spec(world)
    spec.env_class.step = step
    before = cancellation.abandoned_tasks()
    event_loop.run(main())
    assert len(cancellation.abandoned_tasks() - before) == 6
    assert deaf.heard >= 6


class Stuck(OneToken):
    """Answers nobody; the last of `n` requests finds it dead, where it `dies`."""

    def __init__(self, n, dies):
        super().__init__()
        self.n, self.dies = n, dies
        self.all_asked = asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        if len(self.requests) == self.n:
            self.all_asked.set()
            if self.dies:
                raise WorkerDied("engine: killed")
        await asyncio.Event().wait()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("size", [2, 10**9])  # a billion: members start as places are free, whatever their number
def test_the_engines_death_or_a_stop_ends_the_rollout_once_every_environment_is_closed(
    world, deterministic, dies, size
):
    """Some take longer to close than others."""

    async def some_turns_of_the_loop():
        for _ in range(3 * world.closed):
            await asyncio.sleep(0)
        world.finished_closing += 1

    world.on_close = some_turns_of_the_loop

    async def main():
        engine, agent, config = Stuck(6, dies), OneAnswer(None, AgentConfig()), RolloutConfig(concurrency=6)
        spec = make_spec(world)
        runner = Runner(spec, agent, engine, config, max_model_len=64, seed=0, deterministic=deterministic)
        playing = asyncio.ensure_future(runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, size)))
        await engine.all_asked.wait()
        if not dies:
            playing.cancel()
        with pytest.raises(WorkerDied if dies else asyncio.CancelledError):
            await playing
        assert world.finished_closing == world.closed == world.made <= (6 if size == 2 else 7)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_stop_is_heeded_while_members_start(world):
    """However many places there are."""

    async def main():
        config = RolloutConfig(concurrency=10**9)
        agent = OneAnswer(None, AgentConfig())
        runner = Runner(make_spec(world), agent, Stuck(1, False), config, max_model_len=64, seed=0, deterministic=False)
        async with asyncio.timeout(0):
            await runner.roll_out(TASKS, SamplingPlan("p", SAMPLING, 10**9))

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert world.closed == world.made


def test_of_two_rollouts_at_once_the_first_ones_members_start_first(world):
    async def main():
        engine, agent = OneToken(), OneAnswer(None, AgentConfig())
        config = RolloutConfig(concurrency=2)
        runner = Runner(make_spec(world), agent, engine, config, max_model_len=64, seed=0, deterministic=False)
        await asyncio.gather(*(runner.roll_out(TASKS[:1], SamplingPlan(name, SAMPLING, 6)) for name in ("a", "b")))
        return "".join(request.id[0] for request in engine.requests)

    assert asyncio.run(main()) == "a" * 6 + "b" * 6


# -- episodes kept from before ----------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_kept_episodes_are_not_played_again(world, deterministic):
    first = play(make_spec(world), deterministic=deterministic)
    completed = {(episode.group_id, episode.member): episode for episode in (first[0].episodes[1], *first[2].episodes)}
    world.seeds.clear()
    told, ended = [], []
    again = play(
        make_spec(world),
        deterministic=deterministic,
        completed=completed,
        on_progress=lambda *said: told.append(said[:2]),
        on_episode=ended.append,
    )
    assert [task for task, _ in world.seeds] == ["t0", "t1", "t1"]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [episode.id for group in again for episode in group.episodes] == [
        episode.id for group in first for episode in group.episodes
    ]
    assert again[0].episodes[1] is first[0].episodes[1]
    assert sorted(episode.id for episode in ended) == ["p/00000:000:0", "p/00001:000:0", "p/00001:001:0"]


def test_progress_counts_failures_by_kind(world):
    told = []
    play(
        make_spec(world),
        engine=OneToken({"p/00001": WorkerError("no")}),
        on_progress=lambda done, total, failures: told.append((done, total, dict(failures))),
        concurrency=1,
    )
    assert told[0] == (1, 6, {})
    assert told[-1] == (6, 6, {"engine": 2})


def test_a_group_judged_together_is_told_of_again_also_with_members_kept_from_before(world):
    ended = []
    spec = judged_by(world, lambda task, episodes: [0.25] * len(episodes) if task.id == "t1" else None)
    groups = play(spec, on_episode=lambda episode: ended.append((episode.group_id, episode.member, episode.reward)))
    assert ended[6:] == [("p/00001", 0, 0.25), ("p/00001", 1, 0.25)]
    ended.clear()
    completed = {(episode.group_id, episode.member): episode for group in groups for episode in group.episodes}
    play(
        spec,
        completed=completed,
        on_episode=lambda episode: ended.append((episode.group_id, episode.member, episode.reward)),
    )
    assert ended == [("p/00001", 0, 0.25), ("p/00001", 1, 0.25)]


# -- environments that judge a group ----------------------------------------------------------------------


def judged_by(world, judge):
    async def score_group(self, task, episodes):
        return judge(task, episodes)

    return make_spec(world, score_group=score_group)


def test_a_judge_of_groups_sees_the_finished_members_and_sets_their_rewards(world):
    fails = iter([True, False, False])

    def step():
        if next(fails):
            raise ValueError
        return "", None, True, False, {}

    world.on_step = step
    spec = judged_by(world, lambda task, episodes: [0.5, 3.0] if len(episodes) == 2 else None)
    [group] = play(spec, size=3, tasks=TASKS[:1])
    found = [(episode.failed, episode.reward, episode.score) for episode in group.episodes]
    assert found == [(True, None, None), (False, 0.5, None), (False, 3.0, None)]  # 3 is no score, so 0.5 is none
    assert ["score" in [kind for kind, _, _ in episode.spans] for episode in group.episodes] == [False, True, True]


def test_a_judges_rewards_do_not_replace_the_environments_own_score(world):
    world.on_step = lambda: ("", None, True, False, {"score": 0.25})
    [group] = play(judged_by(world, lambda task, episodes: [1.0, 0.0]), tasks=TASKS[:1])
    assert [(episode.reward, episode.score) for episode in group.episodes] == [(1.0, 0.25), (0.0, 0.25)]


@pytest.mark.parametrize("verdict", [1.0, None])
def test_what_steps_paid_does_not_stand_beside_what_the_judge_pays(verdict):
    rows = [Row([], turns=[Turn(3.0, "stop"), Turn(0.5, "stop")]), Row([], turns=[Turn(2.0, "stop")])]
    episode = Episode("e", TASKS[0], Outcome.complete(), rows=rows, reward=5.5)
    apply_reward(episode, Reward(verdict))
    assert [[turn.reward for turn in row.turns] for row in rows] == [[None, None], [verdict]]
    assert episode.reward == verdict


def test_a_judge_may_say_more_than_a_reward_or_fail_at_one_member(world):
    verdicts = [Reward(2.0, score=0.75, metrics={"style": 0.5}), None, InvalidOutcome("judge", "unreadable")]
    [group] = play(judged_by(world, lambda task, episodes: verdicts), size=3, tasks=TASKS[:1])
    said, silent, broken = group.episodes
    assert (said.reward, said.score, said.metrics) == (2.0, 0.75, {"style": 0.5})
    assert (silent.reward, silent.score, silent.failed) == (None, None, False)
    assert (broken.outcome.reason, broken.outcome.message, broken.reward) == ("judge", "unreadable", None)


def test_the_death_of_a_model_that_judges_ends_the_rollout(world):
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
def test_a_judge_that_breaks_fails_its_group_and_no_other(world, judge, kind):
    spec = judged_by(world, lambda task, episodes: judge(task, episodes) if task.id == "t1" else None)
    groups = play(spec)
    assert [{episode.outcome.reason for episode in group.episodes} for group in groups] == [{""}, {kind}, {""}]
    assert [{episode.reward for episode in group.episodes} for group in groups] == [{1.0}, {None}, {1.0}]
