"""Encoded images for tests: small ones, and ones that are wrong in a given way."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def picture(
    colour: Any = (200, 30, 30),
    size: tuple[int, int] = (8, 6),
    *,
    kind: str = "PNG",
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind, **options)
    return buffer.getvalue()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_of(width: int, height: int, depth: int = 8) -> bytes:
    """A PNG that declares this size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )
