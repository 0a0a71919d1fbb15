"""The record of who did what."""

from __future__ import annotations

from pathlib import Path

from snapshotd.daemon.access.audit import PATH_CHARS, STRANGERS_BURST, Audit, read_audit


def test_callers_without_a_token_push_nothing_out(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for _ in range(1000):
        audit.add(None, "10.0.0.9", "GET", "/" + "a" * 5000, None, 401)
    audit.close()
    found = read_audit(tmp_path, 2000)
    assert STRANGERS_BURST <= len(found) < 100
    assert max(len(one["operation"]) for one in found) < PATH_CHARS + 40
