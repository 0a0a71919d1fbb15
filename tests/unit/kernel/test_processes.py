"""Facts about single processes."""

from __future__ import annotations

import os

import pytest

from snapshotd.kernel import processes


def test_a_process_comes_from_its_parents() -> None:
    line = processes.ancestry(os.getpid())
    assert [number for number, _ in line[:2]] == [os.getpid(), os.getppid()]
    assert line[0][1] == processes.start_time(os.getpid())


def test_a_process_that_is_being_reaped_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says for a moment that it has no parent. Its line would end there, and nobody's would it be."""
    real = processes.stat_fields
    dying = 2**22 + 1

    def fields(pid: int) -> list[bytes]:
        return [b"X", b"0", *real(os.getpid())[2:]] if pid == dying else real(pid)

    monkeypatch.setattr(processes, "stat_fields", fields)
    with pytest.raises(ProcessLookupError):
        processes.ancestry(dying)
