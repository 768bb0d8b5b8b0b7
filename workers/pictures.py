"""A prompt's images, decoded, with the ids that stand for them.

Remembers those of the last prompt, so that a conversation's images are decoded once. Knows no
template and no engine beyond how many positions an image takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modeld.shared.images import NamedImage, check_images
from modeld.shared.manifest import sha256_hex
from modeld.shared.messages import SegmentIn
from modeld.workers.images import Vision, decode, image_ids, no_vision

if TYPE_CHECKING:
    from modeld.workers.images import Pixels


@dataclass(frozen=True, eq=False)
class Picture:
    """``digest`` is the SHA-256 hex of the encoded bytes; ``ids`` are below 0."""

    digest: str
    pixels: Pixels
    ids: tuple[int, ...]


class Pictures:
    def __init__(self, vision: Vision | None) -> None:
        self._vision = vision
        self._known: dict[str, Picture] = {}

    def of(self, suffix: Sequence[SegmentIn]) -> list[Picture]:
        """The images of a suffix, in order.

        Raises InvalidRequest naming the image, InsufficientMemory, and UnsupportedFeature where
        the model takes none. Forgets what the last prompt had and this one doesn't.
        """
        images = [
            NamedImage(f"suffix.segments[{index}].images[{number}]", image.data, image.mime_type)
            for index, segment in enumerate(suffix)
            if segment.message is not None
            for number, image in enumerate(segment.message.images)
        ]
        if not images:
            self._known = {}
            return []
        if self._vision is None:
            raise no_vision()
        check_images(images)
        known: dict[str, Picture] = {}
        pictures = []
        for image in images:
            digest = sha256_hex(image.data)
            picture = known.get(digest) or self._known.get(digest)
            if picture is None:
                pixels = decode(image.data, image.mime_type, image.where)
                ids = image_ids(digest, self._vision.tokens(pixels))
                picture = Picture(digest, pixels, ids)
            known[digest] = picture
            pictures.append(picture)
        self._known = known
        return pictures
