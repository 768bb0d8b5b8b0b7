# Every habit has a target; `make run` and `make test` are the two that must always work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test lint type proto proto-check bench fault docs clean venv-run venv-dev

proto:
	rm -f proto/modeld/v1/*_pb2.py proto/modeld/v1/*_pb2.pyi proto/modeld/v1/*_pb2_grpc.py proto/modeld/v1/*_pb2_grpc.pyi
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto \
	    --grpc_python_out=proto --mypy_grpc_out=proto proto/modeld/v1/*.proto
