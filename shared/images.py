"""Encoded images as they come: what their headers say, and the limits that hold for a prompt.

Reads a few bytes of PNG, JPEG and WebP and decodes nothing, so that both sides of the process seam
can refuse an image before it costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modeld.shared.errors import InvalidRequest

MIB = 1024 * 1024
MIME_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
ALIASES = {"image/jpg": "image/jpeg"}
SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
ALLOWED = "a PNG, JPEG or WebP image"

_PNG = b"\x89PNG\r\n\x1a\n"
_NOT_A_FRAME = frozenset({0xC4, 0xC8, 0xCC})  # among JPEG's SOF markers: tables and a reserved one
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # JPEG markers without a length
_ANIMATED = 0x02  # in the flags of a WebP file's VP8X chunk


@dataclass(frozen=True)
class ImageLimits:
    """What one part of a prompt may bring. Pixels are width times height, as decoded."""

    count: int = 16
    bytes_each: int = 16 * MIB
    bytes_total: int = 24 * MIB  # below the largest prompt: its text needs room too
    pixels_each: int = 32 * 1024 * 1024
    pixels_total: int = 64 * 1024 * 1024  # 192 MiB of RGB


LIMITS = ImageLimits()


@dataclass(frozen=True)
class ImageHeader:
    """``kind`` is a key of ``MIME_TYPES``; width and height are in pixels, as stored."""

    kind: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


class BadImage(ValueError):
    """What is wrong with an image, in words that can follow "image 2:". Never quotes its bytes."""


def image_header(data: bytes) -> ImageHeader:
    """What the first bytes declare. Raises BadImage for anything but a still PNG, JPEG or WebP."""
    if data.startswith(_PNG):
        header = _png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        header = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = _webp(data)
    else:
        raise BadImage(f"{len(data)} bytes that are neither PNG nor JPEG nor WebP")
    if not header.pixels:
        raise BadImage(f"its header declares {header.width} x {header.height} pixels")
    return header


def _png(data: bytes) -> ImageHeader:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise BadImage("a PNG without a header")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    at = 33
    while at + 12 <= len(data):  # an animation declares itself before the first pixels
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"acTL":
            raise BadImage("an animated PNG; allowed are still images")
        if kind == b"IDAT":
            break
        at += 12 + size
    return ImageHeader("png", width, height)


def _jpeg(data: bytes) -> ImageHeader:
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise BadImage("a JPEG whose header is damaged")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in _BARE:
            at += 2
            continue
        size = int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in _NOT_A_FRAME:
            if at + 9 > len(data):
                break
            height = int.from_bytes(data[at + 5 : at + 7], "big")
            width = int.from_bytes(data[at + 7 : at + 9], "big")
            return ImageHeader("jpeg", width, height)
        if marker in (0xD9, 0xDA) or size < 2:
            raise BadImage("a JPEG whose header is damaged")
        at += 2 + size
    raise BadImage("a JPEG that ends within its header")


def _webp(data: bytes) -> ImageHeader:
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise BadImage("a WebP that ends within its header")
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
        return ImageHeader("webp", width, height)
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return ImageHeader("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        if body[0] & _ANIMATED:
            raise BadImage("an animated WebP; allowed are still images")
        width, height = (int.from_bytes(body[at : at + 3], "little") + 1 for at in (4, 7))
        return ImageHeader("webp", width, height)
    raise BadImage("a WebP whose header is damaged")


@dataclass(frozen=True)
class NamedImage:
    """``where`` names the image in errors, as the caller would find it in the request."""

    where: str
    data: bytes
    mime_type: str


def check_images(images: Sequence[NamedImage], limits: ImageLimits = LIMITS) -> None:
    """Raises InvalidRequest, naming the image, for what can't be served; decodes nothing."""
    if len(images) > limits.count:
        raise InvalidRequest.of(
            images[limits.count].where, f"image {len(images)}", f"at most {limits.count} images"
        )
    size = pixels = 0
    for image in images:
        header = checked_header(image, limits)
        size += len(image.data)
        pixels += header.pixels
        if size > limits.bytes_total:
            raise InvalidRequest.of(
                image.where,
                f"{size} bytes with those before it",
                f"at most {limits.bytes_total} bytes of images",
            )
        if pixels > limits.pixels_total:
            raise InvalidRequest.of(
                image.where,
                f"{pixels} pixels with those before it",
                f"at most {limits.pixels_total} pixels of images",
            )


def checked_header(image: NamedImage, limits: ImageLimits = LIMITS) -> ImageHeader:
    """One image's header, held against its own limits and its MIME type ("" is any)."""
    if len(image.data) > limits.bytes_each:
        raise InvalidRequest.of(
            image.where, f"{len(image.data)} bytes", f"at most {limits.bytes_each} bytes an image"
        )
    try:
        header = image_header(image.data)
    except BadImage as error:
        raise InvalidRequest.of(image.where, str(error), ALLOWED) from None
    declared = MIME_TYPES[header.kind]
    if ALIASES.get(image.mime_type, image.mime_type) not in ("", declared):
        raise InvalidRequest.of(
            f"{image.where}.mime_type",
            image.mime_type[:64],
            f"{declared}, which its content is, or empty",
        )
    if header.pixels > limits.pixels_each:
        raise InvalidRequest.of(
            image.where,
            f"{header.width} x {header.height} pixels",
            f"at most {limits.pixels_each} pixels an image",
            "Scale it down; models look at far fewer.",
        )
    return header
