"""Gymnasium environments in words, with the real ones."""

import asyncio
import io
import random
import sys
import threading

import gymnasium
import numpy as np
import pytest

from envgym import errors, registry
from envgym.envs.gymnasium_text import GymnasiumText
from envgym.types import Action

TARGET = "envgym.envs.gymnasium_text:GymnasiumText"
STILL = {"is_slippery": False}


MEETING = threading.Barrier(20)


class Remote(gymnasium.Env):
    """Says what it was told: one instance for each kind of action space. One that `meets` steps with 19 others."""

    def __init__(self, space, meets=False):
        self.action_space = space
        self.observation_space = gymnasium.spaces.Text(200)
        self.meets = meets

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "ready", {}

    def step(self, action):
        if self.meets:
            MEETING.wait(60)
        return repr(action.tolist() if isinstance(action, np.ndarray) else action), -0.5, False, False, {}


class Picture(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 3), np.uint8)


class Dot(gymnasium.Env):
    """Its observation is a picture: a dot that goes where the action says."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium's
    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Box(0, 255, (8, 12, 3), np.uint8)

    def picture(self, place):
        picture = np.full((8, 12, 3), 255, np.uint8)
        picture[2, place] = (200, 0, 0)
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.picture(0), {}

    def step(self, action):
        return self.picture(action), 0.5, False, False, {}


gymnasium.register("tests/Dot-v0", Dot)
gymnasium.register("tests/Remote-v0", Remote)
gymnasium.register("tests/Picture-v0", Picture)


def make(game="FrozenLake-v1", **settings):
    return registry.spec(TARGET, game=game, **settings)


async def play(spec, answers, seed=0, index=None):
    """One episode: the texts of all observations, the rewards, and the last step's flags and info."""
    task = None if index is None else await spec.tasks("train").get(index)
    env = spec.make()
    try:
        observation, _ = await env.reset(seed=seed, options={} if task is None else {"task": task})
        texts, rewards = [observation.messages[0].text], []
        for answer in answers if isinstance(answers, list) else answers(task):
            observation, reward, terminated, truncated, info = await env.step(Action(answer))
            texts.append(observation.messages[0].text)
            rewards.append(reward)
            if terminated or truncated:
                break
        return texts, rewards, terminated, truncated, info
    finally:
        await env.close()


def run(spec, answers, seed=0, index=None):
    return asyncio.run(play(spec, answers, seed, index))


def test_frozen_lake_is_told_as_a_map_and_walked_in_words():
    texts, rewards, terminated, _, info = run(make(kwargs=STILL), ["I go down.", "right, no: down!", "down"])
    assert "PFFF\nFHFH\nFFFH\nHFFG" in texts[0]
    assert "slippery" not in texts[0]
    assert "one of the words left, down, right, up" in texts[0]
    assert texts[1] == "SFFF\nPHFH\nFFFH\nHFFG"
    assert texts[2] == "SFFF\nFHFH\nPFFH\nHFFG"
    assert texts[3].endswith("You have fallen into a hole.")
    assert (rewards, terminated, info["score"]) == ([0, 0, 0], True, 0.0)


def test_slippery_ice_is_told():
    assert "slippery" in run(make(), ["up"])[0][0]


@pytest.mark.parametrize("size", [None, 4, 7])
def test_the_demonstration_reaches_the_goal_by_a_shortest_way(size):
    spec = make(kwargs=STILL, map_size=size)
    for index in range(5):
        _, rewards, terminated, _, info = run(spec, lambda task: spec.demonstrations(task, 0), index=index)
        assert (rewards[-1], terminated, info["score"]) == (1, True, 1.0)
    if size is None:
        assert len(rewards) == 6
        task = asyncio.run(spec.tasks("train").get(0))
        assert len({tuple(spec.demonstrations(task, seed)) for seed in range(20)}) == 3  # all of its shortest ways


