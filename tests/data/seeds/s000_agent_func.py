# agent_func.py
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 3
        self.history = []

    async def reset(self, states, **kwargs):
        """初始化环境，返回初始观测。"""
        self.step_idx = 0
        self.history = []
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """执行一步交互。"""
        observation_text = states["observation_text"]
        action_text = states["action_text"]
        label = states["label"]

        self.history.append(action_text)
        self.step_idx += 1

        # 检查是否完成
        done = self.step_idx >= self.max_steps or self.check_success(action_text, label)

        # 计算奖励
        if done:
            reward = self.calculate_final_reward(self.history, label)
        else:
            reward = torch.tensor(0.0)

        # 生成环境反馈
        if done:
            feedback = "\n\nHuman: [DONE]\n</s>"
        else:
            feedback = f"\n\nHuman: Step {self.step_idx} received. Continue.\n</s>\n\nAssistant: "

        return {
            "rewards": reward,
            "scores": reward.clamp(0, 1),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"step": self.step_idx},
        }

    def check_success(self, action, label):
        # 实现成功检查逻辑
        return False

    def calculate_final_reward(self, history, label):
        # 实现最终奖励计算
        return torch.tensor(1.0)


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
