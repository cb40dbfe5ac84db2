"""Drive a lift to a floor: up, down, and open when it is there; two to five turns."""

import envgym

HELD_OUT = (4, 8, 11, 14, 17)  # these floors are never the goal in training


class Lift(envgym.Env):
    """As many turns as a perfect driver needs; each right word has the same share of the reward.

    A wrong word does not move the lift, but its turn is lost.
    """

    async def reset(self, *, seed=None, options=None):
        self.floor, self.goal = self.task.fields["start"], self.task.fields["goal"]
        self.turns = self.turns_left = abs(self.goal - self.floor) + 1
        self.right = 0
        return self.message(), {}

    def message(self):
        text = f"The lift is at {self.floor}. Go to {self.goal}. Say up, down or open."
        return [{"role": "user", "content": text}]

    async def step(self, action):
        right = "up" if self.floor < self.goal else "down" if self.floor > self.goal else "open"
        hit = action.text.strip() == right
        if hit:
            self.right += 1
            self.floor += {"up": 1, "down": -1, "open": 0}[right]
        self.turns_left -= 1
        done = self.turns_left == 0
        info = (
            {"score": self.right / self.turns, "metrics": {"opened": float(self.right == self.turns)}} if done else {}
        )
        return None if done else self.message(), hit / self.turns, done, False, info


class LiftSpec(envgym.EnvSpec):
    """The held-out tasks go to other floors."""

    env_class = Lift

    def tasks(self, split):
        return envgym.TaskList(
            [
                envgym.Task(id=f"{start}-{goal}", prompt=f"{start} to {goal}", fields={"start": start, "goal": goal})
                for goal in range(1, 21)
                for start in range(max(1, goal - 4), min(20, goal + 4) + 1)
                if start != goal and (goal in HELD_OUT) == (split == "test")
            ]
        )
