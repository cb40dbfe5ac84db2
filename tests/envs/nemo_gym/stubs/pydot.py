"""Stands in for a part of the profiling that NeMo-Gym's servers import, and do not use."""


def graph_from_dot_file(path):
    raise RuntimeError("the tests' NeMo-Gym profiles nothing")
