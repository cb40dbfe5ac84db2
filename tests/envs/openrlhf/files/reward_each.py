"""A metric for each answer: a tensor as long as the group."""

import torch


def reward_func(queries, prompts, labels):
    paid = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
    return {"rewards": paid, "scores": paid, "extra_logs": {"custom_metric": paid}}
