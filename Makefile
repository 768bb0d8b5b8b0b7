# `make run` and `make test` are the two that must always work; the rest are habits.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ROOT ?= $(CURDIR)/.data/demo
DEMO_MODEL := smollm2-135m-instruct
TEST_MODEL := .data/test/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: run test lint type proto proto-check bench fault docs clean

# --- running ------------------------------------------------------------------------------------

run: $(VENV)/.run
	@MODELD_DATA_ROOT="$(DEMO_ROOT)" MODELD="$(BIN)/modeld" sh scripts/demo.sh

# --- environments -------------------------------------------------------------------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "modeld needs CPython 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The first install compiles llama.cpp (about 6 minutes on 2 cores); pip keeps the wheel it built.
$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[llama]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.run

$(TEST_MODEL): | $(VENV)/.dev
	$(BIN)/python -m modeld.cli.demo_model $(dir $@)

# --- habits -------------------------------------------------------------------------------------

test: $(VENV)/.dev $(TEST_MODEL)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fault: $(VENV)/.dev $(TEST_MODEL)
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(VENV)/.dev
	$(BIN)/mypy -p modeld
	MYPYPATH=src:. $(BIN)/mypy tests bench

proto: $(VENV)/.dev
	rm -f proto/modeld/v1/*_pb2.py proto/modeld/v1/*_pb2.pyi proto/modeld/v1/*_pb2_grpc.py proto/modeld/v1/*_pb2_grpc.pyi
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto \
	    --grpc_python_out=proto --mypy_grpc_out=quiet:proto proto/modeld/v1/*.proto

# The committed modules are what the committed protos generate.
proto-check: proto
	git diff --exit-code -- proto
	@test -z "$$(git status --porcelain -- proto)" || { git status --short -- proto; exit 1; }

bench: $(VENV)/.dev $(TEST_MODEL)
	$(BIN)/python -m bench $(BENCH_ARGS)
	$(BIN)/python -m bench.accuracy

# The reference of settings in docs/operating.md comes from the table that the daemon reads, and
# the comparison of the engines from what they report of the test model.
docs: $(VENV)/.dev $(TEST_MODEL)
	$(BIN)/python scripts/settings_doc.py docs/operating.md
	$(BIN)/python scripts/backends_doc.py $(TEST_MODEL) docs/backends.md

clean:
	rm -rf $(VENV) .data build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
