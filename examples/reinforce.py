"""A custom learner in one file: `envgym train --env math_verify --learner examples/reinforce.py:Reinforce`."""

from envgym import Learner


class Reinforce(Learner):
    """Plain REINFORCE with the batch's mean reward as the baseline (R. Williams, 1992)."""

    def prepare(self, groups):
        import numpy as np

        episodes = [episode for group in groups for episode in group.episodes]
        baseline = sum(episode.reward for episode in episodes) / len(episodes)
        for episode in episodes:
            for row in episode.rows:
                row.arrays["advantages"] = np.full(len(row), episode.reward - baseline, np.float32)
        return [row for episode in episodes for row in episode.rows]

    def loss(self, role, outputs, batch, normalizers):
        # Only sampled tokens count. At all others the numbers may be NaN.
        total = batch.weighted_sum(-batch.arrays["advantages"] * outputs.logprobs)
        metrics = {"loss": (float(total.detach()), float(batch.loss_weights.sum()))}
        return total / normalizers[batch.objective], metrics
