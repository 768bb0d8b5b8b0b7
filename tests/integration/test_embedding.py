"""Embeddings through the whole product: a daemon, the OpenVINO worker, a client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from modeld.client import (
    Client,
    ContextOverflow,
    InvalidRequest,
    SwitchRequired,
    UnsupportedFeature,
)
from tests.support.daemon import running_daemon
from tests.support.openvino_embedder import MAX_TOKENS, WIDTH, TinyEmbedder, tiny_embedder
from tests.support.openvino_models import tiny_ir

EMBEDDER, GENERATOR = "tiny-embedder", "tiny-llama"
TEXTS = ["hello", "a", "the cat sat on the mat", "world"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    return tiny_embedder(tmp_path_factory.mktemp("embedder") / "tiny", pooling="cls")


@pytest.fixture(scope="module")
def embedding_client(
    made: TinyEmbedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    llama = tiny_ir(tmp_path_factory.mktemp("llama") / "ir")
    with running_daemon(backends="openvino") as daemon, daemon.client() as client:
        client.import_model(made.folder, name=EMBEDDER, model_type="openvino")
        client.import_model(llama, name=GENERATOR, model_type="openvino")
        yield client


@pytest.fixture(autouse=True)
def _nothing_resident(embedding_client: Client) -> None:
    embedding_client.unload_model(force=True)


def resident(client: Client) -> list[str]:
    return [slot.model for slot in client.status().slots if slot.model]


def test_a_call_loads_the_model_and_answers_its_vectors(
    embedding_client: Client, made: TinyEmbedder
) -> None:
    client = embedding_client
    found = client.embed(EMBEDDER, TEXTS)
    assert resident(client) == [EMBEDDER]
    assert (found.dimensions, found.pooling, found.normalized) == (WIDTH, "cls", True)
    for one, text in zip(found.embeddings, TEXTS, strict=True):
        ids = client.tokenize(EMBEDDER, text).token_ids
        assert one.tokens == len(ids)
        assert np.abs(np.array(one.values) - made.reference(ids, "cls")).max() < 1e-3
    raw = client.embed(EMBEDDER, TEXTS[0], pooling="mean", normalize=False)
    ids = client.tokenize(EMBEDDER, TEXTS[0]).token_ids
    expected = made.reference(ids, "mean", normalize=False)
    assert np.abs(np.array(raw.embeddings[0].values) - expected).max() < 1e-3


def test_callers_at_the_same_time_each_get_their_own_vectors(embedding_client: Client) -> None:
    texts = [[f"{'ab' * number} {number}"] * 3 for number in range(8)]
    alone = [embedding_client.embed(EMBEDDER, three).embeddings for three in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda three: embedding_client.embed(EMBEDDER, three), texts))
    for mine, theirs in zip(together, alone, strict=True):
        difference = np.array([one.values for one in mine.embeddings]) - [
            one.values for one in theirs
        ]
        assert np.abs(difference).max() < 1e-5


def test_a_session_with_an_embedding_model_is_refused_before_it_is_loaded(
    embedding_client: Client,
) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        embedding_client.open_session(EMBEDDER, model_type="openvino")
    assert caught.value.metadata["capability"] == "generate"
    assert resident(embedding_client) == []


def test_embedding_with_a_model_that_generates_is_refused_before_it_is_loaded(
    embedding_client: Client,
) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        embedding_client.embed(GENERATOR, "hello")
    assert caught.value.metadata["capability"] == "embed"
    assert resident(embedding_client) == []


def test_an_open_session_of_another_model_is_not_unloaded_for_it(embedding_client: Client) -> None:
    client = embedding_client
    with client.open_session(GENERATOR, model_type="openvino", window=128):
        with pytest.raises(SwitchRequired):
            client.embed(EMBEDDER, "hello")
        assert resident(client) == [GENERATOR]
    assert client.embed(EMBEDDER, "hello").dimensions == WIDTH
    assert resident(client) == [EMBEDDER]


def test_what_is_refused_names_the_text_and_costs_nothing(embedding_client: Client) -> None:
    client = embedding_client
    with pytest.raises(InvalidRequest) as empty:
        client.embed(EMBEDDER, ["a", ""])
    assert empty.value.metadata["field"] == "texts[1]"
    assert resident(client) == []  # known before a load
    with pytest.raises(ContextOverflow) as caught:
        client.embed(EMBEDDER, ["a", "b", "x" * (MAX_TOKENS + 1)])
    assert caught.value.metadata == {
        "index": "2",
        "tokens": str(MAX_TOKENS + 1),
        "max_tokens": str(MAX_TOKENS),
    }
    generation = client.status().slots[0].generation
    assert client.embed(EMBEDDER, ["a"]).dimensions == WIDTH
    assert client.status().slots[0].generation == generation


def test_describe_says_what_the_model_is_for(embedding_client: Client) -> None:
    client = embedding_client
    before = client.describe(EMBEDDER, model_type="openvino")
    assert before.resolution.kv_bytes == 0
    task = next(one for one in before.questions if one.name == "pipeline_supports_task")
    assert (task.answer, task.evidence[:6]) == ("unknown", "embed:")
    client.embed(EMBEDDER, "a")
    told = client.describe(EMBEDDER, model_type="openvino")
    answers = {capability.name: capability for capability in told.capabilities}
    assert (answers["embed"].answer, answers["generate"].answer) == ("yes", "no")
    assert f"{WIDTH} dimensions, up to {MAX_TOKENS} tokens" in answers["embed"].evidence
    task = next(one for one in told.questions if one.name == "pipeline_supports_task")
    assert (task.answer, task.evidence) == ("yes", "embed: loaded for it")
    assert told.facts.pooling == "cls"
    assert {run.kind for run in told.facts.layer_runs} == {"none"}
