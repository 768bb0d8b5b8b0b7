"""Where requests to GenAI's pipeline ended inside a block: what its prefix cache may hold besides
whole blocks.

Owns digests of token sequences, not the tokens. Knows no engine.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from modeld.workers.openvino.blocks import BLOCK_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

_DIGEST_BYTES = 16


class Ends:
    """A set of token sequences whose length is no multiple of a block."""

    def __init__(self) -> None:
        self._of_length: dict[int, set[bytes]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ids: Ids) -> None:
        """A request's KV ended with these tokens; whole blocks are not kept."""
        length = len(ids)
        if length % BLOCK_TOKENS:
            known = self._of_length.setdefault(length, set())
            self._count -= len(known)
            known.add(_hash(ids).digest()[:_DIGEST_BYTES])
            self._count += len(known)

    def longest(self, ids: Ids) -> int:
        """The length in tokens of the longest one that ``ids`` goes on from, or is; 0 if none."""
        digest, done, found = _hash(ids[:0]), 0, 0
        for length in sorted(self._of_length):
            if length > len(ids):
                break
            digest.update(ids[done:length].tobytes())
            done = length
            if digest.digest()[:_DIGEST_BYTES] in self._of_length[length]:
                found = length
        return found

    def clear(self) -> None:
        self._of_length.clear()
        self._count = 0


def _hash(ids: Ids) -> hashlib._Hash:
    return hashlib.sha256(ids.tobytes())
