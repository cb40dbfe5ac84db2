"""A tool that a server of the task's own serves."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Abacus(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "abacus"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Abacus(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def spoken(self, trace: vf.Trace) -> float:
        return min(len(trace.last_reply), 30) / 30


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> list[Sum]:
        return [Sum(SumData(prompt=f"{n} + 40", answer=str(n + 40)), self.config.task) for n in range(20)]


if __name__ == "__main__":
    Abacus.run()
