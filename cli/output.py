"""How the command speaks: answers on stdout, everything else on stderr, JSON where asked.

Plain text where the stream is no terminal, without control characters: names and notes come from
files that anybody may have written. Knows no calls.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import sys
import time
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


# --- text that any stream can take ---------------------------------------------------------------

# Controls, which a terminal obeys, and what turns the direction of text or breaks a line.
_CONTROL = r"\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROLS = re.compile(f"[{_CONTROL}]")
_CONTROLS_IN_A_LINE = re.compile(rf"(?![\t\n])[{_CONTROL}]")
_PLAIN = {"–": "-", "×": "x", "·": "-", "…": "..."}


def one_line(text: str) -> str:
    """The text without control characters; line breaks and tabs are spaces."""
    return _CONTROLS.sub("", re.sub(r"[\t\n\r\x0b\x0c\x85\u2028\u2029]+", " ", text))


def printable(text: str) -> str:
    """The text without control characters but line feeds and tabs."""
    return _CONTROLS_IN_A_LINE.sub("", text)


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = "".join(_PLAIN.get(c, c.encode("ascii", "backslashreplace").decode()) for c in letters)
    return plain, error.end


def spell_out_what_the_stream_lacks() -> None:
    """Let standard output take any text, in an encoding that doesn't have all of it."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        return
    if stream.errors == "strict" or not _has_all_letters(stream.encoding):
        codecs.register_error("modeld.plain", _plain)
        stream.reconfigure(errors="modeld.plain")


def _has_all_letters(encoding: str | None) -> bool:
    try:
        return codecs.lookup(encoding or "ascii").name.startswith("utf")
    except LookupError:
        return False


# --- speaking ------------------------------------------------------------------------------------


def say(text: str, style: str = "") -> None:
    """A line on stdout."""
    text = one_line(text)
    if sys.stdout.isatty():
        stdout_console().print(Text(text, style), soft_wrap=True)
    else:
        print(text)


def note(text: str, style: str = "dim") -> None:
    """A line on stderr, for people."""
    text = printable(text)
    if sys.stderr.isatty():
        stderr_console().print(Text(text, style), soft_wrap=True)
    else:
        print(text, file=sys.stderr)


def emit_json(value: Any) -> None:
    """One JSON object on stdout."""
    every_letter = _has_all_letters(sys.stdout.encoding)
    text = json.dumps(to_plain(value), ensure_ascii=not every_letter, indent=2)
    # What a terminal obeys is written as JSON's own escape, and so is a name that isn't UTF-8: a
    # lone surrogate here.
    text = re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text.encode(errors="backslashreplace").decode())


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout: boxes on a terminal, aligned columns elsewhere."""
    title, cells = one_line(title), [[one_line(str(cell)) for cell in row] for row in rows]
    right = [
        bool(cells) and all(re.fullmatch(r"-?[\d,.]*( \w+)?|–", row[i]) for row in cells)
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
    told = error_object(error)
    if as_json:
        emit_json({"error": told})
        return
    note(f"error: {told['reason']}: {told['message']}", "red")
    for extra in getattr(error, "__notes__", ()):
        note(f"  {extra}")
    for key, value in sorted(told["metadata"].items()):
        if value:
            note(f"  {key}: {value}")
    if told["retry_after_s"] is not None:
        note(f"  retry after: {told['retry_after_s']:g} s")


def error_object(error: Exception) -> dict[str, Any]:
    """A typed error as `--json` shows it, under ``error``."""
    typed = error if isinstance(error, ModeldError) else None
    return {
        "reason": error_reason(error),
        "message": str(error),
        "metadata": typed.metadata if typed else {},
        "retry_after_s": typed.retry_after_s if typed else None,
        "exit_code": int(exit_code_of(error)),
    }


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


def ago(unix_ms: int) -> str:
    """How long ago a wall-clock time was."""
    return f"{seconds(max(0.0, time.time() - unix_ms / 1000))} ago" if unix_ms else "never"


def seconds(value_s: float) -> str:
    if value_s < 60:
        return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.0f} s"
    minutes, rest = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
