"""An agent that draws how many turns it takes and what it pays; a tensor of one number, and an integer one before."""

import random
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.left = random.randint(2, 4)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.left -= 1
        print(f"{self.left} turns are left")
        paid = torch.tensor(0) if self.left else torch.randint(0, 2, (1,)).float()
        return {
            "rewards": paid,
            "scores": paid,
            "environment_feedback": "\nAgain.\nAssistant: " if self.left else "\nOver.\n",
            "done": self.left == 0,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"dummy_scores": paid},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
