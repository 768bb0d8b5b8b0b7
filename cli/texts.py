"""Text from the command line, stdin and files: UTF-8, or a usage error that says so."""

from __future__ import annotations

import sys
from pathlib import Path

import click


def argument(value: str, name: str) -> str:
    """An argument as text. Bytes that weren't UTF-8 arrive as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{name} can't be read as UTF-8 text: {_at(error)}") from None
    return value


def stdin() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise not_utf8("stdin", error) from None
    return argument(text, "stdin")


def file(path: Path | None) -> str:
    """A file's text; "" for none."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} can't be read as UTF-8 text: {error}") from None


def path(value: Path, name: str) -> Path:
    """An absolute path, with a user's home folder in the place of '~'."""
    try:
        return value.expanduser().absolute()
    except RuntimeError as error:
        raise click.UsageError(f"{name} {str(value)!r} can't be a path: {error}") from None


def not_utf8(name: str, error: UnicodeDecodeError) -> click.UsageError:
    return click.UsageError(f"{name} can't be read as UTF-8 text: {error}")


def _at(error: UnicodeEncodeError) -> str:
    byte = ord(error.object[error.start]) - 0xDC00
    return f"character {error.start} is the byte 0x{byte:02x}" if 0 < byte < 256 else str(error)
