"""LoRA adapters through the whole product: import, sessions, switching, the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modeld.client import (
    AdapterId,
    Client,
    InvalidRequest,
    ManifestMismatch,
    ModelLoadFailed,
    ModelNotFound,
    Session,
    SwitchRequired,
)
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.lora_files import gguf_names, merged, pairs_for, peft, rounded
from tests.support.openvino_models import LAYERS, converted, tiny_gguf

BASE, MERGED = "tiny", "tiny-merged"
SCALE, ALPHA, RANK = 0.25, 8.0, 4


@dataclass(frozen=True)
class Made:
    daemon: RunningDaemon
    client: Client
    adapter: AdapterId
    other: AdapterId


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("adapters")
    base = rounded(tiny_gguf(folder / "tiny.gguf"), folder / "base.gguf")
    pairs = pairs_for(base, gguf_names(LAYERS), RANK, seed=3)
    whole = merged(base, folder / "whole.gguf", pairs, SCALE * ALPHA / RANK)
    one, other = folder / "one.safetensors", folder / "other.safetensors"
    one.write_bytes(peft(pairs, alpha=ALPHA))
    other.write_bytes(peft(pairs_for(base, gguf_names(1), RANK, seed=9), alpha=ALPHA))
    with running_daemon(backends="openvino") as daemon, daemon.client() as client:
        client.import_model(converted(base, folder / "ir"), name=BASE)
        client.import_model(converted(whole, folder / "merged"), name=MERGED)
        first = client.import_model(one)
        second = client.import_model(other, model_type="adapter")
        yield Made(daemon, client, AdapterId(first.digest, SCALE), AdapterId(second.digest, SCALE))


@pytest.fixture(autouse=True)
def _nothing_resident(made: Made) -> None:
    made.client.unload_model(force=True)


def opened(made: Made, *adapters: AdapterId, model: str = BASE, key: str = "") -> Session:
    return made.client.open_session(
        model, model_type="openvino", prompt_format="raw",
        window=1024, session_key=key, adapters=adapters,
    )  # fmt: skip


def answer(session: Session) -> str:
    return session.turn([], ["The cat sat on the "], max_tokens=24, ignore_eos=True).read()


def test_a_session_with_an_adapter_answers_as_the_merged_model_does(made: Made) -> None:
    with opened(made, made.adapter) as session:
        with_adapter = answer(session)
        assert session.identity.adapters == (made.adapter,)
        assert session.capabilities["adapters"].answer == "yes"
        assert "14 weights" in session.capabilities["adapters"].evidence
        kv_digest = session.identity.kv_digest
    with opened(made) as session:
        assert session.identity.adapters == ()
        assert session.identity.kv_digest != kv_digest
        assert answer(session) != with_adapter
    with opened(made, model=MERGED) as session:
        assert answer(session) == with_adapter


def test_another_set_of_adapters_is_a_switch(made: Made) -> None:
    session = opened(made, made.adapter)
    generation = session.handle.generation
    for other in (
        (),
        (made.other,),
        (made.adapter, made.other),
        (AdapterId(made.adapter.digest, 1.0),),
    ):
        with pytest.raises(SwitchRequired) as error:
            opened(made, *other)
        assert error.value.metadata["resident_adapters"] == "one at 0.25"
    assert answer(session)
    again = opened(made, made.adapter)
    assert again.handle.generation == generation
    session.close()
    again.close()
    with opened(made, made.other) as switched:
        assert switched.handle.generation > generation


def test_a_key_is_of_one_set_of_adapters(made: Made) -> None:
    session = opened(made, made.adapter, key="k")
    session.detach()
    with pytest.raises(ManifestMismatch) as error:
        opened(made, key="k")
    assert error.value.metadata["field"] == "adapters"
    opened(made, made.adapter, key="k").close()


def test_what_asks_for_no_session_takes_the_model_as_it_is(made: Made) -> None:
    with opened(made, made.adapter) as session:
        before = session.handle.generation
        assert made.client.tokenize(BASE, "the cat").token_ids
        assert made.client.status().slots[0].generation == before


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(made: Made, scale: float) -> None:
    with pytest.raises(InvalidRequest, match="scale"):
        opened(made, AdapterId(made.adapter.digest, scale))


def test_unknown_and_repeated_adapters_are_refused(made: Made) -> None:
    with pytest.raises(ModelNotFound, match="one"):
        opened(made, AdapterId("0" * 64, 1.0))
    with pytest.raises(InvalidRequest, match="each adapter once"):
        opened(made, made.adapter, made.adapter)


def test_an_adapter_of_another_model_fails_by_name_and_leaves_the_slot_empty(
    made: Made, tmp_path: Path
) -> None:
    wider = rounded(tiny_gguf(tmp_path / "w.gguf", layers=3), tmp_path / "base.gguf")
    pairs = pairs_for(wider, gguf_names(3), RANK, seed=1)
    path = tmp_path / "wider.safetensors"
    path.write_bytes(peft(pairs, alpha=1))
    stored = made.client.import_model(path)
    with pytest.raises(ModelLoadFailed) as error:
        opened(made, AdapterId(stored.digest, 1.0))
    assert error.value.metadata["target"].startswith("model.layers.2.")
    made.client.remove_model("wider")
    with opened(made) as session:
        assert answer(session)


def test_a_resident_adapter_is_listed_so_and_stays(made: Made) -> None:
    with opened(made, made.adapter):
        found = {one.name: one for one in made.client.models()}
        assert (found["one"].type, found["one"].resident) == ("adapter", True)
        assert not found["other"].resident
        with pytest.raises(SwitchRequired):
            made.client.remove_model("one")


def test_run_takes_adapters_by_name(made: Made) -> None:
    def ask(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "modeld", "--data-root", str(made.daemon.data_root)]
        command += ["run", BASE, "The cat sat on the ", "--raw", "--max-tokens", "24", "--no-stats"]
        return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)

    done = ask("--adapter", f"one={SCALE}")
    assert done.returncode == 0, done.stderr
    with opened(made, made.adapter) as session:
        assert done.stdout.strip()
        assert answer(session).startswith(done.stdout.removesuffix("\n"))  # that ended at its end
    wrong = ask("--adapter", "ones")
    assert wrong.returncode != 0
    assert "Did you mean 'one'?" in wrong.stderr
    assert ask("--adapter", "one=much").returncode == 2
