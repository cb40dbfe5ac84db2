"""Instances in separate processes (`env.processes`)."""

import asyncio
import os
import tempfile
import textwrap

import numpy as np
import pytest
from PIL import Image

import envgym
from envgym.env import EnvSpec
from envgym.errors import CallTimeout, ConfigError, InvalidOutcome, InvalidStep, WorkerDied
from envgym.images import ImageFolder
from envgym.processes import event_loop
from envgym.processes.cancellation import pause_timeouts
from envgym.types import ImagePart, Message, Task

SOURCE = """
import asyncio, ctypes, glob, os, tempfile, time
import envgym

class Config(envgym.EnvConfig):
    bonus: float = 0.0

class Counter(envgym.Env):
    Config = Config

    async def reset(self, *, seed=None, options=None):
        self.steps, self.roll = 0, self.rng.random()
        pid = os.getpid() if options["task"].id == "pid" else ""
        return f"{options['task'].id} {pid}", {"roll": self.roll, "pid": os.getpid()}

    async def step(self, action):
        self.steps += 1
        if action.text == "segfault":
            ctypes.string_at(0)
        if action.text == "wait":
            await asyncio.sleep(0.1)
        if action.text == "exit":
            os._exit(3)
        if action.text == "raise":
            raise KeyError("no such thing")
        if action.text == "spin":
            while True:
                pass
        if action.text == "compute":
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
        if action.text == "wrong":
            return 1
        if action.text == "ask":
            answers = [self.spec.clients["judge"].complete(f"{n}?", seed=n) for n in range(3)]
            return " ".join(await asyncio.gather(*answers)), 1.0, True, False, {}
        return f"{self.steps}", self.steps + self.config.bonus, self.steps == 3, False, {"score": 0.5}

class Scribbling(Counter):
    async def step(self, action):
        [mark] = glob.glob(f"{tempfile.gettempdir()}/envgym-marks-*/{os.getpid()}")
        if action.text in ("fifo", "folder", "zero"):
            os.unlink(mark)
        match action.text:
            case "fifo": os.mkfifo(mark)
            case "folder": os.mkdir(mark)
            case "zero": os.symlink("/dev/zero", mark)
            case _: os.truncate(mark, int(action.text))
        os._exit(3)

class SlowSpec(envgym.EnvSpec):
    env_class = Counter

    async def setup(self):
        await asyncio.sleep(1.5)

class Asking(Counter):
    async def step(self, action):
        if action.text == "object":
            await self.spec.clients["judge"].complete(lambda: 1)
        return await super().step(action)

    async def close(self):
        await self.spec.clients["judge"].complete("closing?")

class Blocking(envgym.Env):
    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return asyncio.run(self.spec.clients["judge"].complete("blocking?")), 1.0, True, False, {}
"""


@pytest.fixture
def counter(tmp_path):
    (tmp_path / "counter.py").write_text(textwrap.dedent(SOURCE))
    return f"{tmp_path / 'counter.py'}:Counter"


def run(play):
    return event_loop.run(asyncio.wait_for(play, 60))


async def episode(env, seed=4):
    observation, info = await env.reset(seed=seed)
    steps = [await env.step("x") for _ in range(3)]
    return observation, info["roll"], steps


def test_episodes_are_those_of_an_instance_in_the_runs_process(counter):
    async def play():
        results = []
        for processes in (0, 2):
            async with envgym.spec(counter, processes=processes, bonus=0.25) as spec:
                envs = [spec.make() for _ in range(4)]
                episodes = await asyncio.gather(*(episode(env, seed) for seed, env in enumerate(envs)))
                results.append([*episodes, *(env.tally for env in envs)])
                pids = {(await env.reset(seed=0))[1]["pid"] for env in envs}
                assert (os.getpid() in pids, len(pids)) == (processes == 0, processes or 1)
                for env in envs:
                    await env.close()
        assert results[0] == results[1]

    run(play())


