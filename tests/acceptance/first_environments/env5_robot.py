"""A robot with a battery, up to six turns."""

import envgym

NAMES = ["Amy", "Ben", "Sam", "Tom", "Ann", "Max", "Eva", "Dan", "Kim", "Leo"]
COLOURS = ["red", "blue", "old", "big", "new"]
TURNS = 6
ASK = "Say walk or rest."


class Robot(envgym.Env):
    """Walk if there is power, rest if there is none: a sixth for each right turn. A walk without power ends it."""

    async def reset(self, *, seed=None, options=None):
        self.power, self.turn, self.total = self.task.fields["power"], 0, 0.0
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        answer = action.text.strip().lower().rstrip(".")
        right = answer == ("walk" if self.power > 0 else "rest")
        falls = answer == "walk" and self.power == 0
        if answer == "rest":
            self.power = min(9, self.power + self.rng.randint(1, 3))
        elif answer == "walk":
            self.power = max(0, self.power - 1)
        reward = right / TURNS
        self.turn, self.total = self.turn + 1, self.total + reward
        if falls or self.turn == TURNS:
            return None, reward, True, False, {"score": min(1.0, self.total)}
        return [{"role": "user", "content": f"It has {self.power} power. {ASK}"}], reward, False, False, {}


class RobotSpec(envgym.EnvSpec):
    """One in six pairs of a name and a colour is held out, with all five levels of power."""

    env_class = Robot

    def tasks(self, split):
        pairs = [(name, colour) for name in NAMES for colour in COLOURS]
        chosen = [pair for number, pair in enumerate(pairs) if (number % 6 == 5) == (split == "test")]
        return envgym.TaskList(
            [
                envgym.Task(
                    id=f"{name}-{colour}-{power}",
                    prompt=f"{name} has a {colour} robot. It walks if it has power. It has {power} power. {ASK}",
                    fields={"power": power},
                )
                for name, colour in chosen
                for power in range(5)
            ]
        )
