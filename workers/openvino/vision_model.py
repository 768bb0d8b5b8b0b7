"""What the engine holds while a vision-language model is loaded, and what it reports of it.

Owns how many tokens an image takes, the proof that the model sees, and the size of the cache. Knows
no sessions or policy.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    SessionFatal,
)
from modeld.shared.ir_files import read_object
from modeld.shared.ir_texts import IrTexts
from modeld.shared.ir_vision import LANGUAGE, check_preprocessor
from modeld.shared.messages import (
    ImageIn,
    LoadOp,
    LoadResult,
    Message,
    PlacedOut,
    PromptIn,
    SegmentIn,
)
from modeld.shared.planner import openvino_kv
from modeld.workers.images import Vision
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino import adapters, generation
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.native import core, words
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer
from modeld.workers.openvino.vision import (
    EXECUTOR,
    DoesNotFit,
    Told,
    VisionContext,
    VisionPipeline,
)
from modeld.workers.openvino.vision_prompts import Handover
from modeld.workers.prompt import PromptAssembler
from modeld.workers.template import ChatTemplate

if TYPE_CHECKING:
    from modeld.workers.images import Pixels

# Where no session is planned yet. The cache grows for a larger one: the model is loaded anew.
FIRST_WINDOW = 512  # tokens
IMAGE_TOKEN_KEYS = ("image_token_index", "image_token_id")  # in config.json
# Whose configuration fixes the size to which every image is brought.
FIXED_SIZE = frozenset({"llava"})
TRIED_SIZE, OTHER_SIZES = (48, 48), ((40, 160), (160, 40))  # height, width
TRIED_TOKENS = 4  # of an answer
SAME_SCORE = 1e-3  # of log-probabilities: less is rounding
MOST_TRIED = 1 << 13  # tokens, where the model doesn't say what it is made for
MAX_KNOWN_SIZES = 1024
GAPS_S = {"load": 1.0, "evaluate": 0.5, "copy": 0.25, "tokenize": 0.5}
_UNSERVED = (
    "embed",
    "layout.batched",
    "fork",
)
_QUESTION = "What is in this picture?"
_RECOMPUTED = "no: recomputed at each turn; GenAI's vision pipeline keeps nothing that can be told"


@dataclass(frozen=True)
class _Sample:
    """A short prompt with one image, as it is handed over, and its tokens without the image's."""

    text: str
    tokens: int


