"""Somebody sees a traffic light of some colour: go, wait or stop? The prompt does not say which colour means what."""

import envgym

RULE = {"red": "stop", "yellow": "wait", "green": "go"}
THINGS = ("car", "bus", "van")
NAMES = {
    "train": ("Amy", "Ben", "Sam", "Tom", "Ann", "Max", "Eva", "Dan", "Kim"),
    "test": ("Bob", "Sue", "Tim", "Joe"),
}


class TrafficLight(envgym.Env):
    """1 for the right word, a tenth for another of the three words."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        answer = action.text.strip()
        score = float(answer == self.task.answer)
        reward = score or (0.1 if answer in RULE.values() else 0.0)
        return None, reward, True, False, {"score": score, "answer": answer}


class TrafficLightSpec(envgym.EnvSpec):
    """The names of the held-out tasks are others."""

    env_class = TrafficLight

    def tasks(self, split):
        return envgym.TaskList(
            [
                envgym.Task(
                    id=f"{name}-{thing}-{colour}",
                    prompt=f"{name} is in the {thing}. The light is {colour}. Say go, wait or stop.",
                    answer=answer,
                )
                for name in NAMES[split]
                for thing in THINGS
                for colour, answer in RULE.items()
            ]
        )
