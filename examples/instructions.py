"""Instructions that a program can check: `envgym train --env examples/instructions.py:Instructions --model smollm2`."""

import itertools
import random

import envgym

PROMPT = (
    'Write a short line about {topic} that ends with the word "{last}". It has exactly {count} different words, all in '
    "lower case."
)
TOPICS = ("the sea", "a cat", "the moon", "a garden", "the train", "an old house", "the morning", "a storm")
LAST_WORDS = {
    "train": (
        *("night", "water", "home", "light", "green", "music", "snow", "wind", "road", "heart", "stone", "gold"),
        *("sleep", "fire", "rain", "deep", "window", "sand", "silence", "time", "shore", "winter", "bird", "song"),
    ),
    "test": ("sky", "day", "tree", "world", "blue", "river", "door", "summer"),
}
COUNTS = {"train": (4, 5, 7, 8), "test": (6,)}


class Instruction(envgym.Env):
    """The reward is the share of three demands that are met, times how close the number of words is.

    A sum alone would be a trap: the last word on its own meets two demands of three, and a policy settles on it.
    """

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        words = action.text.split()
        count, last = self.task.fields["count"], self.task.fields["last"]
        distance = abs(len(words) - count) + len(words) - len(set(words))  # repeated words do not count
        demands = {
            "count": float(distance == 0),
            "lower": float(action.text == action.text.lower()),
            "last": float(bool(words) and words[-1].strip(".!\"'") == last),
        }
        score = max(0.0, 1 - distance / count) * (1 + demands["lower"] + demands["last"]) / 3
        return None, score, True, False, {"score": score, "metrics": demands}


class Instructions(envgym.EnvSpec):
    """The held-out tasks have words and a number of words that training does not have."""

    env_class = Instruction

    def tasks(self, split):
        tasks = [
            envgym.Task(
                id=f"{topic}-{count}-{last}",
                prompt=PROMPT.format(topic=topic, count=count, last=last),
                fields={"count": count, "last": last},
            )
            for topic, count, last in itertools.product(TOPICS, COUNTS[split], LAST_WORDS[split])
        ]
        random.Random(0).shuffle(tasks)
        return envgym.TaskList(tasks)
