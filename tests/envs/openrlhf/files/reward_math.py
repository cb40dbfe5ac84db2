"""Pays by the last number of an answer that says which it is; none is worth less than a wrong one."""

import re

import torch

NUMBER = re.compile(r"(?:is:?|=|####) (-?\d+(?:\.\d+)?)")


def reward_func(queries, prompts, labels):
    paid = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        found = NUMBER.findall(query.removeprefix(prompt))
        paid.append(float(float(found[-1]) == float(label)) if found else -0.5)
    rewards = torch.tensor(paid)
    right, formatted = (rewards == 1).float().mean(), (rewards >= 0).float().mean()
    logs = {"math_accuracy": right, "answer_formatted": formatted}
    return {"rewards": rewards, "scores": (rewards + 0.5) / 1.5, "extra_logs": logs}
