# Every target sets up .venv once (again when pyproject.toml or constraints.txt change) and then does what its name says.
#
#   make main-tier      five kernels built, checked and timed: the speedup table     (PLATFORM=auto, METHODS="naive expert")
#   make build-kernels  the tiers' GPU kernels built, without a device              (PLATFORMS="sm90 sm120", SUITES=...)
#   make test           all tests                                                     (ARGS="-k gemm -x")
#   make test-ray       the tests that start a Ray cluster on this machine; seven minutes on two cores
#   make lint           ruff and mypy
#   make sizes          lines of the package by part, words of the pages
#   make tables         figures on the pages made again from the published records
#   make docs           the site, strictly, into build/site
#   make release-check  wheel and sdist built, their contents checked, the quickstart run from the wheel alone
#   make gate-quality   the measurements behind the gate's claims; takes long
#   make mutants        the tests of the core mutated against: which changes no test notices   (MODULES="statistics walk")
#   make clean          remove .venv, caches and built kernels

PYTHON ?= python3
PLATFORM ?= auto
METHODS ?= expert
PLATFORMS ?= sm90 sm120
SUITES ?= suites/main_tier suites/gdn_case_study suites/skill_effect
ARGS ?=
WORKERS ?= 2
MODULES ?=
RAY_LIMIT ?= 900
# Tests that judge real kernels are asked again where a busy machine has left a verdict open, and for nothing else.
AGAIN ?= --reruns 2 --only-rerun '(?i)inconclusive'
# Where there is a GPU, what judging on it needs as well.
EXTRAS ?= cpu,cuda-build,triton,tilelang,llm,xdist,benchmark$(if $(shell command -v nvidia-smi),$(comma)cuda)
comma := ,

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(shell (cat pyproject.toml constraints.txt; echo $(EXTRAS)) | cksum | cut -d' ' -f1)

.PHONY: help venv test test-ray lint sizes tables docs release-check main-tier build-kernels gate-quality mutants clean check-python check-compiler
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; install Python 3.11 or newer, or call make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

check-compiler:
	@command -v $${CXX:-g++} >/dev/null || command -v clang++ >/dev/null || { echo "make: no C++ compiler found; on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | check-python check-compiler
	@echo "make: setting up $(VENV) (once; downloads PyTorch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]" --group dev
	@rm -f $(VENV)/.stamp-*
	@touch $@

test: $(STAMP) | check-compiler
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(AGAIN) $(ARGS)

# Apart from the others: Ray is a large dependency, and a cluster needs the machine to itself.
test-ray: | check-compiler
	@$(MAKE) --no-print-directory venv EXTRAS="$(EXTRAS),ray"
	timeout $(RAY_LIMIT) $(BIN)/python -m pytest tests/unit/executors/cluster $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

main-tier: $(STAMP) | check-compiler
	$(BIN)/python -m pytest suites/main_tier --platform $(PLATFORM) $(addprefix --klineage-method=,$(METHODS)) $(ARGS)

build-kernels: $(STAMP) | check-compiler
	@set -e; for platform in $(PLATFORMS); do \
	  $(BIN)/python -m pytest $(SUITES) --platform $$platform --klineage-stage compile -n $(WORKERS) --dist worksteal $(ARGS); done

sizes: $(STAMP)
	$(BIN)/python docs/sizes.py

tables: $(STAMP)
	$(BIN)/python docs/tables.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "make: build/site/index.html"

release-check: $(STAMP) | check-compiler
	$(BIN)/python tests/release/check_release.py

gate-quality: $(STAMP) | check-compiler
	$(BIN)/python -m pytest suites/gate_quality --platform $(PLATFORM) $(ARGS)

mutants: $(STAMP) | check-compiler
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group mutation
	$(BIN)/python tests/mutation/mutants.py $(MODULES)

clean:
	rm -rf $(VENV) .klineage .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
