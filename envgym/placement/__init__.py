"""Placement: the nodes and GPUs of a run's processes, and the memory that they need."""
