# Two commands: `make demo` shows it working, `make test` proves it. Both create .venv themselves.

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
SOURCES := $(wildcard vllm_spd kernels examples benchmarks scripts tests setup.py)

.PHONY: help install demo test lint format slow clean

help:
	@echo "make demo     serve a small model with SPD, ask it a question, compare with plain vLLM"
	@echo "make test     lint and every test"
	@echo "make slow     the long forms of the tests"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff rewrite the sources"
	@echo "make install  only create $(VENV) (make demo and make test do it too)"
	@echo "make clean    remove $(VENV) and caches"

install:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 found: install one, or name it with make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) $(if $(FLAVOUR),--flavour $(FLAVOUR))

demo: install
	@$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest

slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
