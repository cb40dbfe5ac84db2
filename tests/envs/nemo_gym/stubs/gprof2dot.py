"""Stands in for a part of the profiling that NeMo-Gym's servers import, and do not use."""


def main(argv=None):
    raise RuntimeError("the tests' NeMo-Gym profiles nothing")
