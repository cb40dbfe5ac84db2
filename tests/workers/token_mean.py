"""The learner of the worker tests: the mean over tokens of the negative log-probability, or of squared values."""

from envgym.learner import Learner


class TokenMean(Learner):
    def prepare(self, groups):
        return []

    def loss(self, role, outputs, batch, normalizers):
        per_token = outputs.values.square() if role == "critic" else -outputs.logprobs
        total = (per_token * batch.loss_weights).sum()
        return total / normalizers[batch.objective], {"loss": (float(total.detach()), float(batch.loss_weights.sum()))}
