"""What the process that converts a model is asked, and the lines that it answers.

The request goes to it as one line of JSON; it ends when its standard input does. Progress comes
back as lines of JSON, the last of which says how it went. Values only.
"""

from __future__ import annotations

from typing import Any

import msgspec

MARKER = "modeld_conversion.json"  # the caller's, written last; the converter leaves it alone
MAX_LINE_BYTES = 64 * 1024


class ConvertRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Convert the GGUF file ``source`` into the empty folder ``folder``. Both are absolute."""

    source: str
    folder: str


class ConvertLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``fraction`` of the work done, 0 to 1. The last line has ``done`` or ``error``."""

    fraction: float = 0.0
    done: bool = False
    error: dict[str, Any] | None = None  # as ``errors.from_wire`` takes it
