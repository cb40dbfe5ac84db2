import torch  # filled in: the document shows the function alone

def reward_func(queries, prompts, labels):
    print(f"Query sample: {queries[0][:200]}") # First 200 chars
    print(f"Prompt sample: {prompts[0]}")
    print(f"Label sample: {labels[0]}")
    # ... reward logic
    return torch.tensor([float(label in query) for query, label in zip(queries, labels)])  # filled in
