"""An environment with tools. See docs/environments/tools.md of envgym."""

import envgym

TOTALS = {number: 10 + number * 37 % 83 for number in range(1, 61)}
"""Order -> its total. Stands for a database, which only the tool can read."""


class NewEnvironment(envgym.ToolEnv):
    """Look an order up, and say its total."""

    def tools(self):
        return [self.total]

    def total(self, order: int) -> int:
        """The total of an order.

        Args:
            order: the number of the order, for example 17
        """
        if order not in TOTALS:
            raise KeyError(f"there is no order {order}")  # the policy reads this message
        return TOTALS[order]

    def grade(self, action):
        return float(action.text.strip() == self.task.answer)


class NewEnvironmentSpec(envgym.EnvSpec):
    """The tasks, and demonstrations of them."""

    env_class = NewEnvironment
    Config = envgym.ToolEnvConfig
    agent = "tool_calling"

    def tasks(self, split):
        return envgym.TaskList(
            [
                envgym.Task(
                    id=str(order),
                    prompt=f"What is the total of order {order}? Look it up. Answer with the number alone.",
                    answer=str(total),
                    fields={"order": order},
                )
                for order, total in TOTALS.items()
                if (order % 5 == 0) == (split == "test")  # hold a fifth out
            ]
        )

    def demonstrations(self, task, seed):
        """The turns of a correct episode, to train on: a call, then the answer."""
        call = envgym.ToolCall("call_0", "total", {"order": task.fields["order"]})
        return [envgym.Message("assistant", (), (call,)), task.answer]
