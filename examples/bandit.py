"""Two slot machines: `envgym train --env examples/bandit.py --learner dr_grpo learner.credit=turn`.

The first machine's reward is random and large; the second's depends only on the arm. If both turns are trained on the
whole episode's reward, the noise of the first drowns the signal of the second: see `docs/training/learners.md`.
"""

import envgym

ARMS = "abcdefgh"


class TwoMachines(envgym.Env):
    """The first machine's rewards are drawn per episode (standard deviation 10); the second gives 1 for c."""

    async def reset(self, *, seed=None, options=None):
        self.luck = {arm: self.rng.gauss(0, 10) for arm in ARMS}
        self.pulls = 0
        return [{"role": "user", "content": "Pull an arm: a, b, c, d, e, f, g or h."}], {}

    async def step(self, action):
        self.pulls += 1
        if self.pulls == 1:
            return [{"role": "user", "content": "Again."}], self.luck.get(action.text.strip(), 0.0), False, False, {}
        score = float(action.text.strip() == "c")
        return None, score, True, False, {"score": score}