def test_taxi_is_driven_to_its_destination():
    spec = make("Taxi-v4")
    for index in range(5):
        texts, rewards, terminated, _, info = run(spec, lambda task: spec.demonstrations(task, 0), index=index)
        assert "|R: | : :G|" in texts[0].replace("T", " ") or "(stand" in texts[0]
        assert "waits at" in texts[0]
        assert any("is in the taxi" in text for text in texts)
        assert texts[-1].endswith("The passenger has arrived.")
        assert rewards == [-1] * (len(rewards) - 1) + [20]
        assert (terminated, info["score"]) == (True, 1.0)


def test_taxi_says_what_else_may_happen():
    rules = run(make("Taxi-v4", kwargs={"is_rainy": True, "fickle_passenger": True}), ["north"])[0][0]
    assert "It rains" in rules
    assert "another destination" in rules


def test_an_answer_without_an_action_is_told_so_and_costs_a_turn():
    texts, rewards, terminated, truncated, info = run(make(kwargs=STILL, max_turns=3), ["Hm.", "upwards", "right"])
    assert texts[1].startswith("There is no action in your answer. Answer with one of the words")
    assert "P" in texts[3]
    assert rewards == [0, 0, 0]
    assert (terminated, truncated) == (False, True)
    assert info["metrics"] == {"turns": 3, "invalid_actions": 2}


def test_what_an_answer_without_an_action_costs():
    assert run(make("Taxi-v4"), ["?"])[1] == [-10]  # moves cost 1: saying nothing must not be cheaper
    assert run(make("CliffWalking-v1"), ["?"])[1] == [-1]
    assert run(make("CliffWalking-v1", invalid_reward=-3), ["?"])[1] == [-3]


def test_saying_nothing_earns_less_than_any_play_on_pendulum():
    """Each step costs up to 16.27 there, much more than elsewhere."""
    spec = make("Pendulum-v1")
    for seed in range(4):
        silence = sum(run(spec, ["I would rather not."] * 30, seed)[1])
        for torque in ("-2", "0", "2"):
            assert silence < sum(run(spec, [torque] * 30, seed)[1])


class Costly(gymnasium.Env):
    """Each action costs itself."""

    action_space = gymnasium.spaces.Discrete(9)
    observation_space = gymnasium.spaces.Text(200)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "ready", {}

    def step(self, action):
        return "again", -float(action), False, False, {}


gymnasium.register("tests/Costly-v0", Costly)


def test_an_answer_without_an_action_earns_no_more_than_the_worst_action_so_far():
    assert run(make("tests/Costly-v0"), ["?", "0", "?", "5", "3", "?"])[1] == [-1, 0, -1, -5, -3, -5]
    assert run(make("tests/Costly-v0", invalid_reward=-2), ["5", "?"])[1] == [-5, -2]
    assert run(make("tests/Costly-v0"), ["?"])[1] == [-1], "each episode by itself"


def test_any_other_environment_is_told_by_its_documentation_and_rendering():
    spec = make("CliffWalking-v1")
    texts, rewards, terminated, _, info = run(spec, lambda task: spec.demonstrations(task, 0), index=0)
    assert "- 1: Move right" in texts[0]
    assert "Version History" not in texts[0]
    assert "number of your action, 0 to 3" in texts[0]
    assert "\nx  C  C" in texts[0]
    assert texts[1].startswith("Reward: -1\n")
    assert (sum(rewards), terminated, info["score"]) == (-13, True, None)


@pytest.mark.parametrize("game", ["Blackjack-v1", "CartPole-v1", "MountainCarContinuous-v0", "Acrobot-v1"])
def test_an_environment_without_a_text_rendering_shows_its_observation(game):
    texts, rewards, *_ = run(make(game), ["0", "What?", "0.5, no, rather 0"])
    assert texts[0].splitlines()[-1][0] in "[("
    assert len(rewards) > 0


SPACES = gymnasium.spaces


