"""What a worker saves, made by hand: a session's files in a folder, and what names them.

The files have the layouts that ``shared/sealed_file.py`` writes down, built here from them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.manifest import Identity, SegmentId
from modeld.supervisor.saved_folder import SavedFile, SavedFolder, SavedInfo

IDENTITY = Identity(
    backend="llama",
    backend_version="1",
    model_digest="d" * 64,
    adapters=(),
    prompt_format="chat",
    prompt_template_digest="t" * 64,
    add_bos=False,
    kv_digest="k" * 64,
    runtime_digest="r" * 64,
)
RECORD = "record-1.mp"
BLOCK = 256  # tokens
WINDOW, SEEN_MORE, TURNS = 1024, 7, 2


def state_file(chunks: Sequence[bytes]) -> tuple[str, bytes]:
    """A file of KV with such chunks: its digest, and its bytes."""
    listed = [[n + 1, len(c), hashlib.sha256(c).digest()] for n, c in enumerate(chunks)]
    header = msgspec.msgpack.encode({"backend": "llama", "chunks": listed})
    offset = (24 + 32 + len(header) + 100) // 64 * 64
    numbers = struct.pack("<8sIIQ", b"modeldKV", 1, len(header), offset)
    padded = header.ljust(offset - 24 - 32, b"\0")
    seal = hashlib.sha256(numbers + padded)
    return seal.hexdigest(), numbers + seal.digest() + padded + b"".join(chunks)


def record_file(body: bytes) -> tuple[str, bytes]:
    """A record with such a body: its digest, and its bytes."""
    numbers = struct.pack("<8sIQ", b"modeldSR", 1, len(body))
    seal = hashlib.sha256(numbers + body)
    return seal.hexdigest(), numbers + seal.digest() + body


def write_files(
    folder: Path, tokens: int = 600, fill: bytes = b"kv", **recorded: Any
) -> dict[str, bytes]:
    """A record and the parts of so many tokens; what was written, by name. ``recorded`` is of the
    record.
    """
    files = {RECORD: b""}
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        half = fill * ((end - begin) // 2 + 1)
        files[f"part-{begin}-{end}.kv"] = state_file([half, half])[1]
    files[RECORD] = record_file(body_of(files, tokens, fill, recorded))[1]
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def body_of(files: dict[str, bytes], tokens: int, fill: bytes, recorded: dict[str, Any]) -> bytes:
    """What a record says, in small; ``info_of`` says the same."""
    parts = [_part(name, data) for name, data in files.items() if name != RECORD]
    told = {
        "backend": IDENTITY.backend,
        "kv_digest": IDENTITY.kv_digest,
        "prompt_format": IDENTITY.prompt_format,
        "window": WINDOW,
        "seen_tokens": tokens + SEEN_MORE,
        "turns": [{"turn_id": f"t-{n}"} for n in range(1, TURNS + 1)],
        "token_ids": bytes(4 * tokens),
        "parts": [asdict(part) for part in parts],
        "exact": True,
        "exact_reason": "",
        "answer_text": fill.decode(),
    }
    return msgspec.msgpack.encode({**told, **recorded})


def info_of(files: dict[str, bytes], **other: Any) -> SavedInfo:
    parts = tuple(_part(name, data) for name, data in files.items() if name != RECORD)
    given: dict[str, Any] = {
        "kind": "snapshot",
        "saved_id": "snap-0123456789abcdef",
        "label": "before lunch",
        "session_key": "",
        "model": "smol",
        "backend": "llama",
        "identity": IDENTITY,
        "record": RECORD,
        "record_bytes": len(files[RECORD]),
        "record_digest": files[RECORD][20:52].hex(),
        "parts": parts,
        "size_bytes": sum(map(len, files.values())),
        "tokens": parts[-1].end,
        "seen_tokens": parts[-1].end + SEEN_MORE,
        "turns": TURNS,
        "window": WINDOW,
        "k_type": "f16",
        "v_type": "f16",
        "exact": True,
        "exact_reason": "",
        "created_unix_ms": 1_700_000_000_000,
        "used_unix_ms": 1_700_000_000_000,
        "seconds": 0.25,
        "turn_ids": ("t-1", "t-2"),
        "prefix": (SegmentId("message", True, "task_pinned", "none", "h" * 64),),
        "tools": ('{"name": "grüße"}',),
        "suffix": (),
    }
    return SavedInfo(**{**given, **other})


def _part(name: str, data: bytes) -> SavedFile:
    _, begin, end = name.removesuffix(".kv").split("-")
    return SavedFile(name, int(begin), int(end), len(data), data[24:56].hex())


def committed(path: Path, tokens: int = 600, fill: bytes = b"kv", **other: Any) -> SavedInfo:
    """A folder with a whole saved session."""
    folder = SavedFolder(path)
    folder.create()
    info = info_of(write_files(path, tokens, fill), **other)
    folder.commit(info)
    return info
