"""An import whose sender stops in its midst: given up by the daemon, and told by the command."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

from modeld.cli.exit_codes import Exit
from modeld.client import Client
from modeld.client.convert import from_proto
from modeld.client.snapshot_file import SnapshotWriter
from modeld.client.values_residency import SnapshotChunk, SnapshotInfo
from modeld.supervisor.rpc.snapshot_calls import snapshot_info
from modeld.supervisor.saved_folder import SavedFolder
from modeld.supervisor.snapshot_transfer import pieces_of
from tests.support.daemon import REPOSITORY, eventually, running_daemon
from tests.support.saved_files import IDENTITY, RECORD, committed

TOKENS = 30_000  # so that more is sent than is on its way at once


def exported(folder: Path, client: Client) -> Path:
    """A file as of a session of this daemon's engine."""
    eventually(lambda: client.status().slots[0].worker.backend_version)
    version = client.status().slots[0].worker.backend_version
    info = committed(
        folder / "made", TOKENS, identity=replace(IDENTITY, backend_version=version), model="m"
    )
    told = from_proto(SnapshotInfo, snapshot_info(info))
    with SnapshotWriter(folder / "s.tar", info.saved_id) as writer:
        for piece in pieces_of(SavedFolder(folder / "made"), info, 1 << 20):
            writer.take(SnapshotChunk(told, piece.offset, piece.data, piece.file))
        writer.finish()
    return folder / "s.tar"


def test_an_import_from_a_pipe_that_brings_no_more_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with running_daemon(stall_limit_s=0.5) as daemon, daemon.client() as client:
        file = exported(tmp_path, client)
        with tarfile.open(file) as archive:
            half = archive.getmember(RECORD).offset_data + 1000
        words = ("-m", "modeld", "--data-root", str(daemon.data_root), "snapshots", "import", "-")
        with subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
        ) as command:
            assert command.stdin is not None
            command.stdin.write(file.read_bytes()[:half])
            command.stdin.flush()
            assert command.wait(60) == Exit.USAGE  # while the pipe is open
            assert command.stderr is not None
            said = command.stderr.read().decode()
        assert "nothing for 0.5 s" in said
        assert "Fatal" not in said
        assert list((daemon.data_root / "snapshots").iterdir()) == []
        assert client.list_snapshots().used_bytes == 0
        assert client.import_snapshot(file).tokens == TOKENS
