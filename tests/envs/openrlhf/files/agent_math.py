"""Three tries at a number, with the constructor of five arguments; scores leave [0, 1], and a metric is a boolean."""

import re

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

TRIES = 3


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.tries += 1
        found = re.findall(r"(?:is:?|=) (-?\d+)", states["action_text"])
        right = bool(found) and found[-1] == states["label"]
        done = right or self.tries == TRIES
        reward = 1.0 if right else 0.0 if not done else -0.3 if found else -0.5
        return {
            "rewards": torch.tensor([reward]),
            "scores": torch.tensor([reward + 0.5]),
            "environment_feedback": "\nOver.\n" if done else "\nNot yet; try again.\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"step": self.tries, "correct": right, "attempts": self.tries},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
