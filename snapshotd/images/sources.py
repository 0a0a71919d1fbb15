"""Sources of foreign images on this machine: a folder, a root file system tar, an image archive. Their content tells
them apart."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from snapshotd.errors import LimitExceeded, NotFound, NotPermitted, UsageError
from snapshotd.formats.ingest import IngestReport, ingest_folder, ingest_tar
from snapshotd.formats.tar_reader import ByteSource, TarReader
from snapshotd.images.archive_file import FolderBlobs, ImageArchive, TarBlobs, looks_like_archive, open_archive
from snapshotd.images.config import DEFAULT_WORKDIR
from snapshotd.images.decompress import drain, plain
from snapshotd.images.hashing import HashingReader
from snapshotd.kernel import files
from snapshotd.types import new_id

MAX_ARCHIVE_BYTES = 64 << 30
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign image that was looked at and can be extracted. `source_id` names its content."""

    kind: str
    source_id: str
    extract: Callable[[int, Callable[[str], None]], list[IngestReport]]
    """Fill the empty directory behind a descriptor."""
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = DEFAULT_WORKDIR


@contextmanager
def open_source(path: Path, scratch: Path, progress: Callable[[str], None]) -> Iterator[Source]:
    """Find out the kind of `path`. `scratch` is where a compressed image archive is unpacked, to be read out of order.

    Raises NotFound, NotPermitted, UsageError (its content is no image, or damaged), LimitExceeded.
    """
    if path.is_dir():
        if (path / "oci-layout").is_file() or (path / "index.json").is_file():
            yield from _layout(path)
        else:
            # a folder has no cheap digest, and may change: every import is a new image
            yield Source("folder", f"folder:{new_id()}", lambda fd, _: [ingest_folder(path, fd)])
        return
    with _open_file(path) as raw:
        yield from _file(raw, path, scratch, progress)


def _open_file(path: Path) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise NotFound(
            f"there is no file or folder {path}; check the path (it is taken on the daemon's machine)"
        ) from exc
    except PermissionError as exc:
        raise NotPermitted(f"{path} cannot be read: {exc.strerror}; give the daemon's user access to it") from exc
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}; give a folder or an archive") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} is neither a folder nor a regular file, so no image can be in it")
    return open(fd, "rb", buffering=0)


def _layout(path: Path) -> Iterator[Source]:
    with closing(FolderBlobs(path)) as blobs:
        yield of_archive("oci layout", open_archive(blobs, f"the OCI layout {path}"))


def of_archive(kind: str, archive: ImageArchive) -> Source:
    """An image that was found in an archive."""
    return Source(kind, archive.config.source_id, archive.extract, archive.config.env, archive.config.workdir)


def _file(raw: BinaryIO, path: Path, scratch: Path, progress: Callable[[str], None]) -> Iterator[Source]:
    what = f"the archive {path}"
    first = next(iter(TarReader(plain(raw, what))), None)
    if first is None:
        raise UsageError(f"{what} is empty; it should hold a root file system or an image")
    raw.seek(0)
    if looks_like_archive(first.path):
        with _seekable(raw, what, scratch) as file:
            yield of_archive("archive", open_archive(TarBlobs(file), what))
        return
    progress("reading the archive")
    digest = HashingReader(raw).finish()

    def extract(fd: int, _: Callable[[str], None]) -> list[IngestReport]:
        raw.seek(0)
        seen = HashingReader(raw)
        content = plain(seen, what)
        report = ingest_tar(content, fd, oci_whiteouts=False)
        drain(content, MAX_ARCHIVE_BYTES, what)  # a compressed file's checksum is at its end
        if seen.finish() != digest:
            raise UsageError(f"{what} changed while it was read; import it again when it is complete")
        return [report]

    yield Source("tar", f"tar:sha256:{digest}", extract)


@contextmanager
def _seekable(raw: BinaryIO, what: str, scratch: Path) -> Iterator[BinaryIO]:
    """The archive itself if it is plain, else unpacked into an unnamed file."""
    head = raw.read(512)
    raw.seek(0)
    if head[257:262] == b"ustar" or not head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00")):
        yield raw
        return
    with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
        stream: ByteSource = plain(raw, what)
        left = MAX_ARCHIVE_BYTES
        while data := stream.read(_PIECE_BYTES):
            left -= len(data)
            if left < 0:
                raise LimitExceeded(f"{what} is larger than {MAX_ARCHIVE_BYTES} bytes when it is unpacked")
            files.write_all(file.fileno(), data)  # `write` takes a part without an error when the disk is full
        file.seek(0)
        yield file
