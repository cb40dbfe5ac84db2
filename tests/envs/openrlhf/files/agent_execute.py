"""Six turns, of which the last is paid; the executor has five arguments, and an `execute` that calls its base's."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

TURNS = 6


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.turn += 1
        last = self.turn == TURNS
        paid = torch.tensor([float(last and states["label"] in states["action_text"])])
        return {
            "rewards": paid,
            "scores": paid,
            "environment_feedback": "\nOver.\n" if last else "\nNext.\nAssistant: ",
            "done": last,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"step": self.turn},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