class VisionModel:
    """A folder's model loaded into GenAI's vision pipeline. Close it."""

    def __init__(
        self,
        request: LoadOp,
        facts: ModelFacts,
        texts: IrTexts,
        *,
        device: str,
        threads: int,
        guard: MemoryGuard,
        step: Callable[[float], None],
    ) -> None:
        """Raises ModelLoadFailed with the engine's words, UnsupportedFeature for adapters or for a
        model whose text can't be handed over as it was counted.
        """
        adapters.refuse(request.adapters, "the vision executor")
        folder = Path(request.path)
        check_preprocessor(folder)
        self.request, self.texts = request, texts
        self._facts, self._threads, self._guard = facts, threads, guard
        self.tokenizer = OpenVinoTokenizer(folder, core(), _vocabulary(folder))
        step(0.2)
        window = request.window or min(facts.model_max or FIRST_WINDOW, FIRST_WINDOW)
        self.pipeline = VisionPipeline(
            folder, device, kv_type=request.k_type, blocks=_blocks(window), threads=threads
        )
        step(0.5)
        config = read_object(folder / "config.json")
        self._marker = _marker(config, self.tokenizer)
        self._sizes: dict[tuple[int, int], int] = {}
        self._fixed = 0  # tokens of every image
        self._sample: _Sample | None = None
        try:
            self.prompts = Handover(self.pipeline, self.tokenizer, texts.bos_text, self._marker)
            self._sees = self._tried(config.get("model_type"), step)
        except (SessionFatal, DoesNotFit) as error:
            raise ModelLoadFailed(
                f"The model {request.model!r} loads but doesn't compute: {words(error)}",
                metadata={"cause": "probe", "executor": EXECUTOR},
            ) from None

    @property
    def sees(self) -> bool:
        """Whether the try at load showed it."""
        return self._sees.startswith("yes")

    @property
    def vision(self) -> Vision | None:
        """How it takes images; None where it wasn't seen to."""
        if not self.sees:
            return None
        return Vision(self._marker, self.image_tokens, by_text=True, check=self.prompts.check)

    # --- images --------------------------------------------------------------------------------

    def image_tokens(self, pixels: Pixels) -> int:
        """Tokens that an image takes in a prompt.

        Where the configuration doesn't fix it, that of an image of a new size is found by having
        the engine evaluate one. Raises ContextOverflow for one that its cache can't hold.
        """
        if self._fixed:
            return self._fixed
        size = int(pixels.shape[1]), int(pixels.shape[2])
        if size not in self._sizes:
            if len(self._sizes) >= MAX_KNOWN_SIZES:
                self._sizes.clear()
            self._sizes[size] = self._measured(size)
        return self._sizes[size]

    def _measured(self, size: tuple[int, int]) -> int:
        assert self._sample is not None
        try:
            _, told = self.pipeline.whole(self._sample.text, [_blank(size)], 1)
        except DoesNotFit:
            height, width = size
            raise ContextOverflow(
                f"An image of {width} x {height} pixels takes more than the "
                f"{self.pipeline.tokens} tokens that this model's cache holds. Send a smaller "
                "image, or open a session with a larger window.",
                metadata={"effective": self.pipeline.tokens, "width": width, "height": height},
            ) from None
        return told.evaluated - self._sample.tokens

    # --- tried at load -------------------------------------------------------------------------

    def _tried(self, model_type: Any, step: Callable[[float], None]) -> str:
        """``yes: …`` where other images gave another answer, and equal ones the same."""
        if not self._marker:
            return f"no: config.json names no {' or '.join(IMAGE_TOKEN_KEYS)} of the vocabulary"
        try:
            self._sample = self._sampled()
        except ModeldError as error:
            return f"no: {error.message}"
        try:
            answers = self._answers(step)
        except ContextOverflow as error:
            return f"no: {error.message}"
        counts = {told.evaluated - self._sample.tokens for _, told in answers}
        if len(counts) > 1 or min(counts) < 1:
            return f"no: an image adds {min(counts)} to {max(counts)} tokens to a prompt"
        first, again, other = answers
        if _differ(first, again):
            return "no: equal images gave different answers in a try"
        if not _differ(first, other):
            return "no: another image gave the same answer in a try, as likely as before"
        how = "as many tokens as their size makes"
        if model_type in FIXED_SIZE:
            counts |= {self._measured(size) for size in OTHER_SIZES}
            if len(counts) == 1:
                self._fixed = min(counts)
                how = f"{self._fixed} tokens each"
        return (
            "yes: tried at load: equal images gave the same answer, another one a different "
            f"{'answer' if first[0] != other[0] else 'probability'}; {how}"
        )

    def _answers(self, step: Callable[[float], None]) -> list[tuple[list[int], Told]]:
        """To one image twice and to another one. The cache grows where an image needs that."""
        assert self._sample is not None
        answers = []
        for number, seed in enumerate((1, 1, 2)):
            step(0.55 + 0.05 * number)
            answers.append(self._grown(self._sample.text, [_noise(seed)], TRIED_TOKENS))
        return answers

    def _grown(self, text: str, images: Sequence[Pixels], most: int) -> tuple[list[int], Told]:
        while True:
            try:
                return self.pipeline.whole(text, images, most)
            except DoesNotFit:
                limit = _blocks(self._facts.model_max or MOST_TRIED)
                if self.pipeline.blocks >= limit:
                    raise ContextOverflow(
                        f"an image takes more than {self.pipeline.tokens} tokens, all that the "
                        "model is made for",
                        metadata={"effective": self.pipeline.tokens},
                    ) from None
                self.pipeline.grow(min(2 * self.pipeline.blocks, limit))

    def _sampled(self) -> _Sample:
        """A prompt with an image as the model's own template makes it."""
        if not self.texts.template:
            text = f"a {self._marker} b"
            around = text.split(self._marker)
            return _Sample(text, sum(len(self.pipeline.encode(one)) for one in around))
        special = {"bos_token": self.texts.bos_text, "eos_token": self.texts.eos_text}
        template = ChatTemplate(self.texts.template, special)
        vision = Vision(self._marker, by_text=True)
        image = ImageIn(data=_png(_blank(TRIED_SIZE)), mime_type="image/png")
        message = Message(role="user", text=_QUESTION, images=[image])
        assembled = PromptAssembler(self.tokenizer, template, "chat", vision).assemble(
            PromptIn(segments=[]), PromptIn(segments=[SegmentIn(message=message)]), {}
        )
        return _Sample(self.prompts.handed(assembled), len(assembled.tokens) - 1)

    # --- what the engine holds -----------------------------------------------------------------

    def new_context(self, window: int, k_type: str, v_type: str) -> VisionContext:
        """Raises InvalidRequest for other KV types than the cache has, and InsufficientMemory."""
        if window < 1:
            raise InvalidRequest.of("window", window, "1 token or more")
        served = self.request.k_type
        for field, asked in (("k_type", k_type), ("v_type", v_type)):
            if asked != served:
                raise InvalidRequest.of(field, asked, served, "The model was loaded for it.")
        blocks = _blocks(window)
        tokens = blocks * BLOCK_TOKENS
        kv = openvino_kv.kv_bytes(self._facts.layers, tokens, k_type, v_type)
        with self._guard.allocating(
            f"A context of {window} tokens",
            {"kv": kv},  # touched as it is used
            "Ask for a smaller window, or close a session.",
            more={"window": window},
        ):
            if blocks > self.pipeline.blocks:
                self._grow(blocks)
        return VisionContext(self, tokens, kv)

    def _grow(self, blocks: int) -> None:
        try:
            self.pipeline.grow(blocks)
        except ModelLoadFailed as error:
            raise InsufficientMemory(
                f"The engine can't make a cache of {blocks} blocks. {error.message}",
                metadata={"needed_blocks": blocks, "cause": "engine"},
            ) from None

    def result(self, seconds: float) -> LoadResult:
        """What the load reports."""
        facts = self._facts
        return LoadResult(
            description=f"{facts.architecture or 'unknown'} IR {facts.quantization}".strip(),
            vocab=self.tokenizer.vocab_size,
            train_context=facts.model_max,
            weights_bytes=facts.weights_bytes,
            add_bos=self.tokenizer.add_bos,
            template_digest=self.texts.digest,
            template_supports_tools=False,  # known only by rendering, which isn't done here
            threads=self._threads,
            capabilities=self.capabilities(),
            seconds=seconds,
            placed=[PlacedOut(device="CPU", weights_bytes=facts.weights_bytes)],
            traits={"vocabulary": self.tokenizer.vocab_size},
            executor=EXECUTOR,
            executor_reason="the folder has a vision encoder, which GenAI's vision pipeline runs",
            longest_gap_s=GAPS_S,
        )

    def capabilities(self) -> dict[str, str]:
        """Name → ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``."""
        kv_type, cut = self.request.k_type, self.prompts.longest
        return {
            **dict.fromkeys(_UNSERVED, "no: not served yet"),
            "executor": f"{EXECUTOR}: GenAI's vision-language pipeline, tried at load",
            "vision": self._sees,
            "recompute": "yes: every answer evaluates its whole prompt, text and images",
            "prefix_reuse": _RECOMPUTED,
            "tail_removal": _RECOMPUTED,
            "middle_removal": _RECOMPUTED,
            "position_shift": _RECOMPUTED,
            "state.blocks": _RECOMPUTED,
            "state.whole": _RECOMPUTED,
            "cold_store": _RECOMPUTED,
            "overflow.evict": _RECOMPUTED,
            "snapshot": _RECOMPUTED,
            "durable": _RECOMPUTED,
            "prefix_copy": _RECOMPUTED,
            "exact_warm": _RECOMPUTED,
            "cancel.before_first_token": (
                "no: the engine calls nothing until then; a cancel is answered once it has "
                "evaluated the prompt"
            ),
            "cancel.in_answer": "yes: within a few tokens, which are thrown away",
            "kv_type": f"unknown: {kv_type} was asked for, and the engine doesn't tell what it has",
            "prompt_tokens": f"yes: up to {cut - 1}" if cut else "yes: no cut was seen",
            "sparse_attention": "no: every layer attends as the model was exported",
            "structured_output": "no: not served by this executor yet",
            **generation.CAPABILITIES,
        }

    def close(self) -> None:
        """Free it. Idempotent."""
        self.pipeline.close()


