"""What a newcomer gets wrong first, through the command itself: the answer says what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.cli.exit_codes import Exit
from tests.support.daemon import MODEL, RunningDaemon
from tests.support.faulting import DataRoot, data_root, modeld


@pytest.fixture
def empty() -> Iterator[DataRoot]:
    with data_root() as made:
        yield made


@pytest.fixture(scope="module")
def served(demo_model: Path) -> Iterator[DataRoot]:
    """A data root with a model and a running daemon."""
    with data_root(demo_model) as made:
        made.start().client().close()
        yield made


@pytest.fixture(params=["served", "alone"])
def store(request: pytest.FixtureRequest, served: DataRoot, empty: DataRoot) -> Path:
    """With a daemon and without: the same mistake gets the same answer."""
    return served.path if request.param == "served" else empty.path


def refuses_import(
    store: Path, file: Path, code: Exit = Exit.USAGE, reason: str = "INVALID_REQUEST"
) -> str:
    before = modeld(store, "models", "list", code=Exit.OK)
    told = modeld(store, "models", "import", str(file), code=code)
    assert reason in told
    assert modeld(store, "models", "list", code=Exit.OK) == before
    return told


def test_a_wrong_path_names_the_near_file(store: Path, tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m.gguf").write_bytes(b"GGUF")
    told = modeld(store, "models", "import", str(tmp_path / "smolm2-135m.gguf"), code=Exit.USAGE)
    assert "There is no such file" in told
    assert "Did you mean smollm2-135m.gguf?" in told


def test_a_folder_names_the_file_in_it(store: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    told = refuses_import(store, tmp_path)
    assert "It is a folder" in told
    assert "weights.gguf" in told


def test_a_truncated_model_is_told_as_such(store: Path, tmp_path: Path, demo_model: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with demo_model.open("rb") as whole:
        cut.write_bytes(whole.read(8 * 1024 * 1024))
    told = refuses_import(store, cut, Exit.WORKER, "MODEL_LOAD_FAILED")
    assert "it is truncated" in told
    assert "the file has 8388608" in told
    assert "Fetch or convert the file again" in told


def test_what_is_no_model_is_told_as_such(store: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("This is not a model at all, only a text of some length. " * 20)
    told = refuses_import(store, text, Exit.WORKER, "MODEL_LOAD_FAILED")
    assert "doesn't begin with the GGUF magic" in told
    assert "Fetch or convert the file again" in told


def test_an_empty_file_is_told_as_such(store: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing.gguf").touch()
    assert "empty" in refuses_import(store, tmp_path / "nothing.gguf")


def test_an_unknown_model_suggests_the_near_names(served: DataRoot) -> None:
    told = modeld(served.path, "run", "smoll", "Hello.", code=Exit.NOT_FOUND)
    assert "MODEL_NOT_FOUND" in told
    assert MODEL in told.replace("smoll", "")


def test_an_unknown_model_in_an_empty_store_says_how_to_get_one(empty: DataRoot) -> None:
    daemon = empty.start()
    daemon.client().close()
    told = modeld(empty.path, "run", "llama", "Hello.", code=Exit.NOT_FOUND)
    assert "import" in told


@pytest.mark.parametrize("command", [["status"], ["run", "--no-start", MODEL, "Hello."]])
def test_without_a_daemon_the_way_to_start_one_is_told(empty: DataRoot, command: list[str]) -> None:
    told = modeld(empty.path, *command, code=Exit.NO_DAEMON)
    assert "NOT_RUNNING" in told
    assert "modeld serve" in told
    assert str(empty.path) in told


def test_after_a_crash_status_says_that_a_start_takes_over(empty: DataRoot) -> None:
    daemon = empty.start()
    daemon.client().close()
    daemon.process.kill()
    daemon.process.wait()
    told = modeld(empty.path, "status", code=Exit.NO_DAEMON)
    assert "STALE" in told
    assert "modeld serve" in told


def test_a_second_daemon_names_the_first(served: DataRoot) -> None:
    daemon: RunningDaemon = served.daemons[0]
    told = modeld(served.path, "serve", code=Exit.REFUSED)
    assert f"pid {daemon.process.pid}" in told
    assert "modeld drain" in told
    assert "--data-root" in told


def test_a_port_in_use_says_what_to_do(empty: DataRoot) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = modeld(empty.path, "serve", "--listen", address, code=Exit.USAGE)
    assert address in told
    assert "Address already in use" in told
    assert "choose another port" in told
    assert not (empty.path / "modeld.lease").exists()


def test_a_public_address_without_tls_is_refused(empty: DataRoot) -> None:
    told = modeld(empty.path, "serve", "--listen", "0.0.0.0:7000", code=Exit.USAGE)
    assert "TLS" in told
    assert "127.0.0.1" in told


def test_a_data_root_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    # Not even root may make a folder there.
    told = modeld(Path("/proc/modeld"), "serve", code=Exit.USAGE)
    assert "data_root" in told
    assert "a folder that this user can write" in told
    assert "--data-root" in told


def test_a_data_root_that_is_a_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = modeld(tmp_path / "file", "serve", code=Exit.USAGE)
    assert "file" in told


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ('threads = 2\nidle_release_s = "soon"\n', 2, ["idle_release_s", "seconds"]),
        ("# mine\n\nthreds = 4\n", 3, ["threds", "Did you mean 'threads'?"]),
        ("lease_ttl_s = 1\n", 1, ["lease_ttl_s", "from 3 to 3600"]),
        ("threads = \n", 1, ["not valid TOML"]),
    ],
    ids=["type", "name", "range", "syntax"],
)
def test_a_bad_setting_names_file_and_line(
    empty: DataRoot, text: str, line: int, parts: list[str]
) -> None:
    file = empty.path / "modeld.toml"
    file.write_text(text)
    told = modeld(empty.path, "serve", code=Exit.USAGE)
    assert str(file) in told
    assert f"line {line}" in told
    for part in parts:
        assert part in told


def test_a_bad_variable_and_a_bad_flag_are_named(empty: DataRoot) -> None:
    told = modeld(empty.path, "serve", code=Exit.USAGE, env={"MODELD_THREADS": "many"})
    assert "MODELD_THREADS" in told
    told = modeld(empty.path, "serve", "--threads=many", code=Exit.USAGE)
    assert "--threads" in told
    assert "a whole number" in told
