"""Stands in for ray where the tests run NeMo-Gym's servers: they ask for it when they start, and never use it."""

__version__ = "2.55.1"


def is_initialized():
    return True


def init(**settings):
    raise RuntimeError("the tests' NeMo-Gym runs without ray")


def shutdown():
    pass


def get_runtime_context():
    raise RuntimeError("the tests' NeMo-Gym runs without ray")
