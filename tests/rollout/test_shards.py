"""Episodes in several processes (`rollout.processes`), with real processes, engines and services."""

import asyncio
import itertools
import os
import signal
import textwrap
from dataclasses import replace
from functools import partial

import pytest

import envgym
from envgym.engine import ChatEngine, ChatReply, SamplingParams
from envgym.engines.pool import EngineClient, EnginePool
from envgym.errors import ConfigError, InvalidOutcome, WorkerDied
from envgym.images import ImageFolder
from envgym.processes import event_loop
from envgym.processes.cancellation import pause_timeouts
from envgym.processes.local import LocalRuntime
from envgym.rollout.attempts import LocalAttempts
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.rollout.shard import ShardSpec
from envgym.rollout.shards import Shards
from envgym.types import Message, StopReason, Task
from tests.running import is_running

PARTS = '''
import asyncio, os, pathlib, signal, time
import numpy as np
import envgym
from envgym.agent import Agent, AgentConfig
from envgym.engine import EngineInfo, Generation
from envgym.render import NoRenderer
from envgym.types import (
    Action, Episode, ImagePart, Message, Outcome, Row, Segment, StopReason, Turn, VersionSpan, int_array, float_array
)

class Engine:
    """Answers with a token that depends on the request, and writes down who asked."""

    def __init__(self):
        self.waves, self.wave = [], []

    async def info(self):
        return EngineInfo("test", 64)

    async def steps(self):
        return 0

    async def generate(self, request):
        self.wave.append(request.id)
        await asyncio.sleep(0.01)
        if self.wave:
            self.waves.append(self.wave)
            self.wave = []
        token = 3 + (request.sampling.seed or 0) % 50
        return Generation(int_array([token]), float_array([-0.5]), StopReason.STOP, (VersionSpan(0, 0, 1),))

    def asked(self):
        return self.waves

class Asks(Agent):
    async def run(self, env, task, sampler, *, seed):
        observation, _ = await env.reset(seed=seed, options={"task": task})
        messages, turns, ended, context = [*observation.messages], [], False, [1, 2]
        segments = [Segment("prompt", context)]
        while not ended:
            generation = await sampler.generate(context)
            answer = generation.token_ids
            observation, reward, terminated, truncated, info = await env.step(Action(str(answer[0]), answer))
            ended = terminated or truncated
            segments.append(Segment("action", answer, logprobs=generation.logprobs, versions=generation.versions))
            turns.append(Turn(reward, generation.stop_reason))
            messages += observation.messages
            context = [*context, *answer]
        row = Row(segments, turns=turns)
        reward = sum(turn.reward for turn in turns)
        return Episode("", task, Outcome.finish(), rows=[row], reward=reward, messages=messages,
                       metrics={"pid": float(os.getpid())})

class Chats(Agent):
    interface = "messages"

    async def run(self, env, task, sampler, *, seed):
        observation, _ = await env.reset(seed=seed, options={"task": task})
        reply = await sampler.chat(observation.messages)
        return Episode("", task, Outcome.finish(), reward=1.0, messages=[*observation.messages, reply.message],
                       metrics={"pid": float(os.getpid())})

class Replays(Agent):
    uses_policy = False

    async def run(self, env, task, sampler, *, seed):
        raise NotImplementedError

    async def replay(self, env, task, *, seed, recording_index):
        await env.reset(seed=seed, options={"task": task})
        return Episode("", task, Outcome.finish(), metrics={"pid": float(os.getpid()), "seed": float(seed),
                                                            "index": float(recording_index)})

def make_agent():
    return Asks(NoRenderer(), AgentConfig())

def make_chats():
    return Chats(NoRenderer(), AgentConfig())

def make_replays():
    return Replays(NoRenderer(), AgentConfig())

class Game(envgym.Env):
    """Two turns; what it does in the second is the task's answer."""

    async def reset(self, *, seed=None, options=None):
        self.task, self.turn = options["task"], 0
        return Message("user", f"{self.rng.random()}"), {}

    async def step(self, action):
        self.turn += 1
        if self.turn == 1:
            return Message("user", "more"), 0.25, False, False, {}
        match self.task.answer:
            case "exit" | "exit once":
                flag = pathlib.Path(self.task.fields["flag"])
                if self.task.answer == "exit" or not flag.exists():
                    flag.touch()
                    os._exit(3)
            case "wait":
                with open(self.task.fields["flag"], "a") as file:
                    file.write(f"{os.getpid()} {self.task.id}\\n")
                await asyncio.sleep(0.5)
            case "spin":
                while True:
                    pass
            case "long":
                pathlib.Path(self.task.fields["began"]).touch()
                await asyncio.sleep(1000)
            case "judge":
                text = await self.spec.clients["judge"].complete(self.task.id)
                return Message("user", text), 0.5, True, False, {}
            case "picture":
                image = ImagePart.from_value(np.full((4, 6, 3), 9, np.uint8))
                return Message.user("look", image), 0.5, True, False, {}
            case "lambda":
                return Message("user", "done"), 0.5, True, False, {"metrics": {"x": 1.0}}
        return Message("user", "done"), float(action.token_ids[0]), True, False, {}

    async def close(self):
        if self.task.answer == "long":
            pathlib.Path(self.task.fields["flag"]).touch()

class Limited(Game):
    pass
'''


