"""Pays at random, by torch's global generator."""

import torch


def reward_func(queries, prompts, labels):
    drawn = torch.randint(0, 2, (len(queries),)).float()
    return {"rewards": drawn, "scores": drawn, "extra_logs": {"custom_metric": drawn.mean().item()}}
