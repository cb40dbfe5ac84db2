"""Ask a tool where a thing is."""

import random

import envgym

PLACES = ["park", "shop", "barn", "lake", "hall", "road", "farm", "tent"]
# 109 things; the last 32 are held out
THINGS = (
    "hat box cup key pen bag map bed cat dog pig hen cow bee ant fox bat owl egg pie jam ham bun nut oil tea "
    "car bus van jet toy top ball doll drum kite bell book desk lamp sofa rug mat fan pan pot jug can tin "
    "coat sock shoe boot belt ring wig cap bow tie fish frog duck goat lion bear deer crab worm bird leaf rose "
    "tree seed wood rock coin gold "
    "saw axe net rope nail hook gate door wall bike boat ship sled cart milk cake rice corn soup plum pear lime "
    "fork dish soap comb mop bin card note file tape"
).split()
THINGS = list(dict.fromkeys(THINGS))  # each thing once


class LostThings(envgym.ToolEnv):
    """Only the tool knows the place; a right call with a wrong answer gets a tenth of the reward."""

    def begin(self):
        self.found = False
        return f"Where is the {self.task.prompt}? Find it and say the place."

    def tools(self):
        return [self.find]

    def find(self, thing: str) -> str:
        """Find the place of a thing."""
        if thing.strip().lower() != self.task.prompt:
            return "nowhere"
        self.found = True
        return self.task.answer

    def grade(self, action):
        right = action.text.strip().lower().rstrip(".") == self.task.answer
        return envgym.Reward(1.0 if right else 0.1 if self.found else 0.0, score=float(right))


class LostThingsSpec(envgym.EnvSpec):
    """Each training thing is in each of the places once; the held-out things are other words."""

    env_class = LostThings
    Config = envgym.ToolEnvConfig
    agent = "tool_calling"

    def tasks(self, split):
        if split == "test":
            pairs = [(thing, PLACES[number % len(PLACES)]) for number, thing in enumerate(THINGS[-32:])]
        else:
            pairs = [(thing, place) for thing in THINGS[:-32] for place in PLACES]
        return envgym.TaskList(
            [envgym.Task(id=f"{thing}-{place}", prompt=thing, answer=place) for thing, place in pairs]
        )

    def demonstrations(self, task, seed):
        """70% call the tool and repeat its result; the others guess a place."""
        rng = random.Random(f"{task.id} {seed}")
        if rng.random() < 0.7:
            call = envgym.ToolCall("call_0", "find", {"thing": task.prompt})
            return [envgym.Message("assistant", (), (call,)), task.answer]
        return [rng.choice(PLACES)]