@pytest.mark.parametrize(
    ("space", "answer", "understood"),
    [
        (SPACES.Discrete(3), "not 1 but 2", "2"),
        (SPACES.Discrete(3), "3", None),
        (SPACES.Discrete(3), "1.5", None),
        (SPACES.Discrete(3), "v2", None),
        (SPACES.Discrete(3, start=-1), "-1", "-1"),
        (SPACES.Discrete(3), "1" * 400, None),
        (SPACES.Box(-1, 1, (2,)), "first 7, then 0.5 -0.25", "[0.5, -0.25]"),
        (SPACES.Box(-1, 1, (2,)), "0.5", None),
        (SPACES.Box(-1, 1, (2,)), "0.5 2", None),
        (SPACES.Box(-1, 1, (2,)), "nan inf", None),
        (SPACES.Box(-np.inf, np.inf, (1,)), "1e999", None),
        (SPACES.Box(0, 9, (2, 2), np.int64), "1 2 3 4", "[[1, 2], [3, 4]]"),
        (SPACES.Box(0, 9, (1,), np.int64), "1.5", None),
        (SPACES.MultiDiscrete([2, 3]), "1 2", "[1, 2]"),
        (SPACES.MultiDiscrete([2, 3]), "2 1", None),
        (SPACES.MultiBinary(3), "1 0 1", "[1, 0, 1]"),
        (SPACES.Text(5), " hello\n", "'hello'"),
        (SPACES.Text(5), "hello world", None),
    ],
)
def test_actions_of_every_space_are_read(space, answer, understood):
    texts, *_ = run(make("tests/Remote-v0", kwargs={"space": space}), [answer])
    if understood is None:
        assert texts[1].startswith("There is no action in your answer.")
    else:
        assert texts[1] == f"Reward: -0.5\n{understood}"


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"game": "FrozenLak-v1"}, errors.NameNotFound, "FrozenLake"),
        ({"game": "FrozenLake-v9"}, errors.VersionNotFound, "v9"),
        ({"game": "FrozenLake-v1", "kwargs": {"slippery": 1}}, errors.ConfigError, "slippery"),
        ({"game": "no_such_module:Game-v0"}, errors.ConfigError, "no_such_module"),
        ({"game": "tests/Picture-v0"}, errors.ConfigError, "21168 numbers"),
        ({"game": "tests/Remote-v0", "kwargs": {"space": SPACES.Dict()}}, errors.ConfigError, "Dict"),
    ],
)
def test_what_cannot_be_played_is_one_clear_line(settings, error, says):
    with pytest.raises(error, match=says) as caught:
        asyncio.run(make(**settings).ensure_setup())
    assert "\n" not in str(caught.value)


def test_a_map_size_is_for_frozen_lake():
    with pytest.raises(errors.ConfigError, match="map_size is for FrozenLake"):
        make("Taxi-v4", map_size=4)


def test_without_gymnasium_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(errors.MissingDependency, match=r"-m pip install 'gymnasium>=[\d.]+'$"):
        asyncio.run(make().ensure_setup())


@pytest.mark.parametrize(
    ("game", "kwargs"),
    [
        ("Blackjack-v1", {}),
        ("FrozenLake-v1", {}),
        ("Taxi-v4", {"is_rainy": True}),
        ("Taxi-v4", {"fickle_passenger": True}),
    ],
)
def test_no_demonstrations_where_the_transitions_are_not_known_or_chance_decides(game, kwargs):
    spec = make(game, kwargs=kwargs)
    task = asyncio.run(spec.tasks("train").get(0))
    with pytest.raises(errors.ConfigError, match="no demonstrations"):
        spec.demonstrations(task, 0)


def test_the_seed_decides_everything_and_the_global_generators_nothing():
    spec = make("Taxi-v4", kwargs={"is_rainy": True})
    answers = ["south", "west", "pickup", "east", "?", "north", "dropoff"] * 3
    first = [run(spec, answers, index=index) for index in range(4)]
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert [run(spec, answers, index=index) for index in range(4)] == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert len({texts[0] for texts, *_ in first}) == 4


def test_train_and_test_share_no_task():
    async def posed(spec, split):
        return [await spec.tasks(split).get(index) for index in range(300)]

    seeds = [{task.seed for task in asyncio.run(posed(make("Taxi-v4"), split))} for split in ("train", "test")]
    assert not seeds[0] & seeds[1]
    maps = [
        {str(task.fields["map"]) for task in asyncio.run(posed(make(map_size=3), split))} for split in ("train", "test")
    ]
    assert not maps[0] & maps[1]
    assert len(maps[0]) > len(maps[1]) > 5


