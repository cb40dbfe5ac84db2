"""What does the animal eat? The prompt does not say it."""

import envgym

FOOD = {"cat": "fish", "dog": "bone", "cow": "hay"}  # the hidden rule
NAMES = ["Amy", "Ben", "Sam", "Tom", "Ann", "Max", "Eva", "Dan", "Kim", "Leo"]
KINDS = ["big", "old", "red", "sad", "new", "fat", "wet", "bad"]


class PetFood(envgym.Env):
    """Say what the animal eats; the food of another animal gets a tenth of the reward."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        answer = action.text.strip().lower().rstrip(".")
        right = answer == self.task.answer
        reward = 1.0 if right else 0.1 if answer in FOOD.values() else 0.0
        return None, reward, True, False, {"score": float(right), "answer": answer}


class PetFoodSpec(envgym.EnvSpec):
    """One in six pairs of a name and an adjective is held out, with all three animals."""

    env_class = PetFood

    def tasks(self, split):
        pairs = [(name, kind) for name in NAMES for kind in KINDS]
        chosen = [pair for number, pair in enumerate(pairs) if (number % 6 == 5) == (split == "test")]
        return envgym.TaskList(
            [
                envgym.Task(
                    id=f"{name}-{kind}-{animal}",
                    prompt=f"{name} has a {kind} {animal}. What does it eat? Say fish, bone or hay.",
                    answer=food,
                )
                for name, kind in chosen
                for animal, food in FOOD.items()
            ]
        )