def test_the_end_of_a_process_ends_its_episodes_and_no_others(counter):
    async def play():
        async with envgym.spec(counter, processes=2) as spec:
            first, second = spec.make(), spec.make()
            await first.reset(seed=0)
            await second.reset(seed=0)
            for word, says in {"segfault": "killed by SIGSEGV", "exit": "exit status 3"}.items():
                with pytest.raises(InvalidOutcome, match=says) as error:
                    await first.step(word)
                assert (error.value.kind, error.value.retryable) == ("crash", True)
                assert (await second.step("x"))[1] in (1.0, 2.0)
                await first.reset(seed=0)  # in a new process
            await first.close()
            await second.close()

    run(play())


@pytest.mark.parametrize("mark", ["0", "3", "9", "1000000", "fifo", "folder", "zero"])
def test_a_mark_that_the_environment_has_broken_is_no_mark(counter, tmp_path, monkeypatch, mark):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def play():
        async with envgym.spec(counter.replace("Counter", "Scribbling"), processes=1) as spec, spec.make() as env:
            await env.reset(seed=0)
            with pytest.raises(InvalidOutcome, match="exit status 3") as error:
                await env.step(mark)
            assert (error.value.kind, error.value.retryable) == ("crash", True)

    run(play())


def test_an_instance_whose_process_died_between_two_calls_is_built_again(counter):
    async def play():
        async with envgym.spec(counter, processes=1) as spec:
            patient, deadly = spec.make(), spec.make()
            _, info = await patient.reset(seed=5)
            await patient.step("x")
            await deadly.reset(seed=0)
            with pytest.raises(InvalidOutcome):
                await deadly.step("exit")
            observation, reward, *_ = await patient.step("x")
            assert (observation.text, reward) == ("2", 2.0)
            assert info["roll"] == (await patient.reset(seed=5))[1]["roll"]
            await patient.reset(seed=5, options={"task": Task("pid")})  # shows the number of its process
            await deadly.reset(seed=0)
            with pytest.raises(InvalidOutcome):
                await deadly.step("exit")
            with pytest.raises(InvalidOutcome, match="gave another result"):
                await patient.step("x")
            await patient.close()
            await deadly.close()

    run(play())


def test_of_concurrent_calls_the_one_that_ends_the_process_fails_and_the_others_are_repeated(counter):
    async def play():
        async with envgym.spec(counter, processes=1) as spec:
            envs = [spec.make() for _ in range(6)]
            await asyncio.gather(*(env.reset(seed=n) for n, env in enumerate(envs)))
            words = ["x", "segfault", "x", "exit", "wait", "x"]
            results = await asyncio.gather(
                *(env.step(word) for env, word in zip(envs, words, strict=True)), return_exceptions=True
            )
            crashed = [getattr(result, "kind", "") for result in results]
            assert crashed == ["", "crash", "", "crash", "", ""]
            assert [result[1] for result, kind in zip(results, crashed, strict=True) if not kind] == [1.0] * 4
            for env in envs:
                await env.close()

    run(play())


def test_errors_are_those_of_an_instance_in_the_runs_process(counter, monkeypatch):
    async def play():
        async with envgym.spec(counter, processes=1, call_timeout=0.3) as spec, spec.make() as env:
            await env.reset(seed=0)
            with pytest.raises(InvalidOutcome, match=r"KeyError: 'no such thing' \(.*counter.py, line 25\)") as error:
                await env.step("raise")
            assert error.value.kind == "environment"
            await env.reset(seed=0)
            with pytest.raises(InvalidStep, match="step must return"):
                await env.step("wrong")
            await env.reset(seed=0)
            with pytest.raises(CallTimeout):
                await env.step("spin")  # blocks the process, which is killed
            await env.reset(seed=0)
            assert (await env.step("x"))[1] == 1.0

    monkeypatch.setattr("envgym.processes.pool.PING_SECONDS", 0.2)
    run(play())


