"""The kernel's own counter of out-of-memory kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from modeld.supervisor.oom import oom_kills


def test_the_kernel_s_count_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 12\noom_kill 7\npgfault 3\n")
    assert oom_kills(tmp_path) == 7


@pytest.mark.parametrize("text", [None, "", "pgfault 3\n", "oom_kill x\n"])
def test_a_kernel_that_does_not_count_is_unknown_not_zero(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/vmstat").write_text(text)
    assert oom_kills(tmp_path) is None
