"""What every environment is kept to, whoever wrote it."""

import asyncio
import copy
import random
import subprocess
import sys

import gymnasium
import pytest

import envgym
from envgym.errors import ConfigError, InvalidStep, ResetNeeded
from envgym.types import Action, Message, Observation, Task, TextPart

OPTIONS = {"task": Task("t")}


class Ends(envgym.Env):
    """Ends at the first step: by itself, or at a limit."""

    ending = "terminated"

    async def reset(self, *, seed=None, options=None):
        return "say", {}

    async def step(self, action):
        return "", 1.0, self.ending == "terminated", self.ending == "truncated", {}


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_an_episode_that_has_ended_takes_no_step(ending):
    async def main():
        async with envgym.EnvSpec("Ends-v0", type("Own", (Ends,), {"ending": ending})).make() as env:
            for _ in range(2):
                with pytest.raises(ResetNeeded):
                    await env.step(Action("too early"))
                await env.reset(options=OPTIONS)
                await env.step(Action("x"))
                with pytest.raises(ResetNeeded):
                    await env.step(Action("too late"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ((None, 1.0, True, {}), r"\(observation, reward, terminated, truncated, info\), not \(None, 1.0, True"),
        ((None, 1.0, True, False, None), r"\(observation, reward, terminated, truncated, info\), not"),
        ((None, float("nan"), True, False, {}), "a reward must be finite, not nan"),
        ((None, 1.0, True, False, {"score": 1.5}), "a score lies in .0, 1., not at 1.5"),
        ((None, 1.0, True, False, {"metrics": [1]}), "names to numbers, not .1."),
    ],
)
def test_a_step_that_is_none_is_refused_with_what_is_wrong(returned, says):
    class Returns(Ends):
        async def step(self, action):
            return returned

    async def main():
        async with envgym.EnvSpec("Returns-v0", Returns).make() as env:
            await env.reset(options=OPTIONS)
            await env.step(Action("x"))

    with pytest.raises(InvalidStep, match=says):
        asyncio.run(main())


def test_metrics_that_are_no_numbers_are_counted():
    class Returns(Ends):
        async def step(self, action):
            numbers = {"n" * 200: 2, "n" * 3_000_000: 3}  # a server's name may be longer than any table
            return None, 1.0, True, False, {"metrics": {"tries": True, "time": float("inf"), "note": "x", **numbers}}

    async def main():
        async with envgym.EnvSpec("Returns-v0", Returns).make() as env:
            await env.reset(options=OPTIONS)
            return await env.step(Action("x"))

    assert asyncio.run(main())[4]["metrics"] == {"tries": 1.0, "n" * 200: 2.0, "invalid_metrics": 3.0}


def test_a_place_is_given_back_once_however_often_an_instance_is_closed():
    async def main():
        limited = envgym.EnvSpec("Ends-v0", Ends)
        limited.config.concurrency = 1
        first = limited.make()
        await first.reset(options=OPTIONS)
        await first.close()
        await first.close()
        second, third = limited.make(), limited.make()
        await second.acquire()
        waiting = asyncio.create_task(third.acquire())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        await second.close()
        await waiting

    asyncio.run(main())


# -- the interface as Gymnasium's users know it ----------------------------------------------------------------


class Poses(Ends):
    """Shows its task, and has attributes of its own."""

    word = "apple"
    _secret = 1

    async def reset(self, *, seed=None, options=None):
        self.posed = (self.task, options["task"], self.config)
        return self.task.prompt, {}

    def shout(self):
        return self.word.upper()


