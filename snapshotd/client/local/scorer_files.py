"""The folder of this machine that a scorer brings, as a request takes it."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

from snapshotd.api.wire import FILES_MAX_BYTES
from snapshotd.errors import LimitExceeded, UsageError


def folder_b64(folder: str | Path) -> str:
    """The folder's content as a tar, owned by root in it, in base64. UsageError: it cannot be read. LimitExceeded: it is
    too large."""
    if not Path(folder).is_dir():
        raise UsageError(f"the scorer's folder {folder} is no folder; name one that holds its files")
    made = _Bounded(folder)
    try:
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.add(folder, arcname=".", filter=_give_to_root)
    except OSError as exc:
        raise UsageError(f"the scorer's folder {folder} cannot be read: {exc.strerror}: {exc.filename}") from exc
    return base64.b64encode(made.getbuffer()).decode()


class _Bounded(io.BytesIO):
    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = folder

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        if self.tell() + len(data) > FILES_MAX_BYTES:
            raise LimitExceeded(
                f"the scorer's folder {self._folder} has more than {FILES_MAX_BYTES >> 20} MiB; leave out what the score "
                "does not need"
            )
        return super().write(data)


def _give_to_root(item: tarfile.TarInfo) -> tarfile.TarInfo:
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    return item
