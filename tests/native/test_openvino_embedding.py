"""Embeddings on the OpenVINO engine, held against the same model computed in numpy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openvino_genai
import pytest

from modeld.shared.capacity import MemorySnapshot
from modeld.shared.embedding import MAX_TEXT_BYTES, MAX_TEXTS, POOLINGS
from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotActive,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    EmbedOp,
    EmbedResult,
    LoadOp,
    LoadResult,
    OpenOp,
    TokenizeOp,
    TokenizeResult,
)
from modeld.workers.core import SessionCore
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino.embedding import BATCH_TEXTS, BATCH_TOKENS, batches
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support.core_harness import FakeOp
from tests.support.openvino_embedder import MAX_TOKENS, WIDTH, TinyEmbedder, tiny_embedder
from tests.support.openvino_models import tiny_ir

BEFORE, BEHIND = 1, 2
# Of different lengths and of equal ones, so that batches form, and out of order.
TEXTS = ["hello", "a", "the cat sat on the mat", "world", "x" * (MAX_TOKENS - 2), "b", "other"]


class Worker:
    """A session core with a model loaded."""

    def __init__(self, folder: Path, guard: MemoryGuard | None = None) -> None:
        self.core = SessionCore(OpenVinoEngine(guard))
        result = self.core.handle(
            LoadOp(path=str(folder), model="tiny", digest="d", threads=2, quality=True), FakeOp()
        )
        assert isinstance(result, LoadResult)
        self.loaded = result

    def embed(
        self,
        texts: Sequence[str],
        pooling: str = "",
        *,
        normalize: bool = True,
        op: FakeOp | None = None,
    ) -> EmbedResult:
        request = EmbedOp(texts=list(texts), pooling=pooling, normalize=normalize)
        result = self.core.handle(request, op or FakeOp())
        assert isinstance(result, EmbedResult)
        return result

    def vectors(
        self, texts: Sequence[str], pooling: str = "", *, normalize: bool = True
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        result = self.embed(texts, pooling, normalize=normalize)
        assert result.dimensions == WIDTH
        return np.frombuffer(result.vectors, dtype="<f4").reshape(len(texts), WIDTH)

    def ids(self, text: str) -> list[int]:
        plain = self.core.handle(
            TokenizeOp(text=text, parse_special=False, add_bos=False), FakeOp()
        )
        assert isinstance(plain, TokenizeResult)
        return [BEFORE, *plain.ids, BEHIND]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    return tiny_embedder(tmp_path_factory.mktemp("embedder") / "tiny", around=(BEFORE, BEHIND))


@pytest.fixture(scope="module")
def worker(made: TinyEmbedder) -> Iterator[Worker]:
    worker = Worker(made.folder)
    yield worker
    worker.core.close()


@pytest.fixture
def copied(made: TinyEmbedder, tmp_path: Path) -> Path:
    """A copy whose files may be changed."""
    return shutil.copytree(made.folder, tmp_path / "copy")


# --- the vectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_what_numpy_computes(
    made: TinyEmbedder, worker: Worker, pooling: str, normalize: bool
) -> None:
    expected = np.stack(
        [made.reference(worker.ids(text), pooling, normalize=normalize) for text in TEXTS]
    )
    found = worker.vectors(TEXTS, pooling, normalize=normalize)
    assert np.abs(found - expected).max() < 1e-3
    if normalize:
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    # The check can fail: another pooling's vectors are nowhere near.
    other = POOLINGS[POOLINGS.index(pooling) - 1]
    assert np.abs(worker.vectors(TEXTS, other, normalize=normalize) - expected).max() > 0.1


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_has_the_same_vector_alone_and_among_others(worker: Worker, pooling: str) -> None:
    together = worker.vectors(TEXTS, pooling)
    for row, text in enumerate(TEXTS):
        assert np.abs(worker.vectors([text], pooling)[0] - together[row]).max() < 1e-5


@pytest.mark.parametrize(
    ("pooling", "theirs"), [("mean", "MEAN"), ("cls", "CLS"), ("last", "LAST_TOKEN")]
)
def test_vectors_are_those_of_genais_own_pipeline(
    made: TinyEmbedder, worker: Worker, pooling: str, theirs: str
) -> None:
    pipeline = openvino_genai.TextEmbeddingPipeline(
        str(made.folder),
        "CPU",
        pooling_type=getattr(openvino_genai.TextEmbeddingPipeline.PoolingType, theirs),
        normalize=True,
        INFERENCE_PRECISION_HINT="f32",
    )
    expected = np.array([pipeline.embed_query(text) for text in TEXTS])
    assert np.abs(worker.vectors(TEXTS, pooling) - expected).max() < 1e-5


def test_a_model_that_declares_its_pooling_uses_it_unless_asked_otherwise(copied: Path) -> None:
    (copied / "1_Pooling").mkdir()
    (copied / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    worker = Worker(copied)
    assert "cls pooling" in worker.loaded.capabilities["embed"]
    assert worker.embed(["hello"]).pooling == "cls"
    assert np.array_equal(worker.vectors(["hello"]), worker.vectors(["hello"], "cls"))
    assert worker.embed(["hello"], "last").pooling == "last"


def test_a_pooling_that_is_declared_but_not_served_must_be_named_otherwise(copied: Path) -> None:
    (copied / "1_Pooling").mkdir()
    (copied / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    worker = Worker(copied)
    with pytest.raises(InvalidRequest, match="declares 'max': name one"):
        worker.embed(["hello"])
    assert worker.embed(["hello"], "mean").pooling == "mean"


# --- tokens --------------------------------------------------------------------------------------


def test_tokens_are_counted_with_those_that_the_tokenizer_puts_around(worker: Worker) -> None:
    assert worker.embed(TEXTS).tokens == [len(worker.ids(text)) for text in TEXTS]
    assert worker.embed(["ab"]).tokens == [4]


def test_the_longest_text_is_taken_and_one_token_more_is_refused(worker: Worker) -> None:
    assert worker.embed(["x" * (MAX_TOKENS - 2)]).tokens == [MAX_TOKENS]
    with pytest.raises(ContextOverflow, match=r"65 tokens, and 64 are taken") as caught:
        worker.embed(["short", "x" * (MAX_TOKENS - 1), "short"])
    assert caught.value.metadata == {"index": "1", "tokens": "65", "max_tokens": "64"}


def test_a_tokenizer_that_cuts_texts_lowers_the_ceiling_instead(tmp_path: Path) -> None:
    """One made from a GGUF file cuts at 8,192 tokens without a word."""
    worker = Worker(tiny_embedder(tmp_path / "long", max_tokens=10_000).folder)
    assert "up to 8191 tokens" in worker.loaded.capabilities["embed"]
    assert worker.embed(["x" * 8191]).tokens == [8191]
    with pytest.raises(ContextOverflow) as caught:
        worker.embed(["x" * 9000])
    assert caught.value.metadata["max_tokens"] == "8191"


def test_families_that_number_positions_from_the_padding_on_take_fewer(copied: Path) -> None:
    text = (copied / "config.json").read_text()
    (copied / "config.json").write_text(text.replace('"bert"', '"xlm-roberta", "pad_token_id": 1'))
    worker = Worker(copied)
    assert worker.embed(["x" * (MAX_TOKENS - 4)]).tokens == [MAX_TOKENS - 2]
    with pytest.raises(ContextOverflow, match=f"{MAX_TOKENS - 2} are taken"):
        worker.embed(["x" * (MAX_TOKENS - 3)])


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ([], "texts"),
        (["a"] * (MAX_TEXTS + 1), "texts"),
        (["fine", ""], "texts[1]"),
        (["fine", "a" * (MAX_TEXT_BYTES + 1)], "texts[1]"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_index(
    worker: Worker, texts: list[str], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        worker.embed(texts)
    assert caught.value.metadata["field"] == field
    assert not worker.embed(["fine"]).cancelled  # nothing is lost


def test_an_unknown_pooling_is_refused(worker: Worker) -> None:
    with pytest.raises(InvalidRequest, match="mean, cls, last"):
        worker.embed(["a"], "max")


def test_a_token_that_the_model_lacks_is_refused(copied: Path) -> None:
    text = (copied / "config.json").read_text()
    (copied / "config.json").write_text(text.replace('"vocab_size": 282', '"vocab_size": 50'))
    worker = Worker(copied)
    with pytest.raises(InvalidRequest, match="knows more than the model"):
        worker.embed(["a"])


# --- batches, cancelling, memory -----------------------------------------------------------------


def test_batches_hold_rows_of_one_length_within_their_bounds() -> None:
    lengths = [3, 2000, 3, 1, *[40] * 60, *[1] * 100, 2000, 512, 512, 512]
    found = batches([np.zeros(length, dtype=np.int64) for length in lengths])
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        assert len({lengths[index] for index in batch}) == 1
        tokens = sum(lengths[index] for index in batch)
        assert len(batch) == 1 or (len(batch) <= BATCH_TEXTS and tokens <= BATCH_TOKENS)
    assert len(found) == 4 + 1 + 2 + 3 + 2  # of 1, 3, 40 (25 fit), 512 (two fit), 2000


def test_many_texts_come_back_in_their_order(worker: Worker) -> None:
    texts = [f"{'ab' * (number % 7)}{number}" for number in range(200)]
    result = worker.embed(texts)
    found = np.frombuffer(result.vectors, dtype="<f4").reshape(len(texts), WIDTH)
    for row in range(0, 200, 23):
        assert np.abs(worker.vectors([texts[row]])[0] - found[row]).max() < 1e-5


def test_progress_is_told_for_each_batch_and_a_cancel_stops_between_them(worker: Worker) -> None:
    texts = ["x" * (MAX_TOKENS - 2)] * 64  # more tokens than go in one batch
    op = FakeOp()
    worker.embed(texts, op=op)
    assert op.beats == 64 * MAX_TOKENS // BATCH_TOKENS
    stopped = FakeOp(cancel_at=3)  # while texts are being tokenized
    result = worker.embed(texts, op=stopped)
    assert (result.cancelled, result.vectors, stopped.beats) == (True, b"", 0)
    assert not worker.embed(["after"]).cancelled


def test_without_memory_for_a_batch_the_call_is_refused_with_numbers(made: TinyEmbedder) -> None:
    free = 1 << 40

    def read() -> MemorySnapshot:
        return MemorySnapshot(total_bytes=1 << 40, available_bytes=free)

    worker = Worker(made.folder, MemoryGuard(read))
    free = 1000
    with pytest.raises(InsufficientMemory, match="activations") as caught:
        worker.embed(["hello"])
    assert int(caught.value.metadata["needed_bytes"]) > 1000
    free = 1 << 40
    assert len(worker.embed(["hello"]).vectors) == 4 * WIDTH


# --- what is loaded ------------------------------------------------------------------------------


def test_an_embedding_model_says_that_it_embeds_and_does_not_generate(worker: Worker) -> None:
    loaded = worker.loaded
    assert loaded.executor == "embedding"
    assert loaded.capabilities["embed"].startswith("yes: computed at load, beside another as alone")
    assert loaded.capabilities["generate"].startswith("no: ")
    assert loaded.quality is None  # asked for, and there is nothing to sample
    with pytest.raises(UnsupportedFeature) as caught:
        worker.core.handle(
            OpenOp(
                session_id="s",
                prompt_format="raw",
                window=32,
                k_type="f16",
                v_type="f16",
                kv_digest="k",
                runtime_digest="r",
            ),
            FakeOp(),
        )
    assert caught.value.metadata["capability"] == "generate"


def test_a_model_that_generates_does_not_embed(tmp_path: Path) -> None:
    worker = Worker(tiny_ir(tmp_path / "llama"))
    with pytest.raises(UnsupportedFeature, match="generates") as caught:
        worker.embed(["hello"])
    assert caught.value.metadata["capability"] == "embed"


def test_a_folder_without_a_tokenizer_is_refused_and_leaves_nothing_loaded(copied: Path) -> None:
    (copied / "openvino_tokenizer.xml").unlink()
    core = SessionCore(OpenVinoEngine())
    with pytest.raises(ModelLoadFailed):
        core.handle(LoadOp(path=str(copied), model="tiny", digest="d", threads=2), FakeOp())
    with pytest.raises(ModelNotActive):
        core.handle(EmbedOp(texts=["a"]), FakeOp())


def test_a_model_of_fixed_shape_is_refused_when_it_is_loaded(copied: Path) -> None:
    import openvino

    model = openvino.Core().read_model(str(copied / "openvino_model.xml"))
    model.reshape({port.get_any_name(): [1, 16] for port in model.inputs})
    openvino.save_model(model, str(copied / "fixed.xml"))
    del model
    for suffix in (".xml", ".bin"):
        (copied / f"fixed{suffix}").replace(copied / f"openvino_model{suffix}")
    with pytest.raises(ModelLoadFailed, match="dynamic shapes"):
        Worker(copied)
