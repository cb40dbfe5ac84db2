"""A learner in a file of your own: `envgym train --env math_verify --learner examples/reinforce.py:Reinforce`."""

from envgym.learner import Learner, LearnRow


class Reinforce(Learner):
    """Plain REINFORCE with the batch's mean reward as the baseline (R. Williams, 1992)."""

    def prepare(self, groups):
        import numpy as np

        episodes = [episode for group in groups for episode in group.episodes]
        baseline = sum(episode.reward for episode in episodes) / len(episodes)
        rows = []
        for index, episode in enumerate(episodes):
            for row in episode.rows:
                row = LearnRow.of(row, episode=index, unit=index)
                row.arrays["advantages"] = np.full(len(row.token_ids), episode.reward - baseline, np.float32)
                rows.append(row)
        return rows

    def loss(self, role, outputs, batch, denominators):
        import torch

        # Only sampled tokens count; whatever stands elsewhere must not, not even as 0 times it.
        losses = -batch.weights * batch.arrays["advantages"] * outputs.logprobs
        total = torch.where(batch.weights > 0, losses, 0.0).sum()
        return total / denominators[batch.objective], {"loss": (float(total.detach()), float(batch.weights.sum()))}
