"""What the daemon's log says of calls whose client is gone: a line, and of faults a trace."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest

from modeld.supervisor.rpc.errors import hear_grpc

cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")


def logged(caplog: pytest.LogCaptureFixture, error: Exception) -> logging.LogRecord:
    logger = logging.getLogger("grpc._cython.cygrpc")
    hear_grpc()
    hear_grpc()
    with caplog.at_level(logging.INFO):
        try:
            raise error
        except Exception:
            logger.exception("raised in core by servicer method [%s]", "/modeld.v1/Turn")
    (record,) = caplog.records
    return record


def test_a_client_that_left_is_told_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(caplog, cygrpc.ExecuteBatchError("Failed"))
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "a client left before its answer ended" in record.getMessage()


def test_any_other_error_keeps_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(caplog, ValueError("a fault"))
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert "Turn" in record.getMessage()
