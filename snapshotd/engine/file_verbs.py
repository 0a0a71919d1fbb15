"""The verbs about a sandbox's files, each a line over `runs/file_calls.py`. See `engine/base.py` for the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from snapshotd.engine.base import Engine, FileEntry, Written
from snapshotd.engine.runs.file_calls import FileCalls
from snapshotd.types import Snapshot


class LocalFileVerbs(Engine):
    """The part of the engine that is about files. A class that inherits it sets `_files`."""

    _files: FileCalls

    def read_file(self, ref: str, path: bytes) -> Iterator[bytes]:
        return self._files.read(ref, path)

    def stat_file(self, ref: str, path: bytes) -> FileEntry:
        return self._files.stat(ref, path)

    def list_files(self, ref: str, path: bytes) -> Iterator[FileEntry]:
        return self._files.list(ref, path)

    def read_archive(self, ref: str, path: bytes, write: Callable[[bytes], object]) -> tuple[str, ...]:
        return self._files.archive(ref, path, write)

    def write_file(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, mode: int | None = None
    ) -> Written:
        return self._files.write(ref, path, read, user=user, mode=mode)

    def write_archive(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, attributes: bool = True
    ) -> Written:
        return self._files.unpack(ref, path, read, user=user, attributes=attributes)

    def make_dir(self, ref: str, path: bytes, *, user: str | None = None) -> Snapshot:
        return self._files.make_dir(ref, path, user=user)

    def remove_file(self, ref: str, path: bytes) -> Snapshot:
        return self._files.remove(ref, path)

    def rename_file(self, ref: str, path: bytes, to: bytes) -> Snapshot:
        return self._files.rename(ref, path, to)
