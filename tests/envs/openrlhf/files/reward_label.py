"""Pays for the label within the text; takes keyword arguments, and has a metric of the whole group."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    paid = torch.tensor([float(label in query) for query, label in zip(queries, labels, strict=True)])
    return {"rewards": paid, "scores": paid.clamp(0, 1), "extra_logs": {"custom_metric": paid.mean().item()}}