def test_made_environments_forward_public_attributes_and_can_be_unwrapped():
    env = envgym.EnvSpec("Poses-v0", Poses).make()
    assert type(env.unwrapped) is Poses
    assert env.unwrapped.unwrapped is env.unwrapped
    assert (env.word, env.shout()) == ("apple", "APPLE")
    for name in ("_secret", "nonsense", "__array__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(env, name)
    assert type(copy.copy(env)) is type(env)
    assert copy.copy(env).word == "apple"


def test_task_and_config_are_there_when_reset_runs():
    async def main():
        async with envgym.EnvSpec("Poses-v0", Poses, call_timeout=7).make() as env:
            task = Task("t", "Well?")
            await env.reset(options={"task": task})
            assert env.posed == (task, task, env.spec.config)
            assert (env.task, env.unwrapped.task, env.config.call_timeout) == (task, task, 7)
            await env.reset(seed=3)
            assert env.posed[0] is env.posed[1] is env.task
            assert env.task.id.startswith("seed-")

    asyncio.run(main())


def test_an_environment_may_have_its_own_attribute_config():
    class Loads(Ends):
        def __init__(self):
            self.config = {"level": 1}

    assert envgym.EnvSpec("Loads-v0", Loads).make().unwrapped.config == {"level": 1}


def made(init, **settings):
    cls = type("Sized", (Ends,), {"__init__": init})
    spec = envgym.EnvSpec("Sized-v0", cls, **settings)
    return spec, spec.make().unwrapped


def test_arguments_of_the_constructor_are_settings():
    def init(self, difficulty=3, *, names: tuple[str, ...] = ("a",), rate=0.5, note=None):
        self.arguments = (difficulty, names, rate, note)
        self.seen = self.config.difficulty

    spec, env = made(init)
    assert (env.arguments, env.seen) == ((3, ("a",), 0.5, None), 3)
    spec, env = made(init, difficulty=5, names=["b"], rate=1, call_timeout=2)
    assert (env.arguments, env.seen, spec.config.call_timeout) == ((5, ("b",), 1.0, None), 5, 2)
    assert (
        spec.to_json()
        == '{"id": "Sized-v0", "kwargs": {"call_timeout": 2.0, "difficulty": 5, "names": ["b"], "rate": 1.0}}'
    )
    with pytest.raises(
        ConfigError, match=r"environment Sized-v0: unknown key 'dificulty'. Did you mean 'difficulty'\?"
    ):
        made(init, dificulty=5)
    with pytest.raises(ConfigError, match="key 'difficulty': must be a whole number, got 'hard'"):
        made(init, difficulty="hard")


def test_arguments_of_a_tool_environments_constructor_join_its_settings():
    class Shop(envgym.ToolEnv):
        def __init__(self, goods: int):
            self.goods = goods

        def tools(self):
            return []

        def grade(self, action):
            return 1.0

    spec = Shop.spec_class("Shop-v0", Shop, goods=2, max_calls=3)
    assert (spec.make().goods, spec.config.max_calls, spec.agent) == (2, 3, "tool_calling")


class Opaque:
    pass


def starred(self, *levels): ...


def double_starred(self, **levels): ...


def unnamed(self, level, /): ...


def unset(self, level): ...


def opaque(self, level: Opaque): ...


def unresolved(self, level: "Nowhere"): ...  # noqa: F821


@pytest.mark.parametrize(
    ("init", "says"),
    [
        (starred, r"arguments of __init__ cannot be settings: each must be passable by keyword, unlike \*levels"),
        (double_starred, r"passable by keyword, unlike \*\*levels"),
        (unnamed, "passable by keyword, unlike level"),
        (unset, "key 'level' is required"),
        (opaque, "cannot be settings: Unable to generate .*Opaque"),
        (unresolved, "cannot be settings: name 'Nowhere' is not defined"),
    ],
)
def test_a_constructor_whose_arguments_are_no_settings_is_an_error_in_one_line(init, says):
    with pytest.raises(ConfigError, match=f"^environment Sized-v0: .*{says}") as error:
        made(init)
    assert "\n" not in str(error.value)


def test_an_environment_with_a_config_and_arguments_is_an_error():
    class Both(Ends):
        class Config(envgym.EnvConfig):
            size: int = 1

        def __init__(self, size=1): ...

    with pytest.raises(ConfigError, match="arguments of __init__ cannot be settings: it has a Config too"):
        envgym.EnvSpec("Both-v0", Both)


class SeedsAsDocumented(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.draws(), {}

    async def step(self, action): ...

    def draws(self):
        return f"{self.np_random.random()} {self.rng.random()}"


class SeedsAwaited(SeedsAsDocumented):
    async def reset(self, *, seed=None, options=None):
        await envgym.Env.reset(self, seed=seed, options=options)
        return self.draws(), {}


class SeedsInAThread(SeedsAsDocumented):
    def reset(self, *, seed=None, options=None):
        envgym.Env.reset(self, seed=seed)
        return self.draws(), {}


class SeedsNothing(SeedsAsDocumented):
    async def reset(self, *, seed=None, options=None):
        return self.draws(), {}


@pytest.mark.parametrize("cls", [SeedsAsDocumented, SeedsAwaited, SeedsInAThread, SeedsNothing])
@pytest.mark.filterwarnings("error")
def test_generators_are_seeded_as_gymnasiums(cls):
    async def main():
        async with envgym.EnvSpec("Seeds-v0", cls).make() as env:
            texts = [(await env.reset(seed=seed, options=OPTIONS))[0].text for seed in (5, 5, 6, None)]
            return texts, env.np_random is env.unwrapped.np_random

    (first, second, third, fourth), shared = asyncio.run(main())
    theirs = gymnasium.utils.seeding.np_random(5)[0]
    assert first == second == f"{theirs.random()} {random.Random(5).random()}"
    assert len({first, third, fourth}) == 3, "without a seed the generators continue"
    assert shared


def test_an_instance_without_a_spec_has_generators_too():
    observation, _ = asyncio.run(SeedsAsDocumented().reset(seed=5))
    assert observation.endswith(f" {random.Random(5).random()}")


def test_numpy_is_imported_when_it_is_used():
    code = "import sys, envgym.env, envgym.registry; print('numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


class Echoes(Ends):
    async def step(self, action):
        return action.text, 1.0, True, False, {}


def test_a_step_takes_text_as_well_as_an_action():
    async def run(action):
        env = envgym.make(Echoes)
        await env.reset(seed=0)
        return (await env.step(action))[0].text

    assert asyncio.run(run("five")) == asyncio.run(run(envgym.Action("five"))) == "five"
    with pytest.raises(TypeError, match="an action is text or an Action, not 5"):
        asyncio.run(run(5))


def test_classes_and_decorated_functions_can_be_made():
    @envgym.reward
    def one(completion):
        return 1.0

    assert type(envgym.make(Echoes).unwrapped) is Echoes
    assert envgym.make(one, data=[{"question": "q"}]).spec.id == "one"
    for wrong in (Echoes(), lambda completion: 1.0, int):
        with pytest.raises(ConfigError, match="is not usable as environment: it must be a subclass of"):
            envgym.make(wrong)


class PlainConfig(Ends):
    class Config:
        size = 1


class NoOptions(Ends):
    async def reset(self, *, seed=None):
        return "Well?", {}


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (PlainConfig, "its class Config must be a subclass of envgym.EnvConfig"),
        (NoOptions, "reset must take seed and options: got an unexpected keyword argument 'options'"),
    ],
)
def test_an_environment_of_the_wrong_form_is_an_error_when_it_is_made(cls, says):
    with pytest.raises(ConfigError, match=f"^environment {cls.__name__}: {says}"):
        envgym.make(cls)


