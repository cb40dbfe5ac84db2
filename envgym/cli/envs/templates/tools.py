"""An environment with tools. See docs/environments/tools.md of envgym."""

import envgym

PRICES = {"apple": 3, "bread": 5, "cheese": 8, "dates": 4, "eggs": 6, "figs": 7}


class NewEnvironment(envgym.ToolEnv):
    """Look a price up, and multiply."""

    def tools(self):
        return [self.price]

    def price(self, good: str) -> int:
        """The price of one piece.

        Args:
            good: the good to buy, for example apple
        """
        if good not in PRICES:
            raise KeyError(f"{good} is not for sale")  # the policy reads this message
        return PRICES[good]

    def grade(self, action):
        return float(action.text.strip() == self.task.answer)


class NewEnvironmentSpec(envgym.EnvSpec):
    """The tasks, and demonstrations of them."""

    env_class = NewEnvironment
    Config = envgym.ToolEnvConfig
    agent = "tool_calling"

    def tasks(self, split):
        goods = sorted(PRICES)
        orders = [(count, good) for good in goods for count in range(2, 20)]
        split_orders = [order for number, order in enumerate(orders) if (number % 10 == 0) == (split == "test")]
        return envgym.TaskList(
            [
                envgym.Task(
                    id=f"{count}-{good}",
                    prompt=f"What do {count} times {good} cost? Look the price up. Answer with the number alone.",
                    answer=str(count * PRICES[good]),
                    fields={"good": good},
                )
                for count, good in split_orders
            ]
        )

    def demonstrations(self, task, seed):
        """The turns of a correct episode, to train on: a call, then the answer."""
        call = envgym.ToolCall("call_0", "price", {"good": task.fields["good"]})
        return [envgym.Message("assistant", (), (call,)), task.answer]
