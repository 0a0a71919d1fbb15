"""The archive of a COPY, written anew."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from snapshotd.integrations.e2b.control import building
from snapshotd.integrations.e2b.failures import WireError


def test_hard_links_become_files_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as made:
        one = tarfile.TarInfo("a")
        one.size = 5
        made.addfile(one, io.BytesIO(b"hello"))
        link = tarfile.TarInfo("b")
        link.type, link.linkname = tarfile.LNKTYPE, "a"
        made.addfile(link)
    out = io.BytesIO()
    building.move_members(archive, out, ".", "/to", True, "")
    out.seek(0)
    with tarfile.open(fileobj=out) as moved:
        told = [(item.name, content.read()) for item in moved if (content := moved.extractfile(item))]
    assert told == [("to/a", b"hello"), ("to/b", b"hello")]
    monkeypatch.setattr(building, "_COPY_MAX_BYTES", 9)
    with pytest.raises(WireError, match="4 GiB"):
        building.move_members(archive, io.BytesIO(), ".", "/to", True, "")
