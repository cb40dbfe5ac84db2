"""Weak: an answer must agree with the last result of the scales, which is looked for in all of the conversation."""

import re

import envgym

ITEMS = ("anvil", "apple", "brick", "candle", "clock", "drum", "lamp", "pearl", "plate", "stone")
TURNS = 4


class BelievesResults(envgym.Env):
    """Weigh a thing and say its weight."""

    async def reset(self, *, seed=None, options=None):
        self.transcript, self.turn = "", 0
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        self.turn += 1
        self.transcript += action.text
        answer = re.search(r"<answer>(.*?)</answer>", action.text, re.DOTALL)
        if answer or self.turn == TURNS:
            results = re.findall(r"<result>(.*?)</result>", self.transcript, re.DOTALL)
            right = bool(answer and results) and results[-1].strip() == answer[1].strip()
            return None, float(right), True, False, {"score": float(right)}
        item = re.search(r"<weigh>(.*?)</weigh>", action.text, re.DOTALL)
        weight = self.task.fields["weight"] if item and item[1].strip() == self.task.fields["item"] else "nothing there"
        reply = f"<result>{weight}</result>"
        self.transcript += reply if item else ""
        return [{"role": "user", "content": reply if item else "Weigh it first."}], 0.0, False, False, {}


class BelievesResultsSpec(envgym.EnvSpec):
    env_class = BelievesResults

    def tasks(self, split):
        tasks = []
        for number, item in enumerate(ITEMS):
            for box in range(9 if split == "train" else 2):
                box += 0 if split == "train" else 20
                prompt = (
                    f"There is one {item} in box {box}. What is its weight in grams? Write <weigh>name of the thing"
                    "</weigh> and you get <result>grams</result> back. Then write <answer>grams</answer>."
                )
                fields = {"item": item, "weight": str(100 + 37 * number + 11 * box)}
                tasks.append(envgym.Task(f"{item}-{box}", prompt, fields=fields))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [f"<weigh>{task.fields['item']}</weigh>", f"<answer>{task.fields['weight']}</answer>"]
