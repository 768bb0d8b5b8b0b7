"""What a worker's environment says of the engine's threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from modeld.supervisor.launcher import LocalLauncher, SpawnSpec

SPEC = SpawnSpec("llama", "ipc:///nowhere", b"\x01", "owner", 1.0)


async def environment(tmp_path: Path) -> dict[str, str]:
    """Of a program that is started as a worker is."""
    told, program = tmp_path / "environment", tmp_path / "program"
    program.write_text(f"#!/bin/sh\nenv > {told}\n")
    program.chmod(0o700)
    process = await LocalLauncher("any", tmp_path, python=str(program)).spawn(SPEC)
    assert await process.exit == 0
    return dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)


async def test_the_engine_s_threads_spin_for_a_moment_and_then_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    env = await environment(tmp_path)
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("passive", "1000")


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"OMP_WAIT_POLICY": "passive"}, None),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
    ],
)
async def test_a_user_s_own_setting_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    env = await environment(tmp_path)
    assert env["OMP_WAIT_POLICY"] == given.get("OMP_WAIT_POLICY", "passive")
    assert env.get("GOMP_SPINCOUNT") == spins
