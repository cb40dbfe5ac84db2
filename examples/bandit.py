"""Two slot machines: `envgym train --env examples/bandit.py --learner dr_grpo learner.credit=turn`.

What the first one pays is luck, and much of it; what the second pays depends on the arm alone. Where an episode's whole
reward counts for both turns, the second is hardly heard through the noise of the first: see `docs/learners.md`.
"""

import envgym

ARMS = "abcdefgh"


class TwoMachines(envgym.Env):
    """What the first machine's arms pay or take, about 10, is drawn anew for every problem; the second pays 1 for c."""

    async def reset(self, *, seed=None, options=None):
        self.luck = {arm: self.rng.gauss(0, 10) for arm in ARMS}
        self.pulled = 0
        return [{"role": "user", "content": "Pull an arm: a, b, c, d, e, f, g or h."}], {}

    async def step(self, action):
        self.pulled += 1
        if self.pulled == 1:
            return [{"role": "user", "content": "Again."}], self.luck.get(action.text.strip(), 0.0), False, False, {}
        right = float(action.text.strip() == "c")
        return None, right, True, False, {"score": right}
