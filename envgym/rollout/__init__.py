"""Rollouts: the runner, the samplers of its episodes, and the buffer of its groups."""
