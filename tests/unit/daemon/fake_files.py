"""What the tiny engine does about a sandbox's files: a dictionary of contents by path. Directories are what the paths
say. A tar is a folder of the real one. Reading `workspace/broken` fails in the middle."""

from __future__ import annotations

import dataclasses
import io
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

from snapshotd import types as t
from snapshotd.engine import base
from snapshotd.errors import NotFound, UsageError
from snapshotd.trees.base import Entry
from snapshotd.types import Kind
from tests.unit.daemon.fake_mind import NOW_NS


def entry(size: int, kind: Kind = Kind.FILE) -> Entry:
    return Entry(kind, 0o644, 0, 0, size, NOW_NS, 0, 1, (1, 1), NOW_NS)


class FakeFiles:
    """Part of the fake engine, which has the rest."""

    contents: dict[str, dict[bytes, bytes]]
    get: Callable[[str], t.Snapshot]
    trajectory: Callable[[str], t.Trajectory]
    cat: Callable[[str, bytes], Iterator[bytes]]
    _take: Callable[..., t.Snapshot]
    _call: Callable[..., t.ToolCall]

    def read_file(self, ref: str, path: bytes) -> Iterator[bytes]:
        return self.cat(ref, path)

    def stat_file(self, ref: str, path: bytes) -> base.FileEntry:
        files = self._files_of(ref)
        if path in files:
            return base.FileEntry(path, entry(len(files[path])))
        if path and not any(name.startswith(path + b"/") for name in files):
            raise NotFound(f"there is nothing at /{path.decode(errors='replace')}")
        return base.FileEntry(path, entry(0, Kind.DIRECTORY))

    def list_files(self, ref: str, path: bytes) -> Iterator[base.FileEntry]:
        if self.stat_file(ref, path).entry.kind is not Kind.DIRECTORY:
            raise UsageError(f"/{path.decode(errors='replace')} is not a directory")
        top = path + b"/" if path else b""
        names = {name[len(top) :].split(b"/")[0] for name in self._files_of(ref) if name.startswith(top)}
        for name in sorted(names):
            yield self.stat_file(ref, top + name)

    def read_archive(self, ref: str, path: bytes, write: Callable[[bytes], object]) -> tuple[str, ...]:
        self.stat_file(ref, path)
        data = io.BytesIO()
        top = path.rpartition(b"/")[2].decode()
        with tarfile.open(fileobj=data, mode="w") as tar:
            found = {n: c for n, c in self._files_of(ref).items() if n == path or n.startswith(path + b"/")}
            above = {n[: at.start()] for n in found for at in re.finditer(b"/", n) if at.start() >= len(path)}
            for name in sorted({*found, *above}):
                item = tarfile.TarInfo(top + name[len(path) :].decode(errors="surrogateescape"))
                item.type = tarfile.REGTYPE if name in found else tarfile.DIRTYPE
                item.size = len(found.get(name, b""))
                tar.addfile(item, io.BytesIO(found.get(name, b"")))
        write(data.getvalue())
        return ("one fifo was left out",)

    def write_file(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, mode: int | None = None
    ) -> base.Written:
        content = b"".join(iter(lambda: read(1 << 20), b""))
        arguments = {"path": _shown(path), "user": user, "mode": mode}
        return base.Written(self._changed(ref, "write", arguments, {path: content}))

    def write_archive(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, attributes: bool = True
    ) -> base.Written:
        data, top, new = b"".join(iter(lambda: read(1 << 20), b"")), path + b"/" if path else b"", {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                for item in tar:
                    if (file := tar.extractfile(item)) is not None:
                        new[top + item.name.encode(errors="surrogateescape")] = file.read()
        except tarfile.TarError as exc:
            raise UsageError(f"the archive cannot be read: {exc}") from exc
        arguments = {"paths": list(map(_shown, new)), "user": user, "attributes": attributes}
        return base.Written(self._changed(ref, "write", arguments, new), len(new))

    def make_dir(self, ref: str, path: bytes, *, user: str | None = None) -> t.Snapshot:
        return self._changed(ref, "make_dir", {"path": _shown(path), "user": user}, {path + b"/.": b""})

    def remove_file(self, ref: str, path: bytes) -> t.Snapshot:
        self.stat_file(ref, path)
        gone = [name for name in self._files_of(ref) if name == path or name.startswith(path + b"/")]
        return self._changed(ref, "remove", {"path": _shown(path)}, dict.fromkeys(gone))

    def rename_file(self, ref: str, path: bytes, to: bytes) -> t.Snapshot:
        new: dict[bytes, bytes | None] = {path: None, to: b"".join(self.cat(ref, path))}
        return self._changed(ref, "rename", {"path": _shown(path), "to": _shown(to)}, new)

    def _files_of(self, ref: str) -> dict[bytes, bytes]:
        return self.contents[self.get(ref).id]

    def _changed(self, ref: str, name: str, arguments: dict[str, Any], new: dict[bytes, Any]) -> t.Snapshot:
        line = self.trajectory(ref)
        files = {**self.contents[line.head], **new}
        call = dataclasses.replace(self._call(name, arguments), exit_code=None)
        return self._take(line, call, {path: files[path] for path in files if files[path] is not None})


def _shown(path: bytes) -> str:
    return "/" + path.decode(errors="surrogateescape")
