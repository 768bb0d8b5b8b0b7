"""Images of a prompt: what is accepted, how it is decoded, and how each bad file is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from modeld.shared.capacity import MemorySnapshot
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.shared.images import (
    BadImage,
    ImageLimits,
    NamedImage,
    check_images,
    image_header,
)
from modeld.workers.images import decode, image_ids
from modeld.workers.memory_guard import MemoryGuard
from tests.support.pictures import picture, png_of, saved

RED = (200, 30, 30)


def refused(data: bytes, mime_type: str = "", **options: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        decode(data, mime_type, "suffix.segments[0].images[1]", **options)  # type: ignore[arg-type]
    assert error.value.metadata["field"].startswith("suffix.segments[0].images[1]")
    return error.value


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_each_format_decodes_to_rgb_of_its_own_size(kind: str) -> None:
    pixels = decode(picture(RED, (8, 6), kind=kind))
    assert pixels.shape == (1, 6, 8, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - RED).max() <= 8  # JPEG and WebP lose a little


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}),
    ],
)
def test_a_header_tells_the_size_that_pillow_finds(kind: str, options: dict[str, Any]) -> None:
    header = image_header(picture(RED, (301, 77), kind=kind, **options))
    assert (header.width, header.height) == (301, 77)


def test_an_image_turned_by_exif_comes_upright() -> None:
    image = Image.new("RGB", (8, 4), RED)
    exif = image.getexif()
    exif[0x0112] = 6  # a quarter turn
    assert decode(saved(image, "JPEG", exif=exif)).shape == (1, 8, 4, 3)


def test_sixteen_bit_gray_keeps_its_high_byte() -> None:
    values = np.array([[0, 255, 256, 65535]], dtype=np.uint16)
    pixels = decode(saved(Image.fromarray(values), "PNG"))
    assert pixels[0, 0, :, 0].tolist() == [0, 0, 1, 255]


def test_cmyk_becomes_rgb() -> None:
    pixels = decode(picture((0, 255, 255, 0), kind="JPEG", mode="CMYK"))
    assert pixels[0, 0, 0, 0] > 200
    assert pixels[0, 0, 0, 1] < 60


def test_what_is_transparent_becomes_white() -> None:
    pixels = decode(picture((10, 20, 30, 0), mode="RGBA"))
    assert pixels[0, 0, 0].tolist() == [255, 255, 255]


def test_a_palette_is_looked_up() -> None:
    image = Image.new("RGB", (4, 4), RED).convert("P", palette=Image.Palette.ADAPTIVE)
    assert decode(saved(image, "PNG"))[0, 0, 0].tolist() == list(RED)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    error = refused(png_of(60_000, 60_000))
    assert "60000 x 60000 pixels" in error.message


def test_a_bomb_in_webp_is_refused_before_its_canvas_is_made() -> None:
    small = bytearray(picture(RED, kind="WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"))
    assert small[12:16] == b"VP8X"
    small[24:30] = b"\xfe\x3f\x00\xfe\x3f\x00"
    assert "16383 x 16383 pixels" in refused(bytes(small)).message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_file_cut_off_anywhere_is_refused(kind: str) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 40, 3), np.uint8))
    whole = saved(image, kind)
    for size in (0, 3, 11, 20, 29, 40, len(whole) // 2, len(whole) * 9 // 10):
        refused(whole[:size])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "animated" in refused(data).message


@pytest.mark.parametrize("data", [b"GIF89a" + bytes(40), b"<svg/>", b"", bytes(100)])
def test_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage):
        image_header(data)
    refused(data)


def test_a_mime_type_that_the_content_contradicts_is_refused() -> None:
    assert refused(picture(), "image/jpeg").metadata["allowed"].startswith("image/png")
    assert decode(picture(kind="JPEG"), "image/jpg").shape == (1, 6, 8, 3)


def test_damage_anywhere_in_a_file_is_refused_or_decodes_and_never_more() -> None:
    random = np.random.default_rng(2)
    image = Image.fromarray(random.integers(0, 255, (24, 24, 3), np.uint8))
    for kind in ("PNG", "JPEG", "WEBP"):
        whole = np.frombuffer(saved(image, kind), np.uint8)
        for _ in range(60):
            broken = whole.copy()
            broken[random.integers(0, len(broken), 3)] ^= random.integers(1, 255, 3, np.uint8)
            try:
                pixels = decode(broken.tobytes())
            except InvalidRequest:
                continue
            assert pixels.dtype == np.uint8


def test_limits_name_the_image_that_passes_them() -> None:
    small = NamedImage("a", picture(), "")
    limits = ImageLimits(2, 10_000, len(small.data) * 2, 100, 90)
    check_images([small], limits)
    with pytest.raises(InvalidRequest, match="90 pixels"):
        check_images([small, NamedImage("b", picture(), "")], limits)
    with pytest.raises(InvalidRequest, match="at most 2 images"):
        check_images([small] * 3, limits)
    tight = ImageLimits(9, 10_000, len(small.data), 100, 1000)
    with pytest.raises(InvalidRequest, match="bytes of images"):
        check_images([small, small], tight)
    with pytest.raises(InvalidRequest, match="bytes an image"):
        check_images([small], ImageLimits(bytes_each=10))


def test_an_image_beyond_free_memory_is_refused_with_the_numbers() -> None:
    scarce = MemoryGuard(lambda: MemorySnapshot(1 << 30, 1000))
    with pytest.raises(InsufficientMemory) as error:
        decode(picture(size=(100, 100)), guard=scarce)
    assert error.value.metadata["pixels_bytes"] == str(100 * 100 * 11)


def test_ids_of_images_are_below_zero_and_the_images_own() -> None:
    one, other = image_ids("aa", 16), image_ids("ab", 16)
    assert one == image_ids("aa", 16)
    assert not set(one) & set(other)
    assert len(set(one)) == 16
    assert all(-(1 << 31) <= value < 0 for value in (*one, *other))
