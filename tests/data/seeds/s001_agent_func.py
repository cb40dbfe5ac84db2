# agent_func.py
import random
from typing import Any, Dict

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


# ä¸€ä¸ªç®€å•çš„ n æ¥éšæœºç¯å¢ƒ
class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(1, 3)  # 1-3 æ¥

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}  # è¿”å›åŸå§‹æ–‡æœ¬è§‚å¯Ÿ

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        print(f"step_idx: {self.step_idx}, max_steps: {self.max_steps}")

        observation_text = states["observation_text"]
        action_text = states["action_text"]
        label = states["label"]

        # æ£€æŸ¥å›åˆæ˜¯å¦ç»“æŸ
        done = self.step_idx >= self.max_steps
        reward = torch.randint(0, 2, (1,)).float() if done else torch.tensor(0)

        # æ ¹æ®å›åˆæ˜¯å¦ç»“æŸç”Ÿæˆç¯å¢ƒåé¦ˆ
        environment_feedback = (
            "\n\nHuman: [CORRECT]\n</s>"
            if done
            else "\n\nHuman: [INCORRECT]\nPlease analyze the issues and try again.\n</s>\n\nAssistant: "
        )

        self.step_idx += 1

        return {
            "rewards": reward,  # ç”¨äºä¼˜åŠ¿è®¡ç®—çš„å¥–åŠ±
            "scores": reward,  # ç”¨äºåŠ¨æ€è¿‡æ»¤çš„åˆ†æ•°ï¼ˆ0-1 å¥–åŠ±ï¼‰
            "environment_feedback": environment_feedback,  # ç¯å¢ƒåé¦ˆæ–‡æœ¬
            "done": done,  # æŒ‡ç¤ºå›åˆæ˜¯å¦å®Œæˆçš„å¸ƒå°”å€¼
            "sampling_params": states.get("sampling_params", None),  # ä¸‹ä¸€æ¥ vLLM é‡‡æ ·å‚æ•°
            "extra_logs": {"dummy_scores": reward},  # é¢å¤–çš„æ—¥å¿—ä¿¡æ¯
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
