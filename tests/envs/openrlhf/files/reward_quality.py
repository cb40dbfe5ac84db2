"""Asks a classifier, which is loaded where the file is imported; a short answer is worth half."""

import torch
from transformers import pipeline

MODEL = "OpenAssistant/reward-model-deberta-v3-large"
judge = pipeline("text-classification", model=MODEL)


def reward_func(queries, prompts, labels):
    paid = []
    for query, prompt in zip(queries, prompts, strict=True):
        [found] = judge(query)
        good = found["score"] if found["label"] == "LABEL_1" else 1 - found["score"]
        paid.append(good / 2 if len(query.removeprefix(prompt).split()) < 10 else good)
    rewards = torch.tensor(paid)
    logs = {"avg_quality": rewards.mean(), "min_quality": rewards.min(), "max_quality": rewards.max()}
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}
