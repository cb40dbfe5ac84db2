"""A learner in a file of your own: `envgym train --env math_verify --learner examples/reinforce.py:Reinforce`."""

from envgym.learner import Learner


class Reinforce(Learner):
    """Plain REINFORCE with the batch's mean reward as the baseline (R. Williams, 1992)."""

    def prepare(self, groups):
        import numpy as np

        trajectories = [trajectory for group in groups for trajectory in group]
        baseline = sum(each.episode.reward for each in trajectories) / len(trajectories)
        for each in trajectories:
            for sample in each.samples:
                advantage = each.episode.reward - baseline
                sample.arrays["advantages"] = np.full(len(sample.token_ids), advantage, np.float32)
        return [sample for each in trajectories for sample in each.samples]

    def loss(self, role, outputs, batch, denominators):
        import torch

        # Only sampled tokens count; whatever stands elsewhere must not, not even as 0 times it.
        losses = -batch.loss_weights * batch.arrays["advantages"] * outputs.logprobs
        total = torch.where(batch.loss_weights > 0, losses, 0.0).sum()
        metrics = {"loss": (float(total.detach()), float(batch.loss_weights.sum()))}
        return total / denominators[batch.objective], metrics
