# Two commands do everything on a machine with python3 (3.11+), pip/venv and make:
#   make train    the main job
#   make test     all that CI checks
# Both set up .venv by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help dist train test check lint format schemas types trust mutants docs figures claims bench bench-peers \
        bench-tune bench-growth bench-gpu clean

help:
	@awk -F '## ' '/^##@ / {print "\n" substr($$0, 5)} \
	  /^[a-z-]+:.*## / {split($$1, name, ":"); printf "  make %-9s %s\n", name[1], $$2}' Makefile
	@printf '\nThe Makefile has more: lint, types, claims, bench-peers, bench-tune, bench-growth, bench-gpu.\n'

$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing sottovoce into $(VENV) (once)"
	@# Compiling every module of every dependency took half of this; Python compiles what it imports.
	@$(PIP) --no-compile --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing sottovoce and its test tools into $(VENV) (once)"
	@$(PIP) --no-compile --editable '.[test,docs,flower,torch]'
	@# Services of the deployment's tests run under users that cannot keep what Python compiles.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python*/site-packages/flwr \
	  $(VENV)/lib/python*/site-packages/sqlalchemy
	@touch $@ $(VENV)/.run

# JAX for an NVIDIA GPU, into the same environment
$(VENV)/.cuda: $(VENV)/.run
	@$(PIP) --editable '.[cuda]'
	@touch $@

##@ Use
train: $(VENV)/.run  ## a private federation on the embedded digits
	@$(BIN)/sottovoce train

##@ Work on it
check: $(VENV)/.dev  ## the editing loop, under 2 minutes
	@$(PYTHON) tests/parts.py check

test:           ## all that CI checks
	@$(PYTHON) tests/parts.py test

format: $(VENV)/.dev  ## format the code
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

lint: $(VENV)/.dev  # style and import directions
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

types: $(VENV)/.dev  # mypy, strict; of the long checks and measurements only names and parameters
	@$(BIN)/mypy && $(BIN)/mypy --config-file trust/mypy.ini

schemas: $(VENV)/.run  ## the JSON Schemas, generated from the code
	@cd tests && ../$(BIN)/python -m support.schemas

docs: $(VENV)/.dev  ## the documentation site into build/docs (executes the tutorials)
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

##@ Trust it
trust: $(VENV)/.dev  ## the long checks at full size (MNIST needs SOTTOVOCE_DATA)
	@$(PIP) --editable '.[ray]'
	@$(BIN)/python trust/table.py trust tests/simulation/test_simulate_executors.py

mutants: $(VENV)/.dev  ## deliberate privacy bugs, and which test notices each
	@cd tests && ../$(BIN)/python -m mutants.mutant_score $(ARGS)

##@ Measure it
bench: $(VENV)/.dev  ## a round, secure noise, transport and vault, each beside its floor
	@$(BIN)/python benchmarks/own_round.py
	@$(BIN)/python benchmarks/books.py
	@$(BIN)/python benchmarks/secure_noise.py
	@$(BIN)/python benchmarks/sum_view.py
	@$(BIN)/python benchmarks/flower_floor.py --rounds 4 --parameters 200000
	@$(BIN)/python benchmarks/growth.py --short
	@$(BIN)/python benchmarks/vault.py --out results/bench/vault.json
	@$(BIN)/python benchmarks/pages.py

bench-growth: $(VENV)/.run  # 50 to 1,000,000 clients: time a sample, memory, time outside gradients
	@$(BIN)/python benchmarks/growth.py --out results/bench/growth.json
	@$(BIN)/python benchmarks/pages.py

bench-gpu: $(VENV)/.cuda  # a round on an accelerator: one run, a batch of 32, a sweep, the cnn (wants SOTTOVOCE_DATA)
	@$(BIN)/python benchmarks/gpu.py --out results/bench/gpu.json
	@$(BIN)/python benchmarks/pages.py

bench-peers: $(VENV)/.dev  # every peer on the same round (PEERS="opacus-ghost …" WORKS=mlp THREADS=1)
	@$(BIN)/python benchmarks/side_by_side.py $(if $(WORKS),--works $(WORKS)) \
	  $(if $(THREADS),--threads $(THREADS)) $(if $(PEERS),--peers $(PEERS))
	@$(if $(PEERS),,$(BIN)/python benchmarks/pages.py)

bench-tune: $(VENV)/.dev  # how many rows each peer best takes at once (WORKS=mlp THREADS=1)
	@$(BIN)/python benchmarks/side_by_side.py --tune $(if $(WORKS),--works $(WORKS)) \
	  $(if $(THREADS),--threads $(THREADS)) $(if $(PEERS),--peers $(PEERS))
	@$(BIN)/python benchmarks/pages.py

figures: $(VENV)/.run  ## every figure of the paper into results/ (needs SOTTOVOCE_DATA, better a GPU)
	@$(BIN)/sottovoce reproduce all

claims: $(VENV)/.run  # the table of claims in docs/paper.md, from results/
	@cd tests && ../$(BIN)/python -m support.claims ../docs/paper.md ../results

##@ Publish it
dist: $(VENV)/.run  ## wheel, sdist and SBOM into dist/, built twice and checked
	@$(BIN)/python tests/wheel.py --out dist

clean:          ## remove the environment and caches
	rm -rf $(VENV) build/compiled build/docs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
