# reward_func.py
import torch

def your_reward_logic(query, label):  # filled in: the document leaves it to its reader
    return float(str(label) in query)


def reward_func(queries, prompts, labels, **kwargs):
    """
    计算自定义奖励。

    Args:
        queries: List[str] - 完整文本 (prompt + response)
        prompts: List[str] - 原始 prompt
        labels: List[str] - 标签 (来自 --label_key)

    Returns:
        dict:
            - rewards: 用于 advantage 计算
            - scores: 0-1 范围，用于动态过滤
            - extra_logs: 额外日志 (Wandb)
    """
    rewards = []
    for query, label in zip(queries, labels):
        # 实现你的奖励逻辑
        # 例如：代码执行、数学验证、格式检查
        reward = your_reward_logic(query, label)
        rewards.append(reward)

    rewards = torch.tensor(rewards).float()
    return {
        "rewards": rewards,
        "scores": rewards.clamp(0, 1),  # 归一化到 0-1
        "extra_logs": {"custom_metric": rewards.mean().item()},
    }
