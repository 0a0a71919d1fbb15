"""Facts about single processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.kernel import processes


def test_a_process_comes_from_its_parents() -> None:
    line = processes.ancestry(os.getpid())
    assert [number for number, _ in line[:2]] == [os.getpid(), os.getppid()]
    assert line[0][1] == processes.start_time(os.getpid())


@pytest.mark.parametrize("state", ["X", "Z"])
def test_a_process_that_is_being_reaped_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str) -> None:
    """The kernel says for a moment that it has no parent. Its line would end there, and nobody's would it be. The text is
    one that a kernel gave while a parent waited for its child; the race itself is seldom."""
    (tmp_path / "stat").write_text(f"7 (name) {state} 0 -1 -1 0 -1 4228108 " + "0 " * 43)
    monkeypatch.setattr(processes, "open", lambda *_: (tmp_path / "stat").open("rb"), raising=False)
    with pytest.raises(ProcessLookupError):
        processes.ancestry(7)
