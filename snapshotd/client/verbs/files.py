"""Files of sandboxes and snapshots: the verbs of `Snapshotd`, and the `files` of the objects."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from snapshotd.api import operations
from snapshotd.api.files import FileInfo, MakeDirRequest, RemoveFileRequest, RenameFileRequest, WriteInfo
from snapshotd.api.record import replace
from snapshotd.api.snapshots import RestoreInfo, SnapshotInfo
from snapshotd.client.exchange import AnswerLost, Query, new_key
from snapshotd.client.feeding import Readable
from snapshotd.client.local.arguments import bytes_of, check_file, check_mode, local_path, sandbox_path, wrong
from snapshotd.client.transport import UploadSource
from snapshotd.client.twofold import Blocking, Twofold, closing, iterate, on_this_machine, run, stream, verb
from snapshotd.client.verbs.base import VerbPart, Wait, b64, records_of
from snapshotd.errors import DaemonUnavailable, NotFound, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

SandboxPath = str | bytes
"""Text, or the bytes that Linux has; not a path of this machine. Relative paths start at
/workspace."""
Moved = Callable[[int], object]
"""Hears how many bytes have been moved so far."""


def download(
    client: Snapshotd, ref: str, path: SandboxPath, to: str | Path, *, moved: Moved | None = None
) -> RestoreInfo:
    """Copy a file to the local file `to`, or a directory into the local folder `to`, which is made if it is missing
    and keeps what else is in it. Files become this user's; each is there whole or not at all. `warnings` names what
    was left out. A device or pipe `to` is written to as it is; nothing but regular files is replaced (UsageError),
    and a link by a link."""
    from snapshotd.client.local.tree import Reader, TarUnpacker  # tarfile takes 6 ms

    frames = client._transport.frames(*operations.READ_ARCHIVE.at(ref), query=_path(path))
    pieces = _Pieces(run(frames))
    reader = Reader(iterate(pieces.all()), moved)
    done = TarUnpacker(local_path(to)).unpack(iter(lambda: reader.read(1 << 20), b""))
    return replace(done, warnings=(*done.warnings, *pieces.warnings))


class FileVerbs(VerbPart):
    """Part of `Snapshotd`. For those that read, a trajectory's name or id stands for its files as they are now, in the
    live sandbox if one runs; a snapshot's id or tag for those of the snapshot. Each method that writes is one tool call
    with one snapshot, made by the daemon itself: nothing of the image is needed. They start the sandbox if it is not
    up; new files belong to root, or to `user`, and what is overwritten keeps its owner.

    Links in paths are followed, and stay inside the sandbox. NotFound: there is nothing at the path; UsageError: it is
    of the wrong kind, or something is mounted there, which is not among the sandbox's own files.
    """

    @stream
    async def read_file(self, ref: str, path: SandboxPath) -> AsyncIterator[bytes]:
        """A regular file's content in pieces."""
        return await self._transport.pieces(*operations.READ_FILE.at(ref), query=_path(path))

    @verb
    async def stat_file(self, ref: str, path: SandboxPath) -> FileInfo:
        """The entry at a path, behind all links."""
        return await self._transport.call(operations.STAT_FILE, ref, query=_path(path))

    @stream
    async def list_files(self, ref: str, path: SandboxPath = ".") -> AsyncIterator[FileInfo]:
        """The entries of a directory, sorted by name; links are listed as links."""
        lines = await self._transport.lines(*operations.LIST_FILES.at(ref), query=_path(path))
        return records_of(lines, FileInfo, "the list of files")

    @verb
    async def read_archive(self, ref: str, path: SandboxPath, write: Callable[[bytes], object]) -> tuple[str, ...]:
        """Write a file, or a directory with all that is in it, as a tar, whose members' paths begin with its name.
        Returns warnings: what a tar cannot hold. The output is incomplete if the method raises."""
        pieces = _Pieces(await self._transport.frames(*operations.READ_ARCHIVE.at(ref), query=_path(path)))
        async for piece in pieces.all():
            write(piece)
        return pieces.warnings

    download = on_this_machine(download)

    @verb
    async def write_file(
        self,
        ref: str,
        path: SandboxPath,
        data: bytes | str | Readable,
        *,
        user: str | None = None,
        mode: int | None = None,
        wait: Wait = "captured",
        moved: Moved | None = None,
    ) -> WriteInfo:
        """Write a file: bytes, text (as UTF-8), or what a file that is open for bytes gives until its end. The old one
        is there until all is written, and stays if that fails. Missing directories are made. Without `mode` a new file
        has 0644, and another keeps its own."""
        from snapshotd.client.local.tree import Reader, read_pieces

        check_mode("mode", mode)
        content = bytes_of("data", data) if isinstance(data, str) else data
        whole = isinstance(content, bytes)
        if not whole and not hasattr(content, "read"):
            raise wrong("data", data, "bytes, text, or a file that is open for bytes")
        reader = Reader(
            iter((content,)) if isinstance(content, bytes) else read_pieces(content), moved, in_memory=whole
        )
        query = {**_path(path), "user": user, "mode": mode}
        return await self._write(operations.WRITE_FILE.to(ref), reader, query, wait)

    @verb
    async def write_files(
        self,
        ref: str,
        files: Mapping[str, bytes | str] | Iterable[tuple[SandboxPath, bytes | str]],
        *,
        user: str | None = None,
        wait: Wait = "captured",
    ) -> WriteInfo:
        """Write several files as one call: contents by path. Each is written as `write_file` does; if one cannot be,
        those before it have been, and the call is recorded as failed."""
        from snapshotd.client.local.tree import Reader, pack_bytes

        pairs = files.items() if isinstance(files, Mapping) else files
        whole = [(sandbox_path(path).lstrip(b"/"), bytes_of(f"files[{path!r}]", data)) for path, data in pairs]
        if not whole:
            raise UsageError("there are no files to write; give at least one path with its content")
        query = {**_path("/"), "user": user, "attributes": False}
        return await self._write(
            operations.WRITE_ARCHIVE.to(ref), Reader(pack_bytes(iter(whole)), in_memory=True), query, wait
        )

    @verb
    async def write_archive(
        self,
        ref: str,
        path: SandboxPath,
        tar: Readable,
        *,
        user: str | None = None,
        wait: Wait = "captured",
        moved: Moved | None = None,
    ) -> WriteInfo:
        """Put the members of a tar below a directory, as one call; with the modes and times that the tar says. Devices
        and pipes are left out, with a warning."""
        from snapshotd.client.local.tree import Reader, read_pieces

        check_file("tar", tar, "read")
        reader = Reader(read_pieces(tar), moved)
        return await self._write(operations.WRITE_ARCHIVE.to(ref), reader, {**_path(path), "user": user}, wait)

    @verb
    async def upload(
        self,
        ref: str,
        source: str | Path,
        path: SandboxPath,
        *,
        user: str | None = None,
        wait: Wait = "captured",
        moved: Moved | None = None,
    ) -> WriteInfo:
        """Copy the local file `source` to the file `path`, or the local folder `source` into the directory `path`,
        which is made if it is missing and keeps what else is in it. Modes and times are kept. UsageError: it cannot be
        read, or is a fifo or socket."""
        from snapshotd.client.local.tree import Reader, check_readable, pack

        local, warnings = local_path(source), list[str]()
        if not local.exists():
            raise UsageError(f"there is no {local}; name a file or a folder of this machine")
        if not local.is_dir():
            check_readable(local)
            try:
                with local.open("rb", buffering=0) as file:
                    mode = os.fstat(file.fileno()).st_mode & 0o7777 if local.is_file() else None
                    return await self.write_file(ref, path, file, user=user, mode=mode, wait=wait, moved=moved)
            except OSError as exc:
                raise UsageError(f"{local} cannot be read: {exc.strerror}; name another file") from exc
        reader = Reader(pack(local, warnings), moved)
        done = await self._write(operations.WRITE_ARCHIVE.to(ref), reader, {**_path(path), "user": user}, wait)
        return replace(done, warnings=(*warnings, *done.warnings))

    @verb
    async def make_dir(
        self, ref: str, path: SandboxPath, *, user: str | None = None, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Make a directory, with those above it. Not an error when it is there."""
        return await self._step(operations.MAKE_DIR, ref, MakeDirRequest(_b64(path), user), wait)

    @verb
    async def remove_file(self, ref: str, path: SandboxPath, *, wait: Wait = "captured") -> SnapshotInfo:
        """Remove a file, a link, or a directory with all that is in it."""
        return await self._step(operations.REMOVE_FILE, ref, RemoveFileRequest(_b64(path)), wait)

    @verb
    async def rename_file(
        self, ref: str, path: SandboxPath, to: SandboxPath, *, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Give a file or a directory another name; a file in place of another one, a directory of an empty one.
        Conflict: something else is there."""
        return await self._step(operations.RENAME_FILE, ref, RenameFileRequest(_b64(path), _b64(to)), wait)

    async def _write(self, where: str, source: UploadSource, query: Query, wait: Wait) -> WriteInfo:
        key = new_key()
        try:
            async with closing(await self._transport.upload(where, source, query=query, key=key)) as events:
                async for event in events:
                    if event["event"] == "result":
                        done = WriteInfo.of(event)
                        return replace(done, snapshot=await self._wait_until(done.snapshot, wait))
            raise DaemonUnavailable(
                "the daemon ended the write without a result; the trajectory's log shows whether it is there"
            )
        except AnswerLost as exc:
            lost = exc  # `source` cannot be read twice: the daemon is asked if it has all
        done = WriteInfo.of((await self._transport.recall(where, key, lost, query=query))[-1])
        return replace(done, snapshot=await self._wait_until(done.snapshot, wait))


class _Pieces:
    """A directory as pieces of a tar; `warnings` when all are there."""

    def __init__(self, frames: AsyncIterator[bytes | dict[str, Any]]) -> None:
        self._frames = frames
        self.warnings: tuple[str, ...] = ()

    async def all(self) -> AsyncIterator[bytes]:
        async for item in self._frames:
            if isinstance(item, bytes):
                yield item
            elif item["event"] == "result":
                self.warnings = tuple(item["warnings"])


class AsyncSnapshotFiles(Twofold):
    """The files of a snapshot, or of whatever else `ref` stands for."""

    def __init__(self, client: FileVerbs, ref: str) -> None:
        self._verbs, self._ref = client._coroutines, ref

    @verb
    async def read(self, path: SandboxPath) -> bytes:
        """The content, held in memory."""
        return b"".join([piece async for piece in self._verbs.read_file(self._ref, path)])

    @verb
    async def read_text(self, path: SandboxPath, encoding: str = "utf-8") -> str:
        return (await self.read(path)).decode(encoding)

    @stream
    async def stream(self, path: SandboxPath) -> AsyncIterator[bytes]:
        """The content in pieces."""
        return self._verbs.read_file(self._ref, path)

    @verb
    async def stat(self, path: SandboxPath) -> FileInfo:
        """The entry at a path, behind all links. NotFound."""
        return await self._verbs.stat_file(self._ref, path)

    @verb
    async def exists(self, path: SandboxPath) -> bool:
        """True if there is anything at the path: a file, a directory, or else."""
        try:
            await self.stat(path)
        except (NotFound, UsageError):  # a part of the path is no directory
            return False
        return True

    @verb
    async def list(self, path: SandboxPath = ".") -> list[FileInfo]:
        """The entries of a directory, sorted by name."""
        return [item async for item in self._verbs.list_files(self._ref, path)]

    @verb
    async def download(self, path: SandboxPath, to: str | Path, *, moved: Moved | None = None) -> RestoreInfo:
        """Copy a file, or a directory with all that is in it, to this machine. As `Snapshotd.download`."""
        return await self._verbs.download(self._ref, path, to, moved=moved)

    @verb
    async def archive(self, path: SandboxPath, file: BinaryIO) -> None:
        """Write a file or a directory as a tar into an open file. As `Snapshotd.read_archive`."""
        check_file("file", file, "write")
        await self._verbs.read_archive(self._ref, path, file.write)


class AsyncSandboxFiles(AsyncSnapshotFiles):
    """The files of a sandbox, as they are now. Each method that writes is one tool call, and returns its effect and the
    snapshot after it."""

    @verb
    async def write(
        self,
        path: SandboxPath,
        data: bytes | str | Readable,
        *,
        user: str | None = None,
        mode: int | None = None,
        wait: Wait = "captured",
    ) -> WriteInfo:
        """Write a file, whole or not at all. As `Snapshotd.write_file`."""
        return await self._verbs.write_file(self._ref, path, data, user=user, mode=mode, wait=wait)

    @verb
    async def write_many(
        self,
        files: Mapping[str, bytes | str] | Iterable[tuple[SandboxPath, bytes | str]],
        *,
        user: str | None = None,
        wait: Wait = "captured",
    ) -> WriteInfo:
        """Write several files as one call. As `Snapshotd.write_files`."""
        return await self._verbs.write_files(self._ref, files, user=user, wait=wait)

    @verb
    async def make_dir(self, path: SandboxPath, *, user: str | None = None, wait: Wait = "captured") -> SnapshotInfo:
        """Make a directory, with those above it. Not an error when it is there."""
        return await self._verbs.make_dir(self._ref, path, user=user, wait=wait)

    @verb
    async def remove(self, path: SandboxPath, *, wait: Wait = "captured") -> SnapshotInfo:
        """Remove a file, a link, or a directory with all that is in it. NotFound."""
        return await self._verbs.remove_file(self._ref, path, wait=wait)

    @verb
    async def rename(self, path: SandboxPath, to: SandboxPath, *, wait: Wait = "captured") -> SnapshotInfo:
        """Give a file or a directory another name. NotFound, Conflict."""
        return await self._verbs.rename_file(self._ref, path, to, wait=wait)

    @verb
    async def upload(
        self,
        source: str | Path,
        path: SandboxPath,
        *,
        user: str | None = None,
        wait: Wait = "captured",
        moved: Moved | None = None,
    ) -> WriteInfo:
        """Copy a local file, or a local folder with all that is in it, into the sandbox. As `Snapshotd.upload`."""
        return await self._verbs.upload(self._ref, source, path, user=user, wait=wait, moved=moved)


class SnapshotFiles(Blocking, AsyncSnapshotFiles):
    """The same for threads."""


class SandboxFiles(Blocking, AsyncSandboxFiles):
    """The same for threads."""


def _b64(path: SandboxPath) -> str:
    return b64(sandbox_path(path))


def _path(path: SandboxPath) -> dict[str, str]:
    return {"path_b64": _b64(path)}
