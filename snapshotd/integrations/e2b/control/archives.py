"""Archives that clients upload for the steps of their builds. They stay until the server ends, or until newer ones of the same
owner need the room."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

from snapshotd.integrations.e2b.failures import WireError

ARCHIVE_MAX_BYTES = 4 << 30
OWNER_MAX_BYTES = 8 << 30
"""All archives of one owner, those that are just coming included."""
_DIGEST = re.compile(r"[0-9a-f]{16,128}")


class StepArchives:
    """The archives, by their owner and by the digest that the client gave."""

    def __init__(self, owner_max_bytes: int = OWNER_MAX_BYTES) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="snapshotd-e2b-"))
        self._owner_max_bytes = owner_max_bytes
        self._coming = Counter[str]()

    def close(self) -> None:
        """Remove all archives."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def has(self, owner: str, digest: str) -> bool:
        """True if the owner has uploaded the archive of this digest. WireError: the text is no digest."""
        return self._place(owner, digest).is_file()

    def find(self, owner: str, digest: str) -> Path:
        """The archive for a step, which counts as needed now. WireError: it is not there."""
        path = self._place(owner, digest)
        try:
            os.utime(path)
        except OSError as exc:
            raise WireError("not_found", "the files of the step were not uploaded; upload them first") from exc
        return path

    async def receive(self, owner: str, digest: str, pieces: AsyncIterator[bytes]) -> None:
        """Take an archive in; it is there whole or not at all. WireError: it is too large, or there is no room for it."""
        path, count = self._place(owner, digest), 0
        path.parent.mkdir(exist_ok=True)
        scratch = self._folder / uuid4().hex
        try:
            with scratch.open("wb") as file:
                async for piece in pieces:
                    count += len(piece)
                    self._coming[owner] += len(piece)
                    if count > ARCHIVE_MAX_BYTES:
                        raise WireError("too_large", f"an archive has at most {ARCHIVE_MAX_BYTES} bytes")
                    self._make_room(owner, path.parent)
                    await asyncio.to_thread(file.write, piece)
            scratch.rename(path)
        except OSError as exc:
            raise WireError("no_space", f"the archive cannot be kept: {exc.strerror}") from exc
        finally:
            self._coming[owner] -= count
            scratch.unlink(missing_ok=True)

    def _make_room(self, owner: str, folder: Path) -> None:
        """Remove the archives of this owner that were needed longest ago, until all are within the bound."""
        kept = sorted(((one.stat(), one) for one in folder.iterdir()), key=lambda one: one[0].st_mtime, reverse=True)
        room = self._owner_max_bytes - self._coming[owner]
        for status, path in kept:
            room -= status.st_size
            if room < 0:
                path.unlink()
        if self._coming[owner] > self._owner_max_bytes:
            raise WireError("resource_exhausted", f"the uploads under way have more than {self._owner_max_bytes} bytes")

    def _place(self, owner: str, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise WireError("invalid_argument", "the hash of the files has to be hexadecimal")
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:32] / digest
