"""An environment that costs nothing: it repeats what the policy says, four times. envgym's side of `openenv.py`."""

from envgym.env import Env


class EchoGame(Env):
    """Say something four times; the reward is 1."""

    async def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "Say something.", {}

    async def step(self, action):
        self.turns += 1
        is_over = self.turns == 4
        return f"You said {action.text}", float(is_over), is_over, False, {}
