"""How a prompt is handed to GenAI's vision pipeline as text, proved to be read as it was counted.

The engine tokenizes by itself, finds control tokens and images in text, and may cut a long one.
Knows no session, no sampling and how no image is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modeld.shared.errors import ContextOverflow, InvalidRequest, UnsupportedFeature
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer
from modeld.workers.openvino.vision import EXECUTOR, VisionPipeline

if TYPE_CHECKING:
    from modeld.workers.images import PlacedImage, Prompted

TAG = "<ov_genai_"  # of GenAI's own tags for images, video and sound
LONG_TOKENS = 1 << 15  # of a text that shows where the tokenizer cuts


class Handover:
    """Of one loaded model. ``marker`` is the text of an image, "" where there is none; ``longest``
    the tokens at which the engine cuts a prompt, 0 where no cut was seen.
    """

    def __init__(
        self, pipeline: VisionPipeline, tokenizer: OpenVinoTokenizer, bos_text: str, marker: str
    ) -> None:
        """Tries the engine's tokenizer. Raises UnsupportedFeature where it adds tokens that the
        model's own doesn't, and SessionFatal or DoesNotFit where the engine doesn't compute.
        """
        self._pipeline, self._tokenizer, self._bos_text = pipeline, tokenizer, bos_text
        self._marker = marker
        self._controls = frozenset(tokenizer.controls.values())
        self._adds_bos = self._finds_bos()
        self.longest = self._finds_cut()

    def check(self, prompt: Prompted) -> None:
        """Whether the engine reads a prompt as it was assembled.

        Raises InvalidRequest for a text that it would take for control tokens or images, and
        ContextOverflow for one that its tokenizer cuts.
        """
        if not prompt.tokens:
            return
        text = self.handed(prompt)
        found = self._encoded(text, prompt.images)
        ours = [token for token in prompt.tokens if token >= 0]
        if self._adds_bos:
            ours = ours[1:]
        if found == ours:
            return
        controls = self._controls
        if [t for t in found if t in controls] != [t for t in ours if t in controls]:
            raise InvalidRequest(
                "The prompt contains the text of one of the model's control tokens where the chat "
                "template didn't write it, and this model's engine finds them in text. Remove or "
                "break up that text.",
                metadata={
                    "field": "prompt",
                    "value": "",
                    "allowed": "content without control-token text",
                },
            )
        at = next((i for i, (a, b) in enumerate(zip(found, ours, strict=False)) if a != b), -1)
        raise UnsupportedFeature(
            f"GenAI's tokenizer makes {len(found)} tokens of this prompt and the model's own "
            f"{len(ours)}" + (f", different from token {at} on" if at >= 0 else "") + ". The "
            "prompt can't be served as it was counted: change its text.",
            metadata={"capability": "openvino.tokenizer", "executor": EXECUTOR},
        )

    def handed(self, prompt: Prompted) -> str:
        """The text to hand over: the engine puts the beginning-of-text token first by itself, or
        finds its text.
        """
        text, bos, bos_text = prompt.text, self._tokenizer.bos, self._bos_text
        begins = bool(prompt.tokens) and bos is not None and prompt.tokens[0] == bos
        written = bool(bos_text) and text.startswith(bos_text)
        if self._adds_bos:
            if not begins:
                raise UnsupportedFeature(
                    "This model's engine begins every prompt with the beginning-of-text token, "
                    "and this one is meant without it.",
                    metadata={"capability": "openvino.tokenizer", "executor": EXECUTOR},
                )
            return text.removeprefix(bos_text) if written else text
        return bos_text + text if begins and not written else text

    def count(self, text: str, images: Sequence[PlacedImage]) -> int:
        """Tokens of what is handed over. Raises as ``check`` does for its text."""
        tokens = len(self._encoded(text, images))
        return tokens + self._adds_bos + sum(len(image.ids) for image in images)

    def _pieces(self, text: str, images: Sequence[PlacedImage]) -> list[str]:
        """The text between images."""
        pieces = text.split(self._marker) if self._marker else [text]
        if len(pieces) != len(images) + 1 or any(TAG in piece for piece in pieces):
            raise InvalidRequest(
                "The prompt contains the text by which the model's engine finds images. Remove or "
                "break up that text.",
                metadata={
                    "field": "prompt",
                    "value": "",
                    "allowed": f"text without {self._marker or TAG} and {TAG}",
                },
            )
        return pieces

    def _encoded(self, text: str, images: Sequence[PlacedImage]) -> list[int]:
        """The engine's ids of the text around the images."""
        encode = self._pipeline.encode
        ids = [token for piece in self._pieces(text, images) if piece for token in encode(piece)]
        total = len(ids) + sum(len(image.ids) for image in images)
        if self.longest and total >= self.longest:
            raise ContextOverflow(
                f"The model's tokenizer cuts a prompt at {self.longest} tokens without a word, "
                f"and this one comes to {total} or more. Send a shorter one.",
                metadata={"requested_tokens": total, "effective": self.longest - 1},
            )
        return ids

    # --- tried at load

    def _finds_bos(self) -> bool:
        """Whether the engine puts a beginning-of-text token before what it is given."""
        text = "a b"
        _, told = self._pipeline.whole(text, [], 1)
        more = told.evaluated - len(self._pipeline.encode(text))
        if more not in (0, 1) or (more and not self._tokenizer.add_bos):
            raise UnsupportedFeature(
                f"GenAI puts {more} tokens before a prompt that the model's own tokenizer doesn't. "
                "Export the model again with its own tokenizer.",
                metadata={"capability": "openvino.tokenizer", "executor": EXECUTOR},
            )
        return more == 1

    def _finds_cut(self) -> int:
        """At how many tokens the engine's tokenizer cuts a text; 0: not below ``LONG_TOKENS``."""
        text = "a b " * (LONG_TOKENS // 2)
        ids = self._pipeline.encode(text)
        return len(ids) if len(ids) < len(self._tokenizer.encode(text)) else 0
