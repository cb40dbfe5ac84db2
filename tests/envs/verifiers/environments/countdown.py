"""Several turns: the environment is the user, and `loud` says so in each row."""

import verifiers.v1 as vf

__all__ = ["Countdown", "Countdowns"]


class StartData(vf.TaskData):
    start: int


class Start(vf.Task[StartData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [message.content.strip() for message in trace.assistant_messages]
        return float(said == [str(n) for n in range(self.data.start - 1, self.data.start - 1 - len(said), -1)])


class Countdown(vf.SingleAgentEnv):
    async def run(self, task: Start, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn(f"Count down from {task.data.start}.")
            await interaction.turn("And then?")


class Countdowns(vf.Taskset[Start, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield Start(StartData(start=n + 5), self.config.task)
            n += 1