def test_without_settings_it_is_a_lake_that_can_be_learned():
    spec = registry.spec(TARGET)
    first = [run(spec, ["down"], index=index)[0][0] for index in range(5)]
    assert len(set(first)) > 2
    assert not any("slippery" in text for text in first)
    assert registry.spec(TARGET, map_size=6).config.kwargs == {"is_slippery": False}
    assert registry.spec(TARGET, game="FrozenLake-v1").config.kwargs == {}
    assert registry.spec_from_json(spec.to_json()) == spec


def test_concurrent_episodes_do_not_meet_and_block_nobody():
    answers = ["down", "right", "up", "right", "down", "down", "left"] * 4

    async def together(spec):
        return await asyncio.gather(*(play(spec, answers, index=index) for index in range(16)))

    spec = make(map_size=6)
    assert asyncio.run(together(spec)) == [run(spec, answers, index=index) for index in range(16)]

    meeting = make("tests/Remote-v0", kwargs={"space": SPACES.Discrete(9), "meets": True})

    async def side_by_side():
        await asyncio.gather(*(play(meeting, ["1", "2"]) for _ in range(20)))

    asyncio.run(side_by_side())


def test_it_is_its_description():
    spec = make("Taxi-v4", kwargs={"is_rainy": True}, max_turns=20)
    again = registry.spec_from_json(spec.to_json())
    assert isinstance(again, GymnasiumText)
    assert again == spec


# -- pictures ---------------------------------------------------------------------------------------------


def pictures(observation):
    """Its pictures as arrays."""
    from PIL import Image

    images = [image for message in observation.messages for image in message.images]
    return [np.asarray(Image.open(io.BytesIO(image.read()))) for image in images]


@pytest.mark.parametrize("shown", ["image", "both"])
def test_frozen_lake_is_shown_as_its_picture(shown):
    """With the real pygame, which draws it without a screen."""

    async def run():
        async with make(map_size=4, kwargs=STILL, observation=shown) as spec:
            env = spec.make()
            first, _ = await env.reset(seed=1)
            second, *_ = await env.step("I go down.")
            await env.close()
            return first, second

    first, second = asyncio.run(run())
    [before], [after] = pictures(first), pictures(second)
    assert before.shape == after.shape == (256, 256, 3)
    assert (before != after).any()
    squares = [
        (before[64 * row : 64 * row + 64, :64] != after[64 * row : 64 * row + 64, :64]).any() for row in range(4)
    ]
    assert squares == [True, True, False, False]  # the player has left the first and is in the second
    assert ("The map: P is you" in first.messages[0].text) == (shown == "both")
    assert ("P" in second.messages[0].text) == (shown == "both")


def test_an_observation_that_is_a_picture_is_shown():
    async def run():
        async with make("tests/Dot-v0", observation="image") as spec:
            env = spec.make()
            await env.reset(seed=1)
            return (await env.step("3"))[0]

    observation = asyncio.run(run())
    [picture] = pictures(observation)
    assert picture.shape == (8, 12, 3)
    assert np.argwhere((picture == (200, 0, 0)).all(axis=2)).tolist() == [[2, 3]]
    assert observation.messages[0].text == "Reward: 0.5"


@pytest.mark.parametrize(
    ("game", "shown", "says"),
    [
        ("tests/Remote-v0", "image", "tests/Remote-v0 has no render mode rgb_array: set env.observation=text"),
        ("tests/Picture-v0", "both", "its observations are of 21168 numbers"),
    ],
)
def test_what_cannot_be_shown_is_refused(game, shown, says):
    kwargs = {"space": gymnasium.spaces.Discrete(2)} if "Remote" in game else {}
    with pytest.raises(errors.ConfigError, match=says):
        asyncio.run(make(game, observation=shown, kwargs=kwargs).ensure_setup())


def test_without_pygame_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(errors.ConfigError, match="pygame is not installed, run `pip install"):
        asyncio.run(make(observation="image").ensure_setup())
