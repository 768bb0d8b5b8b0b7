"""The ``Embed`` call: texts to vectors on a slot, without a session.

Owns what is checked before a model is loaded for it, and the answer's form. Knows no engine.
"""

from __future__ import annotations

import array
import sys

from modeld.shared.embedding import check_texts
from modeld.shared.errors import GenerationStale, InvalidRequest, UnsupportedFeature
from modeld.shared.ir_embedding import embeds
from modeld.shared.messages import EmbedOp, EmbedResult
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.rpc.errors import Context
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.streaming import caller_of
from modeld.v1 import session_pb2 as pb

FLOAT_BYTES = 4


async def embed(services: Services, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
    """Serve it. Raises InvalidRequest, UnsupportedFeature, and what a load and the engine do."""
    _check(request, services.config.max_prompt_bytes)
    slot = services.slot_of_model(request.model, request.model_type)
    operation = EmbedOp(
        texts=list(request.texts),
        pooling=request.pooling,
        normalize=request.normalize if request.HasField("normalize") else True,
    )
    while True:
        model = slot.find_model(request.model)
        _refuse_unless_it_embeds(model)
        caller = caller_of(context, no_wait=request.no_wait)
        await slot.ensure_loaded(model, caller)
        try:
            async with slot.hold("", "embed", caller) as hold:
                if slot.resident is None or slot.resident.model.digest != model.digest:
                    continue  # another model's load came first
                result = await slot.call(operation)
                return _response(result, len(request.texts), hold.waited_s, services)
        except GenerationStale:
            continue  # the slot was reset meanwhile; this call has no handle to be stale


def refuse_unless_it_generates(model: StoredModel) -> None:
    """Raise UnsupportedFeature for a session with an embedding model, before anything is loaded."""
    if embeds(model.facts):
        raise UnsupportedFeature(
            f"{model.name!r} is an embedding model: it has no logits to generate from. Ask it for "
            "embeddings, or open a session with a model that generates.",
            metadata={"capability": "generate", "model": model.name},
        )


def _refuse_unless_it_embeds(model: StoredModel) -> None:
    if embeds(model.facts):
        return
    if model.facts.model_type == "openvino":
        text = f"{model.name!r} generates: it has logits and no hidden states. Use an embedding "
        text += "model."
    else:
        text = f"Embedding isn't served yet with models of type {model.facts.model_type!r}. Import "
        text += "an embedding model of type 'openvino'."
    raise UnsupportedFeature(text, metadata={"capability": "embed", "model": model.name})


def _check(request: pb.EmbedRequest, max_bytes: int) -> None:
    total = check_texts(request.texts)
    if total > max_bytes:
        raise InvalidRequest.of(
            "texts", f"{total} bytes", f"at most {max_bytes} bytes (setting max_prompt_bytes)"
        )


def _response(result: object, texts: int, waited_s: float, services: Services) -> pb.EmbedResponse:
    if not isinstance(result, EmbedResult):
        raise TypeError(f"the worker answered {type(result).__name__}, not EmbedResult")
    width = result.dimensions
    values = array.array("f")
    values.frombytes(result.vectors)
    if sys.byteorder == "big":
        values.byteswap()
    if not len(values) == width * len(result.tokens) == width * texts:
        raise TypeError(f"the worker answered {len(values)} numbers for {texts} texts of {width}")
    if len(values) * FLOAT_BYTES > (most := services.config.max_message_bytes // 2):
        raise InvalidRequest.of(
            "texts",
            f"{texts} texts of {width} dimensions",
            f"{most // (FLOAT_BYTES * width)} of this model in a call",
        )
    return pb.EmbedResponse(
        embeddings=[
            pb.Embedding(values=values[width * row : width * (row + 1)], tokens=tokens)
            for row, tokens in enumerate(result.tokens)
        ],
        dimensions=width,
        pooling=result.pooling,
        normalized=result.normalized,
        engine_seconds=result.seconds,
        queue_seconds=waited_s,
    )
