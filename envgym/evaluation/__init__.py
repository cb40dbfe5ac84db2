"""Evaluation: a policy on suites of environments, with intervals, and failures counted apart."""
