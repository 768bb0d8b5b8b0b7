"""What clients do to go back, on models whose memory can't; and models that only embed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from modeld.client import Client, Session, UnsupportedFeature
from modeld.client.values import MissReason
from tests.support import tiny_models
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.product import Told, go_on

EMBEDDER = "embedder"
_write_header = GGUFWriter.write_header_to_file
SIZE, KEEPS = 980, (970, 300, 1)  # tokens
# By how much an answer's first row may be off; and where a window's cells are lost.
KINDS: dict[str, tuple[float, tuple[int, ...]]] = {
    "gemma3": (5e-3, (300, 1)), "jamba": (0.0, KEEPS),
}  # fmt: skip


def write_not_causal(writer: GGUFWriter) -> None:
    writer.add_causal_attention(False)
    _write_header(writer)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    with running_daemon() as daemon:
        with daemon.client() as client:
            for kind in KINDS:
                path = getattr(tiny_models, kind)(folder / f"{kind}.gguf")
                client.import_model(path, name=kind, model_type="llama")
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(GGUFWriter, "write_header_to_file", write_not_causal)
                path = tiny_models.llama(folder / "embedder.gguf")
            client.import_model(path, name=EMBEDDER, model_type="llama")
        yield daemon


@pytest.fixture
def mixed_client(mixed: RunningDaemon) -> Iterator[Client]:
    with mixed.client() as client:
        yield client
        client.unload_model(force=True)


def text(seed: int, size: int) -> str:
    """So many tokens: letters that never merge."""
    letters = "bcfgjklmpqrvwxyz0123456789"
    return "".join(letters[i] for i in np.random.default_rng(seed).integers(0, len(letters), size))


def answer(session: Session) -> Told:
    return go_on(session, 6, top_logprobs=3, ignore_eos=True)


def check(told: Told, expected: Told, off: float) -> float:
    if not off:
        assert told.ids == expected.ids
        assert told.logprobs == expected.logprobs
    first = [
        np.array([step.logprob for step in one.logprobs[0].top]) for one in (told, expected)
    ]  # fmt: skip
    difference = float(np.abs(first[0] - first[1]).max())
    assert difference <= off
    return difference


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_goes_back_is_answered_as_by_a_session_that_held_nothing(
    mixed_client: Client, kind: str
) -> None:
    off, refused = KINDS[kind]

    def opened() -> Session:
        return mixed_client.open_session(kind, window=1024, prompt_format="raw")

    session = opened()
    for keep in KEEPS:
        whole = text(keep, SIZE)
        session.ensure_prefix(whole)
        answer(session)
        branch = session.fork()
        kept = session.snapshot()
        other = whole[:keep] + text(0, 30)
        told = session.ensure_prefix(other)
        assert told.reused + told.prefilled == len(other)
        if keep in refused:
            assert (told.reused, told.miss_reason) == (0, MissReason.CANNOT_TRIM)
        else:
            assert told.reused == keep
        mine = answer(session)
        branched = branch.ensure_prefix(other + "b")  # or it were copied from the other
        assert branched.reused in (0, keep, len(other))
        branch.close(discard=True)
        session.restore(kept.snapshot_id)
        mixed_client.delete_snapshot(kept.snapshot_id)
        back = session.ensure_prefix(other)
        assert back.reused in (0, keep)
        again = answer(session)
        session.close(discard=True)
        session = opened()
        assert session.ensure_prefix(other).reused == 0
        expected = answer(session)
        offs = [check(mine, expected, off), check(again, expected, off)]
        print(kind, keep, told.reused, back.reused, offs)


def test_a_model_that_embeds_opens_no_session_to_go_back_in(mixed_client: Client) -> None:
    opens: list[dict[str, Any]] = [
        {}, {"window": 1024, "overflow": "evict"}, {"session_key": "kept", "durable": True},
        {"layout": "batched"},
    ]  # fmt: skip
    for options in opens:
        with pytest.raises(UnsupportedFeature, match=r"embedding model\. Open") as refused:
            mixed_client.open_session(EMBEDDER, model_type="llama", **options)
        assert refused.value.metadata["capability"] == "generate", refused.value
    assert not mixed_client.sessions()
