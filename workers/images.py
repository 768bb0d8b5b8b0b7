"""Images of a prompt on the worker's side: decoding them, and how they stand among tokens.

Owns Pillow, and every way in which an untrusted file can be bad. Knows no engine and no template.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from modeld.shared.errors import InvalidRequest, ModeldError, UnsupportedFeature, unsupported
from modeld.shared.images import ALLOWED, LIMITS, ImageLimits, NamedImage, checked_header
from modeld.workers.memory_guard import MemoryGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    Pixels: TypeAlias = NDArray[np.uint8]  # 1 x height x width x 3: RGB

IMAGE = -1  # in the place of a token's id in a rendered prompt: here an image goes

# While it decodes: the image as stored, with alpha, and the RGB made of it.
_BYTES_A_PIXEL = 4 + 4 + 3
_ADVICE = "Send a smaller image, or free memory."


@dataclass(frozen=True)
class Vision:
    """How the loaded model takes images.

    ``marker`` is the text that stands for an image in a prompt; ``tokens`` says how many positions
    a decoded image takes (1 or more). ``by_text``: the engine itself looks for the marker in the
    text, so that no message may spell it. ``check`` sees each prompt before anything changes, and
    raises for what the engine would read otherwise.
    """

    marker: str
    tokens: Callable[[Pixels], int] = lambda _: 1
    by_text: bool = False
    check: Callable[[Prompted], None] = lambda _: None

    def __post_init__(self) -> None:
        if len(self.marker.encode()) < 2:
            raise ValueError("an image marker of less than two bytes")


@dataclass(frozen=True)
class PlacedImage:
    """An image of an assembled prompt. ``ids`` stand for it among the tokens, from ``token`` on;
    ``begin`` is the marker's first character in the rendered text.
    """

    digest: str  # SHA-256 hex of the encoded bytes
    pixels: Pixels
    begin: int
    token: int
    ids: tuple[int, ...]


class Prompted(Protocol):
    """A prompt as it was assembled: ids below 0 among its tokens are those of its images."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...

    @property
    def images(self) -> tuple[PlacedImage, ...]: ...


@runtime_checkable
class SeeingEngine(Protocol):
    """What an engine offers besides where its models may take images; None: this one doesn't."""

    vision: Vision | None


@runtime_checkable
class SeeingContext(Protocol):
    """A context that can evaluate the ids of images."""

    def show(self, images: Sequence[PlacedImage]) -> None:
        """The images of the prompt that is about to be evaluated, in order.

        Ids below 0 among the tokens are theirs, at ``PlacedImage.token``.
        """


@runtime_checkable
class Rereading(Protocol):
    """A context whose engine keeps nothing: it is given a prompt as text for each answer, and
    evaluates all of it then. What it holds is a record of tokens.
    """

    def reread(self, prompt: Prompted, answer: str) -> None:
        """The prompt that is about to be answered, and its answer so far.

        Raises InvalidRequest or ContextOverflow, changing nothing.
        """


def image_ids(digest: str, count: int) -> tuple[int, ...]:
    """Ids below 0 for an image's ``count`` positions: equal images match, others don't.

    Each is 31 bits of SHA-256 over the image's digest and the position's number.
    """
    return tuple(
        -1 - (int.from_bytes(hashlib.sha256(f"{digest}:{n}".encode()).digest()[:4], "big") >> 1)
        for n in range(count)
    )


def decode(
    data: bytes,
    mime_type: str = "",
    where: str = "image",
    *,
    limits: ImageLimits = LIMITS,
    guard: MemoryGuard | None = None,
) -> Pixels:
    """The image as 8-bit RGB, upright (EXIF orientation applied), transparency over white.

    Gray, palette, CMYK and 16-bit images are converted; colour profiles are ignored.

    Raises InvalidRequest naming ``where`` for whatever isn't a whole, still PNG, JPEG or WebP
    within the limits, and InsufficientMemory where decoding it doesn't fit what is free. The size
    is taken from the header before anything is decoded.
    """
    header = checked_header(NamedImage(where, data, mime_type), limits)
    needed = header.pixels * _BYTES_A_PIXEL
    guard = guard or MemoryGuard()
    more = {"image": where, "width": header.width, "height": header.height}
    with guard.allocating(f"Decoding {where}", {"pixels": needed}, _ADVICE, more=more):
        try:
            return _decoded(data, header.kind, (header.width, header.height))
        except ModeldError:
            raise
        except Exception as error:  # decoders raise anything; their words may quote the file
            raise InvalidRequest.of(
                where,
                f"{len(data)} bytes that don't decode ({type(error).__name__})",
                ALLOWED,
                "It is damaged or cut off.",
            ) from None


def _decoded(data: bytes, kind: str, size: tuple[int, int]) -> Pixels:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data), formats=[kind.upper()]) as image:
        if image.size != size:
            raise ValueError("another size than the header's")
        image.load()
        whole: Image.Image = ImageOps.exif_transpose(image)
        pixels = np.asarray(_rgb(whole), dtype=np.uint8)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"pixels of shape {pixels.shape}")
    return np.ascontiguousarray(pixels[np.newaxis])


def _rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.mode.startswith("I"):  # 16-bit gray, which a plain conversion would cut at 255
        values = np.asarray(image).astype(np.int64) >> 8
        return images.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = images.new("RGBA", layered.size, (255, 255, 255, 255))
        return images.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def no_vision() -> UnsupportedFeature:
    """The refusal of an image where the loaded model takes none."""
    return unsupported("vision", "The loaded model takes no images: send text content only.")
