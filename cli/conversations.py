"""What `--session KEY` of `run` and `chat` remembers: one small private file a key.

Text is kept so that a conversation outlives any session; ids are kept so that, while the session
lives, the answers are referred to as they were sampled.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modeld.client import (
    GeneratedTurn,
    Image,
    InvalidRequest,
    Message,
    Session,
    Text,
    TurnStream,
)
from modeld.shared.errors import StorageFull
from modeld.shared.ids import check_session_key

VERSION = 1


@dataclass
class Exchange:
    """One question and its answer. ``turn_id`` is "" for an answer that was cut off."""

    user: str
    answer: str
    turn_id: str = ""
    session_id: str = ""
    images: list[str] = field(default_factory=list)  # base64, before the question

    def shown(self) -> list[Image]:
        """Raises ValueError for what isn't base64."""
        return [Image.from_bytes(base64.b64decode(text, validate=True)) for text in self.images]


def encoded(images: Sequence[Image]) -> list[str]:
    """Images in the form that an exchange keeps."""
    return [base64.b64encode(image.data).decode() for image in images]


@dataclass
class Conversation:
    """A transcript; ``system`` is what stands before the first exchange.

    From ``overflow`` on it is how its session is opened where the caller doesn't say.
    """

    prompt_format: str
    model: str = ""  # "": kept by a version that didn't say
    system: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    overflow: str = "refuse"
    durable: bool = False
    k_type: str = ""  # "": the daemon's
    v_type: str = ""
    layout: str = "isolated"
    profile_id: str = ""
    window: int = 0  # tokens; 0: chosen by what memory allows

    def opening(self) -> dict[str, Any]:
        """How its session is opened, as options of ``open_session``."""
        names = ("window", "overflow", "durable", "k_type", "v_type", "layout", "profile_id")
        return {name: getattr(self, name) for name in names}

    def items(self) -> list[Message | GeneratedTurn | Text]:
        """All that was said as a prompt's pieces, what the model is told first included."""
        raw = self.prompt_format == "raw"
        found: list[Message | GeneratedTurn | Text] = []
        if raw:
            found += [Text(part) for part in self.system]
        elif self.system:
            parts = [piece for part in self.system for piece in ("\n\n", part)][1:]
            found.append(Message("system", tuple(parts)))
        for each in self.exchanges:
            found.append(Text(each.user) if raw else Message.user(each.user, each.shown()))
            if each.turn_id:
                found.append(GeneratedTurn(each.turn_id, each.session_id, each.answer))
            else:
                found.append(Text(each.answer) if raw else Message("assistant", each.answer))
        return found

    def add(self, text: str, images: Sequence[Image], stream: TurnStream) -> bool:
        """Take an exchange, however it ended; False where there was no answer at all."""
        if not (stream.final or stream.text):
            return False
        turn = stream.generated_turn
        self.exchanges.append(
            Exchange(
                user=text,
                answer=stream.text,
                turn_id=turn.turn_id if turn else "",
                session_id=turn.session_id if turn else "",
                images=encoded(images),
            )
        )
        return True

    def follow(self, session: Session) -> None:
        """Answers of an earlier session that a durable one brought back are this one's now."""
        resumed = session.opened.resumed
        known = set(resumed.generated_turn_ids) if resumed is not None else set()
        self.moved(known, session.handle.session_id)

    def moved(self, turn_ids: set[str], session_id: str) -> None:
        for exchange in self.exchanges:
            if exchange.turn_id in turn_ids:
                exchange.session_id = session_id

    def back_to(self, turn_ids: set[str], session_id: str) -> int:
        """Be what a session is that was brought back with these answers; how many exchanges went.

        None goes where the session has none of its answers: its text is sent anew then.
        """
        known = [n for n, exchange in enumerate(self.exchanges) if exchange.turn_id in turn_ids]
        later = len(self.exchanges) - known[-1] - 1 if known else 0
        del self.exchanges[len(self.exchanges) - later :]
        for exchange in self.exchanges:
            if exchange.turn_id not in turn_ids:
                exchange.turn_id = ""
        self.moved(turn_ids, session_id)
        return later


def path_of(data_root: Path, key: str) -> Path:
    """Raises InvalidRequest for what isn't a session key."""
    check_session_key(key)
    return data_root / "conversations" / f"{key}.json"


def load(data_root: Path, key: str, prompt_format: str, model: str) -> Conversation:
    """The conversation kept under a key, or a new one.

    Raises InvalidRequest where the file can't be understood, or is of another prompt format or
    model.
    """
    path = path_of(data_root, key)
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Conversation(prompt_format, model)
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from None
    try:
        if data["version"] != VERSION:
            raise _unusable(path, f"it is of version {data['version']}")
        kept = Conversation(
            data["prompt_format"],
            str(data.get("model", "")) or model,
            [str(text) for text in data["system"]],
            [Exchange(**exchange) for exchange in data["exchanges"]],
            str(data.get("overflow", "refuse")),
            bool(data.get("durable", False)),
            str(data.get("k_type", "")),
            str(data.get("v_type", "")),
            str(data.get("layout", "isolated")),
            str(data.get("profile_id", "")),
            int(data.get("window", 0)),
        )
        for exchange in kept.exchanges:
            exchange.shown()
    except (KeyError, TypeError) as error:
        raise _unusable(path, f"it lacks {error}") from None
    except ValueError as error:
        raise _unusable(path, f"an image in it is damaged ({error})") from None
    if kept.prompt_format != prompt_format:
        raise InvalidRequest.of(
            "session",
            key,
            f"a key of a {prompt_format} conversation",
            f"What is kept under it is {kept.prompt_format}. Take another key, or remove {path}.",
        )
    if kept.model != model:
        raise InvalidRequest.of(
            "session",
            key,
            f"a key of a conversation with {model}",
            f"What is kept under it was held with {kept.model}. Go on with {kept.model}, take "
            f"another key, or remove {path}.",
        )
    return kept


def with_answer(
    data_root: Path, turn_id: str, prompt_format: str, model: str
) -> tuple[Path, Conversation] | None:
    """The conversation with a model that has an answer, and where it is kept."""
    for path in sorted((data_root / "conversations").glob("*.json")):
        with contextlib.suppress(InvalidRequest):
            kept = load(data_root, path.stem, prompt_format, model)
            if any(exchange.turn_id == turn_id for exchange in kept.exchanges):
                return path, kept
    return None


def save(data_root: Path, key: str, conversation: Conversation) -> None:
    """Replace the file in one step; only its owner can read it."""
    path = path_of(data_root, key)
    try:
        _write(path, conversation)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"No space left to keep the conversation at {path}: this exchange isn't in it. "
                "Free some space.",
                metadata={"path": path},
            ) from None
        raise _unusable(path, error.strerror or str(error)) from None


def _write(path: Path, conversation: Conversation) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {"version": VERSION, "saved_unix_s": int(time.time()), **asdict(conversation)}
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _unusable(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The conversation file {path} can't be used: {why}. Remove it, or take another key.",
        metadata={"field": "session", "path": path},
    )
