"""Snapshots that a live session can't be: refused by name, and it answers as if nothing had been.

On tiny models of both engines: missing, cut, of another model, of another template, of other KV
types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from modeld.client import Client, Session
from modeld.shared.errors import DigestMismatch, ManifestMismatch, ModeldError, SnapshotNotFound
from modeld.supervisor.saved_folder import SavedFolder, encode_info
from tests.support import openvino_models, tiny_models
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.product import Told, ask, system, user

BACKENDS = {"llama": ("q8_0", "f16"), "openvino": ("u8", "u8")}
MODELS = ("mine", "other", "templated")
PREFIX = [system("you answer in the order in which you were asked, and in nothing else. " * 3)]
FIRST = [user("what of the three things came before the others? " * 3)]


@dataclass(frozen=True)
class Place:
    backend: str
    daemon: RunningDaemon
    client: Client
    undisturbed: list[Told] = field(default_factory=list)

    def open(self, model: str = "mine", types: tuple[str, str] = ("f16", "f16")) -> Session:
        return self.client.open_session(
            model, model_type=self.backend, window=512, k_type=types[0], v_type=types[1]
        )

    def saved(self, model: str = "mine", types: tuple[str, str] = ("f16", "f16")) -> str:
        """A snapshot of a session that is closed."""
        with self.open(model, types) as session:
            first(session)
            return session.snapshot().snapshot_id


def first(session: Session) -> Told:
    return ask(session, PREFIX, FIRST, 6, ignore_eos=True)


def second(session: Session, before: Told) -> Told:
    again = [*FIRST, before.turn or "", user("and what then?")]
    return ask(session, PREFIX, again, 6, ignore_eos=True, top_logprobs=3)


def model_files(backend: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """The third has the first one's weights and tokenizer, and another chat template."""
    for number, name in enumerate(MODELS):
        seed, made = (2 if name == "other" else 1), folder / f"{number}"
        with pytest.MonkeyPatch.context() as patched:
            if name == "templated":
                other = tiny_models.TEMPLATE.replace("<|im_end|>\n", "<|im_end|> \n")
                assert other != tiny_models.TEMPLATE
                for module in (tiny_models, openvino_models):
                    patched.setattr(module, "TEMPLATE", other)
            if backend == "llama":
                path = made.with_suffix(".gguf")  # of heads long enough for quantised keys
                yield name, tiny_models.llama(path, heads=2, kv_heads=1, seed=seed)
            else:
                yield name, openvino_models.tiny_ir(made, seed=seed, layers=1)


@pytest.fixture(scope="module", params=BACKENDS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    backend, folder = request.param, tmp_path_factory.mktemp("models")
    with running_daemon(backend=backend) as daemon, daemon.client() as client:
        for name, path in model_files(backend, folder):
            client.import_model(path, name=name, model_type=backend)
        yield Place(backend, daemon, client)


Refused = Callable[[Place], tuple[str, type[ModeldError], str]]


def missing(_place: Place) -> tuple[str, type[ModeldError], str]:
    return "snap-0123456789abcdef", SnapshotNotFound, ""


def cut(place: Place, largest: bool = True) -> tuple[str, type[ModeldError], str]:
    made = place.saved()
    files = sorted(
        (place.daemon.data_root / "snapshots" / made).iterdir(), key=lambda f: f.stat().st_size
    )
    file = files[-1] if largest else next(f for f in files if f.name == "saved.json")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return made, DigestMismatch, ""


def cut_index(place: Place) -> tuple[str, type[ModeldError], str]:
    return cut(place, largest=False)


def foreign_model(place: Place) -> tuple[str, type[ModeldError], str]:
    return place.saved("other"), ManifestMismatch, "model_digest"


def other_template(place: Place) -> tuple[str, type[ModeldError], str]:
    return place.saved("templated"), ManifestMismatch, "model_digest"


def another_template_alone(place: Place) -> tuple[str, type[ModeldError], str]:
    """A file of a model brings its template with it, so this can only be made up."""
    made = place.saved()
    folder = SavedFolder(place.daemon.data_root / "snapshots" / made)
    saved = folder.require(made)
    identity = replace(saved.identity, prompt_template_digest="11" * 32)
    (folder.path / "saved.json").write_bytes(encode_info(replace(saved, identity=identity)))
    return made, ManifestMismatch, "prompt_template_digest"


def other_types(place: Place) -> tuple[str, type[ModeldError], str]:
    return place.saved(types=BACKENDS[place.backend]), ManifestMismatch, "kv_digest"


CASES = (
    missing, cut, cut_index, foreign_model, other_template, another_template_alone, other_types
)  # fmt: skip


@pytest.mark.parametrize("refused", CASES)
def test_a_restore_that_cannot_be_is_refused_and_the_live_session_is_unharmed(
    place: Place, refused: Refused
) -> None:
    made, error, differs = refused(place)
    if not place.undisturbed:
        with place.open() as other:
            place.undisturbed.append(second(other, first(other)))
            other.close(discard=True)
    (expected,) = place.undisturbed
    with place.open() as live:
        before = first(live)
        held = live.explain()
        with pytest.raises(error) as caught:
            live.restore(made)
        if differs:
            assert caught.value.metadata["field"] == differs
        assert live.explain().blocks == held.blocks
        told = second(live, before)
        assert (told.before.reused, told.after.reused) == (
            expected.before.reused, expected.after.reused,
        )  # fmt: skip
        assert told.before.reused + told.after.reused >= before.final.resident - 1
        assert (told.ids, told.logprobs) == (expected.ids, expected.logprobs)
        live.close(discard=True)
