# envgym on a CPU machine. `make demo` and `make test` are complete on a fresh one: they install into .venv first.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-slow bench lint format clean

demo: .venv/installed  ## Train the starter policy on math_verify, about five minutes on two cores
	$(BIN)/envgym train --env math_verify

test: .venv/installed-dev  ## Every seam once, with real parts; two files at a time
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: .venv/installed-dev  ## Every acceptance item; writes tests/results/
	$(BIN)/python -m pytest -q -m slow

bench: .venv/installed-dev  ## The benchmarks against peers; writes benchmarks/results/
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/against_trl.py
	$(BIN)/python benchmarks/env_latency.py
	$(BIN)/python benchmarks/concurrency.py
	$(BIN)/python benchmarks/learner_memory.py
	$(BIN)/python benchmarks/learner_throughput.py
	$(BIN)/python benchmarks/learner_against_trl.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/rollout_throughput.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/eval_throughput.py

lint: .venv/installed-dev
	$(BIN)/ruff check envgym envs agents learners tests benchmarks examples
	$(BIN)/ruff format --check envgym envs agents learners tests benchmarks examples
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix envgym envs agents learners tests benchmarks examples
	$(BIN)/ruff format envgym envs agents learners tests benchmarks examples

.venv/installed: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0 setuptools==78.1.1
	$(PIP) --no-deps -r requirements/cpu.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/installed-dev: requirements/dev.txt .venv/installed
	$(PIP) --no-deps -r requirements/dev.txt
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
