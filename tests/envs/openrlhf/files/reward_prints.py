"""Prints what it is given, and returns a tensor alone."""

import torch


def reward_func(queries, prompts, labels):
    for name, (first, *_) in {"Query": queries, "Prompt": prompts, "Label": labels}.items():
        print(f"{name} sample: {first}")
    return torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
