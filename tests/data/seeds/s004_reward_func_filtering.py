import torch  # filled in: the document shows the function alone

def calculate_rewards(queries, labels):  # filled in: your reward logic
    return torch.tensor([1.5 if label in query else -0.5 for query, label in zip(queries, labels)])

def reward_func(queries, prompts, labels):
    rewards = calculate_rewards(queries, labels) # Your reward logic
    # Filter: Keep only samples with score > 0.5
    scores = (rewards > 0.0).float()
    return {
        "rewards": rewards, # For advantage calculation
        "scores": scores, # For dynamic filtering (0 or 1)
        "extra_logs": {"filtered_ratio": scores.mean()}
    }