def test_tasks_that_are_no_task_set_are_an_error_at_the_first_reset():
    class Listed(envgym.EnvSpec):
        env_class = Ends

        def tasks(self, split):
            return [envgym.Task("a", "b")] if split == "train" else envgym.TaskList([])

    class Empty(Listed):
        def tasks(self, split):
            return envgym.TaskList([])

    with pytest.raises(ConfigError, match=r"tasks returns a task set, envgym.TaskList\(…\) say, not a list"):
        asyncio.run(envgym.make(Listed).reset())
    with pytest.raises(ConfigError, match="environment Empty has no training tasks"):
        asyncio.run(envgym.make(Empty).reset())


def test_a_limit_of_steps_is_no_setting_of_an_environment():
    with pytest.raises(ConfigError, match="the agent limits an episode, by"):
        envgym.register("Limited-v0", Ends, max_episode_steps=5)


def test_messages_and_observations_take_text():
    hi = Message("user", (TextPart("hi"),))
    assert (
        Message("user", "hi")
        == Message.user("hi")
        == Message("user", ["hi"])
        == Message("user", [TextPart("hi")])
        == hi
    )
    assert (Message.assistant("a").role, Message.system("s").role) == ("assistant", "system")
    assert Message("assistant", ()).text == ""
    assert Observation("Well?") == Observation(text="Well?") != Observation(hi)
    as_mapping = {"role": "user", "content": "hi"}
    assert Observation(hi) == Observation([hi]) == Observation((hi,))
    assert Observation(hi) == Observation(as_mapping) == Observation([as_mapping])


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Message("user", 5), r"the content of a message is text, an image \(.*\), or a list of these, not int"),
        (lambda: Message("user", None), "or a list of these, not NoneType"),
        (lambda: Message("user", ["a", 5]), "or a list of these, not int"),
        (lambda: Observation(5), "an observation is text, messages or an Observation, not int"),
        (lambda: Observation(None), "text, messages or an Observation, not NoneType"),
        (lambda: Observation([5]), "a prompt is a string or a list of .* messages, not 5"),
        (lambda: Observation(text=b"x"), "the text of an observation is a string, not bytes"),
    ],
)
def test_messages_and_observations_of_other_types_raise_where_they_are_built(build, says):
    with pytest.raises(TypeError, match=says):
        build()
