"""One turn, two weighted rewards and a metric."""

import verifiers.v1 as vf

__all__ = ["Riddles"]


class RiddlesConfig(vf.TasksetConfig):
    count: int = 20


class RiddleData(vf.TaskData):
    answer: str


class Riddle(vf.Task[RiddleData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=-0.5)
    async def long(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) > 20)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Riddles(vf.Taskset[Riddle, RiddlesConfig]):
    """Questions about the next number."""

    def load(self) -> list[Riddle]:
        return [
            Riddle(RiddleData(prompt=f"{n} + 1", system_prompt="Be brief.", answer=str(n + 1)), self.config.task)
            for n in range(self.config.count)
        ]
