"""Two folders of this machine in the place of two snapshots, for tests of what `apply` does with the changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from snapshotd.client.apply.apply import EntryMode, apply
from snapshotd.client.results import ApplyInfo
from snapshotd.trees.three_way import Side

KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo"}


class Folders:
    """The changes between `base` and `snapshot`, in the daemon's order."""

    def __init__(self, base: Path, snapshot: Path) -> None:
        self.sides: dict[Side, Path] = {"base": base, "snapshot": snapshot}

    def changes(self) -> Iterator[tuple[bytes, EntryMode | None, EntryMode | None]]:
        found = [tree_of(path) for path in self.sides.values()]
        for path in sorted({*found[0], *found[1]}, key=lambda one: one.split(b"/")):
            before, after = found[0].get(path), found[1].get(path)
            if before is None or after is None or self._differ(path, before, after):
                yield path, before, after

    def _differ(self, path: bytes, before: EntryMode, after: EntryMode) -> bool:
        if before != after or before.kind not in ("file", "symlink"):
            return before != after
        read = self.content if before.kind == "file" else lambda side, one: iter([self.target(side, one)])
        return b"".join(read("base", path)) != b"".join(read("snapshot", path))

    def content(self, side: Side, path: bytes) -> Iterator[bytes]:
        with open(os.path.join(bytes(self.sides[side]), path), "rb") as file:
            while piece := file.read(1 << 16):
                yield piece

    def target(self, side: Side, path: bytes) -> bytes:
        return os.readlink(os.path.join(bytes(self.sides[side]), path))


def tree_of(root: Path) -> dict[bytes, EntryMode]:
    found = {}
    for where, directories, files in os.walk(bytes(root)):
        for name in directories + files:
            path = os.path.join(where, name)
            st = os.lstat(path)
            kind = KINDS[stat.S_IFMT(st.st_mode)]
            size = 0 if kind == "directory" else st.st_size
            found[os.path.relpath(path, bytes(root))] = EntryMode(kind, stat.S_IMODE(st.st_mode), size)
    return found


def make(root: Path, tree: dict[str, object]) -> Path:
    """A folder. Values: bytes for a file, (bytes, mode), text for a link's target, None for a directory (or a mode),
    Ellipsis for a fifo."""
    root.mkdir()
    for name, value in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if value is None or isinstance(value, int):
            path.mkdir(exist_ok=True)
            if isinstance(value, int):
                path.chmod(value)
        elif isinstance(value, str):
            path.symlink_to(value)
        elif value is ...:
            os.mkfifo(path)
        else:
            content, mode = value if isinstance(value, tuple) else (value, 0o644)
            path.write_bytes(content)
            path.chmod(mode)
    return root


def shown(root: Path) -> dict[str, object]:
    """The same for a folder as it is; modes only where they are not the usual ones."""
    found: dict[str, object] = {}
    for path, entry in tree_of(root).items():
        name, mode = os.fsdecode(path), entry.mode
        if entry.kind == "file":
            content = (root / name).read_bytes()
            found[name] = content if mode == 0o644 else (content, mode)
        elif entry.kind == "symlink":
            found[name] = os.readlink(root / name)
        else:
            found[name] = ... if entry.kind == "fifo" else None if mode == 0o755 else mode
    return found


class Rig:
    """Applies the difference of two trees to a third."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.here = directory, directory / "here"

    def prepare(self, base: dict[str, object], snapshot: dict[str, object], here: dict[str, object]) -> None:
        make(self.directory / "base", base)
        make(self.directory / "snapshot", snapshot)
        make(self.here, here)

    def apply(self, *, dry_run: bool = False, message: str | None = None, hooks: bool = False) -> ApplyInfo:
        source = Folders(self.directory / "base", self.directory / "snapshot")
        return apply(source, self.here, dry_run=dry_run, message=message, hooks=hooks)

    def result(self) -> dict[str, object]:
        return shown(self.here)
