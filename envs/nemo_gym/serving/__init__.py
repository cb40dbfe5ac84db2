"""Our environments as NeMo-Gym's servers: its agents and its rollout collector play them as they play their own.

The wire formats are those of NeMo-Gym 0.4; its package is not needed.
"""
