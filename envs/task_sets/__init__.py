"""Benchmarks by name: each YAML file here is a task set, as `envgym.tasks.named_sets` describes it."""
