"""How the command speaks: answers on stdout, everything else on stderr, JSON where asked.

Plain text where the stream is no terminal. Knows no calls.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from modeld.cli.exit_codes import exit_code_of
from modeld.client import ClientError, DiscoveryError, to_plain
from modeld.client.errors import CallError
from modeld.shared.errors import ModeldError


def stdout_console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def say(text: str, style: str = "") -> None:
    """A line on stdout."""
    if sys.stdout.isatty():
        stdout_console().print(Text(text, style), soft_wrap=True)
    else:
        print(text)


def note(text: str, style: str = "dim") -> None:
    """A line on stderr, for people."""
    if sys.stderr.isatty():
        stderr_console().print(Text(text, style), soft_wrap=True)
    else:
        print(text, file=sys.stderr)


def emit_json(value: Any) -> None:
    """One JSON object on stdout."""
    text = json.dumps(to_plain(value), ensure_ascii=False, indent=2)
    # A name that isn't UTF-8 is a lone surrogate here: written as JSON's own escape.
    print(text.encode(errors="backslashreplace").decode())


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout: boxes on a terminal, aligned columns elsewhere."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [
        bool(cells) and all(re.fullmatch(r"[\d,.]*( \w+)?|–", row[i]) for row in cells)
        for i in range(len(headers))
    ]
    if sys.stdout.isatty():
        drawn = Table(
            title=title or None,
            title_justify="left",
            title_style="bold",
            show_header=any(headers),
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for header, is_right in zip(headers, right, strict=True):
            drawn.add_column(header, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            drawn.add_row(*(Text(cell) for cell in row))
        stdout_console().print(drawn)
        return
    if title:
        print(f"\n{title}")
    lines = [list(headers), *cells] if any(headers) else cells
    widths = [max(len(row[i]) for row in lines) for i in range(len(headers))] if lines else []
    for row in lines:
        parts = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(parts).rstrip())


def report_error(error: Exception, as_json: bool) -> None:
    """A typed error: a line and its live numbers on stderr, or one object on stdout."""
    reason, message = error_reason(error), str(error)
    metadata = error.metadata if isinstance(error, ModeldError) else {}
    retry_after_s = error.retry_after_s if isinstance(error, ModeldError) else None
    if as_json:
        emit_json(
            {
                "error": {
                    "reason": reason,
                    "message": message,
                    "metadata": metadata,
                    "retry_after_s": retry_after_s,
                    "exit_code": int(exit_code_of(error)),
                }
            }
        )
        return
    note(f"error: {reason}: {message}", "red")
    for extra in getattr(error, "__notes__", ()):
        note(f"  {extra}")
    for key, value in sorted(metadata.items()):
        if value:
            note(f"  {key}: {value}")
    if retry_after_s is not None:
        note(f"  retry after: {retry_after_s:g} s")


_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def report_unexpected(error: Exception) -> None:
    """One line for what has no class of its own; nothing where nobody reads any more."""
    unwritten = _unwritten()
    if isinstance(unwritten, BrokenPipeError) or isinstance(error, BrokenPipeError):
        return
    if unwritten is None and isinstance(error, OSError):
        # A file's errors carry its name; without one it was a stream, which may have dropped
        # what it could not write.
        unwritten = error if error.filename is None and error.errno in _UNWRITABLE else None
    if unwritten is not None:
        text = f"standard output can't be written: {unwritten.strerror or unwritten}"
    else:
        said = " ".join(str(error).split())
        text = (
            f"{type(error).__name__}: {said}. Unexpected; see `modeld --help`, and "
            "logs/daemon.log in the data root for the daemon's side."
        )
    with contextlib.suppress(OSError):
        note(f"error: {text}", "red")


def _unwritten() -> OSError | None:
    """Why stdout can't take what waits for it, if so. What waits is dropped then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # else the exit would try again
        return error
    return None


def error_reason(error: Exception) -> str:
    """The contract's reason, or an equally fixed name for what has none."""
    if isinstance(error, ModeldError):
        return error.reason or "UNKNOWN"
    if isinstance(error, DiscoveryError):
        return error.state or "NO_DAEMON"
    if isinstance(error, (CallError, ClientError)):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
    return "UNEXPECTED"


# --- numbers for people --------------------------------------------------------------------------


def count(value: int) -> str:
    return f"{value:,}"


def size(value_bytes: int) -> str:
    """Bytes in the unit that gives at most four digits: '98.4 MB' is 98,362,432 bytes."""
    value = float(value_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def seconds(value_s: float) -> str:
    if value_s < 60:
        return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.0f} s"
    minutes, rest = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