class Judge:
    """A service of the run's own process."""

    async def complete(self, messages, *, seed=None):
        if messages == "1?":
            await asyncio.sleep(0.05)
        return f"{messages.rstrip('?')}:{seed}"


@pytest.mark.parametrize(
    ("name", "word", "answer"), [("Counter", "ask", "0:0 1:1 2:2"), ("Blocking", "x", "blocking:None")]
)
def test_services_are_called_in_the_runs_process(counter, name, word, answer):
    async def play():
        spec = envgym.spec(counter.replace("Counter", name), processes=1)
        spec.clients["judge"] = Judge()
        async with spec, spec.make() as env, spec.make() as other:
            for instance in (env, other):
                await instance.reset(seed=0)
            assert [(await instance.step(word))[0].text for instance in (env, other)] == [answer] * 2

    run(play())


def test_an_error_of_a_service_reaches_the_environment(counter):
    class Broken:
        async def complete(self, *args, **kwargs):
            raise InvalidOutcome("judge", "no grade", retryable=True)

    async def play():
        spec = envgym.spec(counter, processes=1)
        spec.clients["judge"] = Broken()
        async with spec, spec.make() as env:
            await env.reset(seed=0)
            with pytest.raises(InvalidOutcome, match="no grade") as error:
                await env.step("ask")
            assert (error.value.kind, error.value.retryable) == ("judge", True)

    run(play())


def test_a_class_of_a_notebook_or_of_a_mixture_is_refused(tmp_path):
    class Here(envgym.Env):
        async def reset(self, *, seed=None, options=None):
            return "", {}

        async def step(self, action):
            return "", 1.0, True, False, {}

    async def play():
        async with EnvSpec("__main__:Here", Here, processes=1):
            pass

    with pytest.raises(ConfigError, match="another process cannot make environment __main__:Here"):
        run(play())
    with pytest.raises(ConfigError, match="made elsewhere"):
        envgym.spec("mixture", processes=1, members={"a": {"env": "math_verify"}})


def test_the_set_up_of_a_process_has_no_deadline_and_a_spec_may_be_set_up_again(counter):
    async def play():
        spec = envgym.spec(counter.replace("Counter", "SlowSpec"), processes=1, call_timeout=0.5)
        env = spec.make()
        for _ in range(2):
            async with spec:
                assert (await env.reset(seed=1))[1]["roll"] == 0.13436424411240122

    run(play())


def test_a_service_stops_the_clock_of_the_step_that_called_it(counter):
    class Waiting(Judge):
        async def complete(self, messages, *, seed=None):
            with pause_timeouts():
                await asyncio.sleep(1.0)
            return "done"

    async def play():
        spec = envgym.spec(counter, processes=1, call_timeout=0.5)
        spec.clients["judge"] = Waiting()
        async with spec, spec.make() as env:
            await env.reset(seed=0)
            assert (await env.step("ask"))[0].text == "done done done"

    run(play())


def test_services_may_be_called_at_the_end_and_with_nothing_that_cannot_be_sent(counter):
    asked = []

    class Listening(Judge):
        async def complete(self, messages, *, seed=None):
            asked.append(messages)

    async def play():
        spec = envgym.spec(counter.replace("Counter", "Asking"), processes=1, call_timeout=20)
        spec.clients["judge"] = Listening()
        async with spec:
            async with spec.make() as env:
                await env.reset(seed=0)
                with pytest.raises(InvalidOutcome, match="pickle"):
                    await env.step("object")
            assert asked == ["closing?"]

    run(play())


def test_a_dead_engine_that_a_service_needs_ends_the_run_and_not_the_process(counter):
    class Dead:
        async def complete(self, *args, **kwargs):
            raise WorkerDied("the engine is gone")

    async def play():
        spec = envgym.spec(counter, processes=1)
        spec.clients["judge"] = Dead()
        async with spec, spec.make() as env:
            pid = (await env.reset(seed=0))[1]["pid"]
            with pytest.raises(WorkerDied, match="the engine is gone"):
                await env.step("ask")
            assert (await env.reset(seed=0))[1]["pid"] == pid

    run(play())