class Stage:
    """Engines in processes, and a runner with or without processes of its own."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.module = f"parts_{os.path.basename(folder).replace('-', '_')}"
        (folder / f"{self.module}.py").write_text(textwrap.dedent(PARTS))
        monkeypatch.syspath_prepend(folder)
        self.notes = []

    def run(
        self, play, processes=2, engines=1, deterministic=False, clients=None, env="Game", settings=None,
        agent="make_agent", sampler=None, **config,
    ):  # fmt: skip
        """The result of `play(self)`, with `self.runner` and so on. `sampler`: what samples in place of the engines."""

        async def main():
            runtime = LocalRuntime(self.folder / "logs", deterministic=deterministic)
            spec = envgym.spec(f"{self.folder / self.module}.py:{env}", **(settings or {}))
            spec.store_images(ImageFolder(self.folder / "images"))
            spec.clients = clients or {}

            async def start_engine(number):
                name = f"engine-{number}"
                return EngineClient(await runtime.start(f"{self.module}:Engine", {}, name=name))

            async def start_shard(number, shard):
                arguments = {"number": number, "shard": shard}
                return await runtime.start("envgym.rollout.shard:RolloutShard", arguments, name=f"rollout-{number}")

            try:
                async with spec:
                    self.engine = await EnginePool.start(
                        start_engine, engines, round_robin=deterministic, note=self.notes.append
                    )
                    make_agent, sampled = getattr(__import__(self.module), agent), sampler or self.engine
                    sampled = sampled if make_agent().uses_policy else None
                    rollout, shards = RolloutConfig(**{"refills": 0, "retries": 0, **config}), None
                    common = {"max_model_len": 64, "seed": 5, "deterministic": deterministic}
                    if processes:
                        shard = ShardSpec(
                            partial(type(spec).from_json, spec.to_json()), make_agent, rollout,
                            images=self.folder / "images", **common,
                        )  # fmt: skip
                        local = LocalAttempts(spec, make_agent(), None, rollout, **common)
                        shards = Shards(start_shard, processes, shard, local, sampled, self.notes.append)
                    self.shards = shards
                    self.runner = Runner(spec, make_agent(), sampled, rollout, **common, attempts=shards)
                    try:
                        return await play(self)
                    finally:
                        await self.runner.attempts.close()
            finally:
                await runtime.close()

        return event_loop.run(asyncio.wait_for(main(), 120))

    async def roll_out(self, tasks, samples=2, purpose="p"):
        return await self.runner.roll_out(tasks, SamplingPlan(purpose, SamplingParams(max_tokens=4), samples))

    def pids(self):
        return [shard.pid for shard in self.shards.members]


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return Stage(tmp_path, monkeypatch)


def tasks_of(answers, **fields):
    return [Task(f"t{index}", "?", answer, fields=fields) for index, answer in enumerate(answers)]


def content(groups):
    """What groups hold, without the process."""
    for group in groups:
        for episode in group.episodes:
            assert episode.task in (group.task, None)
            episode.metrics.pop("pid", None)
            episode.seconds = 0.0
    return groups


async def until(condition):
    while not condition():  # noqa: ASYNC110  # what another process does is no event of this loop
        await asyncio.sleep(0.02)


def failures(groups):
    return [
        (episode.outcome.reason, episode.task.id) for group in groups for episode in group.episodes if episode.failed
    ]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_episodes_are_those_of_a_single_process(stage, deterministic):
    class Judge:
        async def complete(self, text):
            await asyncio.sleep(0.01)
            return f"judged {text} in {os.getpid()}"

    async def play(stage):
        groups = await stage.roll_out(tasks_of(["", "judge", "picture", ""]), 3)
        pids = {episode.metrics["pid"] for group in groups for episode in group.episodes}
        waves = await stage.engine.clients[0].run(lambda engine: engine.asked())
        return content(groups), pids, waves

    expected, pids, expected_waves = stage.run(play, 0, deterministic=deterministic, clients={"judge": Judge()})
    groups, other_pids, waves = stage.run(play, 2, deterministic=deterministic, clients={"judge": Judge()})
    assert groups == expected
    assert not failures(groups)
    assert pids == {os.getpid()}
    assert len(other_pids) == 2
    assert os.getpid() not in other_pids
    if deterministic:
        assert waves == expected_waves


@pytest.mark.parametrize("deterministic", [True, False])
def test_branches_are_those_of_a_single_process(stage, deterministic):
    async def play(stage):
        plan = SamplingPlan("p", SamplingParams(max_tokens=4), 2, branches=3)
        return content(await stage.runner.roll_out(tasks_of(["", "lambda"]), plan))

    expected = stage.run(play, 0, deterministic=deterministic)
    groups = stage.run(play, 2, deterministic=deterministic)
    assert groups == expected
    assert not failures(groups)
    for group in groups:
        assert [episode.parent_turn for episode in group.episodes] == [0, 0, 1, 1, 1]
        for episode in group.episodes[2:]:
            parent = next(parent for parent in group.episodes if parent.id == episode.parent)
            assert episode.rows[0].segments[:2] == parent.rows[0].segments[:2]


def test_members_of_a_group_are_in_one_process_and_the_requests_bypass_the_controller(stage):
    async def play(stage):
        groups = await stage.roll_out(tasks_of([""] * 8), 4)
        pids = [{episode.metrics["pid"] for episode in group.episodes} for group in groups]
        assert all(len(of_group) == 1 for of_group in pids)
        assert len(set().union(*pids)) == 2
        assert stage.engine._n_requests == 0
        assert not stage.engine._assigned

    stage.run(play, engines=2)


class Api(ChatEngine):
    """An API that takes messages."""

    async def chat(self, request):
        if not request.messages[0].text.startswith("0."):
            raise InvalidOutcome("service", "no number")
        return ChatReply(Message("assistant", f"{request.id} {request.sampling.seed}"), StopReason.STOP, 1, 1)


@pytest.mark.parametrize("agent", ["make_chats", "make_replays"])
def test_an_api_is_asked_by_the_controller_and_replays_need_no_engine(stage, agent):
    async def play(stage):
        groups = await stage.roll_out(tasks_of(["", "", ""]))
        pids = {episode.metrics["pid"] for group in groups for episode in group.episodes}
        return content(groups), pids

    for deterministic in (False, True):
        settings = {"agent": agent, "sampler": Api(), "deterministic": deterministic}
        expected, _ = stage.run(play, 0, **settings)
        groups, pids = stage.run(play, 2, **settings)
        assert groups == expected
        assert not failures(groups)
        assert os.getpid() not in pids


def test_a_killed_process_loses_its_running_episodes_and_these_are_run_again(stage, tmp_path):
    flag = tmp_path / "flag"

    async def play(stage):
        rolling = asyncio.create_task(stage.roll_out(tasks_of(["wait"] * 4, flag=str(flag)), 2))
        await until(lambda: flag.exists() and len(flag.read_text().splitlines()) == 8)
        victim = stage.pids()[0]
        os.kill(victim, signal.SIGKILL)
        groups = await rolling
        assert [len(group.episodes) for group in groups] == [2] * 4
        assert not failures(groups)
        assert all(episode.attempt == 0 for group in groups for episode in group.episodes)
        assert len(stage.notes) == 1
        assert "rollout-" in stage.notes[0]
        assert "starting another" in stage.notes[0]
        assert victim not in {episode.metrics["pid"] for group in groups for episode in group.episodes}
        runs = [line.split()[1] for line in flag.read_text().splitlines()]
        assert len(runs) == 12, "only the four of the killed process are run again"
        await until(lambda: len(stage.pids()) == 2)
        assert victim not in stage.pids()

    stage.run(play)


def test_the_batches_of_a_deterministic_run_are_the_same_after_the_death_of_a_process(stage, tmp_path):
    async def play(stage, kills=False):
        flag = tmp_path / f"flag-{kills}"
        rolling = asyncio.create_task(stage.roll_out(tasks_of(["wait", "", "wait", ""], flag=str(flag)), 2))
        await until(lambda: flag.exists() and len(flag.read_text().splitlines()) == 4)
        if kills:
            os.kill(stage.pids()[0], signal.SIGKILL)
        groups = await rolling
        waves = await stage.engine.clients[0].run(lambda engine: engine.asked())
        assert len(stage.notes) == kills
        for group in groups:
            for episode in group.episodes:
                episode.task = episode.fingerprints = None
        return [group.episodes for group in content(groups)], waves

    expected = stage.run(play, deterministic=True)
    assert stage.run(partial(play, kills=True), deterministic=True) == expected


def test_an_environment_that_ends_its_process_fails_alone(stage, tmp_path):
    async def play(stage):
        tasks = tasks_of(["exit", "", "exit once", "wait", "wait"], flag=str(tmp_path / "flag"))
        tasks[2] = Task("t2", "?", "exit once", fields={"flag": str(tmp_path / "once")})
        groups = await stage.roll_out(tasks, 1)
        assert failures(groups) == [("crash", "t0")]
        assert "exit status 3" in groups[0].episodes[0].outcome.message
        first = groups[0].episodes[0]
        assert (first.id, first.env, first.fingerprints.keys()) == (
            "p/00000:000:0", groups[1].episodes[0].env, groups[1].episodes[0].fingerprints.keys()
        )  # fmt: skip

    stage.run(play)


def test_a_process_that_an_environment_blocks_is_killed(stage, tmp_path, monkeypatch):
    monkeypatch.setattr("envgym.rollout.shards.PING_SECONDS", 0.1)

    async def play(stage):
        groups = await stage.roll_out(tasks_of(["spin", "", "wait"], flag=str(tmp_path / "flag")), 1)
        assert failures(groups) == [("crash", "t0")]
        assert len(stage.notes) == 3

    stage.run(play, processes=1, episode_timeout=2.0)


def test_too_many_deaths_end_the_run(stage, tmp_path, monkeypatch):
    monkeypatch.setattr("envgym.processes.supervisor.MOST_DEATHS", 2)

    async def play(stage):
        with pytest.raises(WorkerDied, match=r"exit status 3 \(log: .*rollout-.*; 3 processes that roll out have died"):
            await stage.roll_out(tasks_of(["exit"] * 4, flag=str(tmp_path / "flag")), 2)

    stage.run(play, processes=1)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_dead_engine_is_replaced_for_all(stage, deterministic):
    async def play(stage):
        await stage.roll_out(tasks_of([""] * 4))
        os.kill(stage.engine.clients[0]._handle.pid, signal.SIGKILL)
        groups = await stage.roll_out(tasks_of([""] * 4), purpose="q")
        assert not failures(groups)
        assert stage.engine.deaths == 1
        assert len(stage.notes) == 1
        assert len(stage.engine.clients) == 1

    stage.run(play, deterministic=deterministic, retries=3)


def test_an_engine_that_only_a_process_takes_for_dead_is_replaced(stage):
    async def play(stage):
        reference = await stage.engine.reference(0, None)
        assert await stage.engine.reference(0, None) == reference
        assert await stage.engine.reference(0, reference) != reference
        assert stage.engine.deaths == 1
        assert "as seen from a process" in stage.notes[0]

    stage.run(play)


def test_an_engine_that_the_controller_replaces_is_replaced_in_the_processes(stage):
    async def play(stage):
        await stage.roll_out(tasks_of([""] * 4))
        stage.engine._lose(stage.engine.members[0], "its weights are half loaded")
        groups = await stage.roll_out(tasks_of([""] * 4), purpose="q")
        assert not failures(groups)
        assert stage.engine.deaths == 1

    stage.run(play, retries=3)


def test_a_service_stops_the_clock_of_an_episode_in_another_process(stage):
    class Slow:
        async def complete(self, text):
            with pause_timeouts():
                await asyncio.sleep(1.5)
            return "at last"

    async def play(stage):
        groups = await stage.roll_out(tasks_of(["judge", "judge"]))
        assert not failures(groups)
        assert groups[0].episodes[0].messages[-1].text == "at last"

    stage.run(play, clients={"judge": Slow()}, episode_timeout=1.0)


def test_requests_are_awaited_again_and_again(stage):
    module = stage.folder / f"{stage.module}.py"
    module.write_text(module.read_text() + "\nimport envgym.processes.callbacks as c\nc.POLL_SECONDS = 0.05\n")

    class Judge:
        async def complete(self, text):
            await asyncio.sleep(0.3)
            return "late"

    async def play(stage):
        await stage.runner.attempts.start()
        await asyncio.sleep(0.3)
        groups = await stage.roll_out(tasks_of(["judge", "judge"]))
        assert [episode.messages[-1].text for group in groups for episode in group.episodes] == ["late"] * 4

    stage.run(play, clients={"judge": Judge()})


def test_errors_of_services_are_those_of_a_single_process(stage):
    class Judge:
        async def complete(self, text):
            raise InvalidOutcome("judge", f"no grade for {text}", retryable=True)

    class Dead:
        async def complete(self, text):
            raise WorkerDied("the judge is gone")

    async def play(stage):
        return content(await stage.roll_out(tasks_of(["judge", ""])))

    async def end(stage):
        await stage.runner.attempts.start()
        pids = stage.pids()
        with pytest.raises(WorkerDied, match="the judge is gone"):
            await stage.roll_out(tasks_of(["judge", ""]))
        assert stage.pids() == pids

    expected = stage.run(play, 0, clients={"judge": Judge()})
    assert stage.run(play, 2, clients={"judge": Judge()}) == expected
    assert failures(expected) == [("judge", "t0")] * 2
    stage.run(end, clients={"judge": Dead()})


def test_the_environments_limit_is_that_of_all_processes(stage, tmp_path):
    async def play(stage):
        groups = await stage.roll_out(tasks_of(["wait"] * 3, flag=str(tmp_path / "flag")), 1)
        times = sorted(span[1:] for group in groups for span in group.episodes[0].spans if span[0] == "environment")
        steps = [span for span in times if span[1] - span[0] > 0.4]
        assert len(steps) == 3
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(steps))

    stage.run(play, settings={"concurrency": 1}, episode_timeout=1.4)


def test_cancelled_episodes_close_their_environments_and_nothing_is_left(stage, tmp_path):
    async def play(stage):
        flag, began = tmp_path / "flag", tmp_path / "began"
        tasks = tasks_of(["long"], flag=str(flag), began=str(began))
        rolling = asyncio.create_task(stage.roll_out(tasks, 1))
        await until(began.exists)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        return stage.pids()

    pids = stage.run(play)
    assert (tmp_path / "flag").exists()
    assert not any(map(is_running, pids))


def test_a_class_of_a_notebook_is_refused(stage):
    async def play(stage):
        make_spec = partial(envgym.EnvSpec.from_json, '{"id": "__main__:Here", "kwargs": {}}')
        stage.shards._shard = replace(stage.shards._shard, make_spec=make_spec)
        with pytest.raises(ConfigError, match=r"rollout\.processes: another process cannot make"):
            await stage.runner.attempts.start()

    stage.run(play)
