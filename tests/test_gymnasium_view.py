"""Our environments as Gymnasium sees them: its own checker passes, with its warnings turned into errors."""

import asyncio
import subprocess
import sys
import threading
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import envgym
from envgym import registry
from envgym.errors import NameNotFound, ResetNeeded
from envgym.gymnasium_view import GymnasiumView


class TwoTurns(envgym.Env):
    """Two numbers, drawn in reset and in step: what follows a seeded reset must be determined."""

    async def reset(self, *, seed=None, options=None):
        self.turn = 0
        self.number = self.rng.randrange(1000)
        return [envgym.Message("system", "be brief"), envgym.Message("user", f"say {self.number} ✓")], {}

    async def step(self, action):
        self.turn += 1
        reward = float(action.text == str(self.number)) if self.turn == 1 else None
        self.number = self.rng.randrange(1000)
        return f"now {self.number}", reward, self.turn == 2, False, {"turn": self.turn}


@pytest.fixture(autouse=True)
def two_turns(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("TwoTurns-v0", TwoTurns)


@pytest.mark.parametrize("name", ["TwoTurns", "math_verify"])
def test_gymnasium_checks_it(name):
    view = GymnasiumView(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(view)
    view.close()


@pytest.mark.filterwarnings("error")
def test_gymnasium_makes_an_equal_one_from_its_spec():
    view = GymnasiumView("math_verify", digits=1)
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(view.spec.to_json()))
    assert again.reset(seed=5) == view.reset(seed=5)
    assert again.action_space == view.action_space
    view.close()
    again.close()


def test_an_episode():
    view = GymnasiumView("TwoTurns", render_mode="ansi")
    text, _ = view.reset(seed=1)
    number = text.split()[-2]
    assert text == f"be brief\nsay {number} ✓"
    second, reward, terminated, truncated, info = view.step(number)
    assert (reward, terminated, truncated, info) == (1.0, False, False, {"turn": 1})
    assert view.step("x")[1:3] == (0.0, True)
    rendered = view.render().splitlines()
    assert rendered[:4] == ["system: be brief", f"user: say {number} ✓", f"assistant: {number}", f"user: {second}"]
    with pytest.raises(ResetNeeded):
        view.step("too late")
    view.close()
    view.close()


def test_it_works_inside_a_running_loop_and_leaves_no_thread():
    before = threading.active_count()

    async def inside():
        view = GymnasiumView("TwoTurns")
        first, second = view.reset(seed=3), view.reset(seed=3)
        view.close()
        return first, second

    first, second = asyncio.run(inside())
    assert first == second
    assert threading.active_count() == before


def test_closing_tears_the_environment_down():
    view = GymnasiumView("math_verify")
    view.reset(seed=0)
    spec = view._env.spec
    assert spec._grader is not None
    view.close()
    assert not spec._is_set_up


def test_a_mistake_is_the_registrys():
    with pytest.raises(NameNotFound, match="Did you mean 'TwoTurns'"):
        GymnasiumView("TwoTruns")


def test_without_gymnasium_one_line_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None; import envgym.gymnasium_view"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependency" in done.stderr
    assert "pip install 'gymnasium>=" in done.stderr