def test_the_end_of_an_episode_does_not_end_a_process_that_computes(counter, monkeypatch):
    monkeypatch.setattr("envgym.processes.pool.PING_SECONDS", 0.2)

    async def play():
        spec = envgym.spec(counter, processes=1)
        spec.clients["judge"] = Judge()
        async with spec:
            busy, short = spec.make(), spec.make()
            await busy.reset(seed=0)
            await short.reset(seed=0)
            computing = asyncio.create_task(busy.step("compute"))
            await short.close()
            assert (await computing)[1] == 1.0
            await busy.close()

    run(play())


def test_an_instance_beside_one_that_holds_the_interpreter_is_built_again(counter, monkeypatch):
    monkeypatch.setattr("envgym.processes.pool.PING_SECONDS", 0.2)

    async def play():
        async with envgym.spec(counter, processes=1, call_timeout=1.0) as spec:
            stuck, other = spec.make(), spec.make()
            await stuck.reset(seed=0)
            await other.reset(seed=0)
            spinning = asyncio.create_task(stuck.step("spin"))
            await asyncio.sleep(0.3)
            assert (await other.step("x"))[1] == 1.0
            with pytest.raises(CallTimeout):
                await spinning
            await stuck.close()
            await other.close()

    run(play())


PICTURES = """
import envgym, numpy as np, os
from envgym.types import ImagePart, Message

class Pictures(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return [Message.user("See:", np.full((4, 6, 3), 9, np.uint8), *options["task"].prompt[0].images)], {}

    async def step(self, action):
        image = ImagePart.from_value(np.full((4, 6, 3), int(action.text or 0), np.uint8))
        if action.text == "1":  # what the process sends is not what it checked
            sent = os.environ["SENT"]
            import envgym.env.host
            call = envgym.env.host.EnvHost._call
            async def changed(self, *args):
                observation, *rest = await call(self, *args)
                image = observation.messages[0].images[0]
                if sent == "name":
                    object.__setattr__(image, "sha256", "0" * 64)
                else:
                    object.__setattr__(image, "data", None)
                return observation, *rest
            envgym.env.host.EnvHost._call = changed
        return [Message.user(image)], 0.0, False, False, {}
"""


def play_pictures(tmp_path, *actions):
    """The images of an episode in a process, stored in `tmp_path / "images"`."""
    (tmp_path / "pictures.py").write_text(PICTURES)
    posed = ImagePart.from_value(np.full((4, 6, 3), 200, np.uint8))

    async def main():
        spec = envgym.spec(f"{tmp_path / 'pictures.py'}", processes=1)
        spec.store_images(ImageFolder(tmp_path / "images"))
        async with spec, spec.make() as env:
            observations = [(await env.reset(options={"task": Task("t", (Message.user(posed),))}))[0]]
            for action in actions:
                observations.append((await env.step(action))[0])
            results = [result for _, result in env.unwrapped._history]
            assert all(image.data is None for result in results for image in result[0].messages[0].images)
        return [image for observation in observations for image in observation.messages[0].images]

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_pictures_of_a_process_are_stored_here(tmp_path):
    images = play_pictures(tmp_path, "7", "9")
    assert [np.asarray(Image.open(image.file)).max() for image in images] == [9, 200, 7, 9]
    assert all(image.data is None and image.read() for image in images)
    assert len(list((tmp_path / "images").iterdir())) == 3
    assert images[0] == images[3]


@pytest.mark.parametrize(("sent", "problem"), [("name", "and its file is another one"), ("nothing", "its name alone")])
def test_a_process_is_not_believed(tmp_path, monkeypatch, sent, problem):
    monkeypatch.setenv("SENT", sent)
    with pytest.raises(InvalidStep, match=problem):
        play_pictures(tmp_path, "1", "1")
