"""Scores apart from rewards, which groups are filtered by."""

import torch


def reward_func(queries, prompts, labels):
    right = torch.tensor([query.endswith(label) for query, label in zip(queries, labels, strict=True)])
    scores = right.float()
    return {"rewards": 2 * scores - 0.5, "scores": scores, "extra_logs": {"filtered_ratio": scores.mean()}}
