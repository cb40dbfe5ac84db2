"""An agent of three turns, whose constructor is asynchronous and whose feedback is raw text."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 3


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        last = self.turn == TURNS
        paid = torch.tensor(1.0 if last else 0.0)
        return {
            "rewards": paid,
            "scores": paid.clamp(0, 1),
            "environment_feedback": "\nOver.\n" if last else f"\nTurn {self.turn} is over.\nAssistant: ",
            "done": last,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"step": self.turn},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
