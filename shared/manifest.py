"""The manifest: identity and segments, their canonical digest, and the identity gate.

The rule of the canonical encoding stands in ``proto/modeld/v1/common.proto`` with a test vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from modeld.shared.codec import canonical
from modeld.shared.errors import ManifestMismatch


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class AdapterId:
    digest: str
    scale: float


@dataclass(frozen=True)
class Identity:
    """What decides whether resident KV may be reused; see the contract's Identity message."""

    backend: str
    backend_version: str
    model_digest: str
    adapters: tuple[AdapterId, ...]
    prompt_format: str
    prompt_template_digest: str
    add_bos: bool
    kv_digest: str
    runtime_digest: str
    profile_id: str = ""

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["adapters"] = [{"digest": a.digest, "scale": float(a.scale)} for a in self.adapters]
        return plain


def check_identity(asserted: Identity, actual: Identity) -> None:
    """Gate one. Raises ManifestMismatch naming the first field that differs and both values."""
    for field in fields(Identity):
        said, real = getattr(asserted, field.name), getattr(actual, field.name)
        if said != real:
            raise ManifestMismatch(
                f"The call asserts {field.name}={said!r}, but the session has {real!r}. "
                "Use the identity that OpenSession answered, or open a session that matches.",
                metadata={
                    "reason": "identity",
                    "field": field.name,
                    "asserted": said,
                    "actual": real,
                },
            )


@dataclass(frozen=True)
class SegmentId:
    """A segment as the manifest knows it: everything but the content, plus the content's hash."""

    kind: str
    stable: bool
    cache_class: str
    invalidation: str
    hash: str


def raw_hash(text: str) -> str:
    return sha256_hex(text.encode())


def turn_hash(generated_turn_id: str) -> str:
    return sha256_hex(b"generated_turn:" + generated_turn_id.encode())


def message_hash(
    *,
    role: str,
    content: Sequence[tuple[str, str]],
    name: str = "",
    tool_call_id: str = "",
    tool_calls: Sequence[tuple[str, str, str]] = (),
) -> str:
    """``content`` is (text, image digest) pairs; ``tool_calls`` is (id, name, arguments)."""
    return sha256_hex(
        canonical(
            {
                "content": [{"image": image, "text": text} for text, image in content],
                "name": name,
                "role": role,
                "tool_call_id": tool_call_id,
                "tool_calls": [
                    {"arguments": arguments, "id": call_id, "name": call_name}
                    for call_id, call_name, arguments in tool_calls
                ],
            }
        )
    )


def manifest_digest(
    identity: Identity, segments: Sequence[SegmentId], tools: Sequence[str] = ()
) -> str:
    """SHA-256 hex of the canonical encoding; ``tools`` are the tools' JSON texts."""
    return sha256_hex(
        canonical(
            {
                "identity": identity.to_plain(),
                "segments": [asdict(segment) for segment in segments],
                "tools": [sha256_hex(tool.encode()) for tool in tools],
            }
        )
    )


def kv_digest(
    *,
    model_digest: str,
    adapters: Sequence[AdapterId],
    rope: Sequence[tuple[str, str]],
    k_type: str,
    v_type: str,
    flash_attn: bool,
    build_digest: str,
    state_layout: str,
) -> str:
    """What decides whether KV bytes mean the same: must match for any reuse."""
    return sha256_hex(
        canonical(
            {
                "adapters": [[a.digest, float(a.scale)] for a in adapters],
                "build": build_digest,
                "flash_attn": flash_attn,
                "k_type": k_type,
                "model": model_digest,
                "rope": sorted([list(pair) for pair in rope]),
                "state_layout": state_layout,
                "v_type": v_type,
            }
        )
    )


def runtime_digest(
    *,
    kv: str,
    window: int,
    n_batch: int,
    n_ubatch: int,
    n_gpu_layers: int,
    tensor_split: Sequence[float],
    threads: int,
) -> str:
    """``kv_digest`` plus what may differ without harm."""
    return sha256_hex(
        canonical(
            {
                "kv": kv,
                "n_batch": n_batch,
                "n_gpu_layers": n_gpu_layers,
                "n_ubatch": n_ubatch,
                "tensor_split": [float(part) for part in tensor_split],
                "threads": threads,
                "window": window,
            }
        )
    )


def template_digest(source: str, bos_text: str, eos_text: str) -> str:
    """SHA-256 hex of the raw chat template and of everything else that decides how it renders."""
    return sha256_hex(
        canonical(
            {
                "bos_token": bos_text,
                "eos_token": eos_text,
                "language": "jinja2",
                "lstrip_blocks": True,
                "source": source,
                "trim_blocks": True,
            }
        )
    )
