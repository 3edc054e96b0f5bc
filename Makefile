# What a developer and CI type. `make VENV=/some/venv check` uses a venv that stands already and installs nothing.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m

bin := $(VENV)/bin
quick := not slow and not gpu and not clients
stamp := $(VENV)/.installed

# A venv named by the caller is the caller's: it is used as it is, with this tree on the import path.
ifeq ($(origin VENV),file)
installed := $(stamp)
else
installed :=
export PYTHONPATH := $(CURDIR)
endif

.DEFAULT_GOAL := help
.PHONY: help install model check format test test-again test-long test-gpu test-clients bench-engine bench-router demo clean

help:
	@echo "make install | model | check | format | test | test-long | test-gpu | test-clients | bench-engine | bench-router | demo | clean"

install: $(installed) model

# torch goes first, by itself: the rest then takes the build that is there instead of choosing one.
$(stamp): pyproject.toml
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet "$(TORCH)"
	$(bin)/python -m pip install --quiet -e '.[dev,nixl]'
	touch $@

model: $(installed)
	$(bin)/python -P -m server.model_store $(MODEL)

check: $(installed)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports --no-logo

format: $(installed)
	$(bin)/ruff check --fix
	$(bin)/ruff format

# Threads of torch that wait sleep: on a busy box one that spins is preempted in the middle of the next part.
test test-again test-long: export OMP_WAIT_POLICY ?= passive

test: $(installed)
	$(bin)/python -m pytest -m "$(quick)" --durations 25

test-again: $(installed)
	$(bin)/python -m pytest -m "$(quick)" --last-failed --last-failed-no-failures none

test-long: $(installed)
	$(bin)/python -m pytest -m "slow and not gpu" --timeout 1800

# On a machine with a CUDA device and the extra `cuda`.
test-gpu: $(installed)
	$(bin)/python -m pytest -m gpu --timeout 600

# A venv of the caller's is used as it is: clients that it lacks are skipped.
test-clients: $(installed)
	test -z "$(installed)" || $(bin)/python -m pip install --quiet -e '.[clients]'
	$(bin)/python -m pytest -m clients --timeout 300

bench-router: $(installed)
	$(bin)/python bench/router.py --check

bench-engine: $(installed)
	$(bin)/python bench/engine.py --profile

demo: install
	$(bin)/python -P -m pdctl.demo

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find server pdctl tests -name __pycache__ -type d -prune -exec rm -rf {} +
