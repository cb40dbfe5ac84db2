"""Stands in for the profiler that NeMo-Gym's servers import, and use only where profiling is switched on."""