def _differ(one: tuple[list[int], Told], other: tuple[list[int], Told]) -> bool:
    """Whether two answers do, or else how likely they are."""
    return one[0] != other[0] or abs(one[1].score - other[1].score) > SAME_SCORE


def _blocks(window: int) -> int:
    return -(-window // BLOCK_TOKENS)


def _marker(config: Any, tokenizer: OpenVinoTokenizer) -> str:
    """The text of the token that stands for an image; "" where none is named."""
    for key in IMAGE_TOKEN_KEYS:
        token = config.get(key)
        if type(token) is int and 0 <= token < tokenizer.vocab_size:
            text = tokenizer.piece(token).decode(errors="replace")
            return text if len(text) > 1 else ""
    return ""


def _vocabulary(folder: Path) -> int | None:
    """The width of the logits, or None where the IR leaves it open."""
    try:
        model = core().read_model(str(folder / f"{LANGUAGE}.xml"))
        width = model.outputs[0].get_partial_shape()[-1]
    except Exception as error:
        raise ModelLoadFailed(
            f"OpenVINO can't read {LANGUAGE}.xml: {words(error)}. Export the model again.",
            metadata={"cause": "engine", "file": f"{LANGUAGE}.xml"},
        ) from None
    return int(width.get_length()) if width.is_static else None


def _blank(size: tuple[int, int]) -> Pixels:
    return np.full((1, *size, 3), 128, dtype=np.uint8)


def _noise(seed: int) -> Pixels:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (1, *TRIED_SIZE, 3)).astype(np.uint8)


def _png(pixels: Pixels) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels[0]).save(buffer, "PNG")
    return buffer.getvalue()
