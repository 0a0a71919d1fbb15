"""The folder that a scorer brings, as a tar in a request."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path

import pytest

from snapshotd.api.wire import FILES_MAX_BYTES, WITH_FILES_MAX_BYTES
from snapshotd.client.local.scorer_files import folder_b64
from snapshotd.errors import LimitExceeded, UsageError


def test_it_belongs_to_root_and_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "check.py").write_text("pass\n")
    (tmp_path / "deep" / "check.py").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(folder_b64(tmp_path)))) as tar:
        found = {item.name: item for item in tar}
        assert {(item.uid, item.gid, item.uname, item.gname) for item in found.values()} == {(0, 0, "", "")}
        assert found["./link"].linkname == "/etc/passwd"
        assert found["./deep/check.py"].mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        folder_b64(tmp_path / "absent")
    with open(tmp_path / "large", "wb") as file:
        os.truncate(file.fileno(), FILES_MAX_BYTES - 1024)
    with pytest.raises(LimitExceeded, match="more than 16 MiB"):
        folder_b64(tmp_path)
    assert FILES_MAX_BYTES * 4 / 3 < WITH_FILES_MAX_BYTES - (8 << 20), "the rest of a request has room beside it"
