"""Write the difference of two views as a git-style patch.

`git apply` and `patch -p1` both take it for text files, links, modes, additions and deletions. GNU patch cannot read
binary files (`GIT binary patch` literals) nor turn a directory into a file or the reverse. A patch cannot carry
directories of their own, owners, attributes, other mode bits than "executable", fifos, sockets and device nodes;
`snapshotd restore` can.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from base64 import b85encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapshotd.errors import LimitExceeded
from snapshotd.kernel import turns
from snapshotd.kernel.files import closing_fd
from snapshotd.trees.base import Change, Entry
from snapshotd.trees.diff import diff
from snapshotd.trees.hunks import CONTEXT_LINES, hunks
from snapshotd.trees.view import View
from snapshotd.types import Kind

MAX_FILE_BYTES = 512 << 20
"""Larger files are refused: git apply takes no patch over 1 GiB, and a sparse file could fill the reader's disk with
zeros."""
MAX_COMPARED_BYTES = 1 << 20
MAX_COMPARED_LINES = 20_000
"""Up to these sizes changed lines are looked for; above, the whole file is replaced."""

Write = Callable[[bytes], object]
Omit = Callable[[bytes, int], object]
"""Function that gets the path, relative to the patch's root, and the size of a file that the patch leaves out."""
_BLOCK_BYTES = 1 << 20
_GATHERED_BYTES = 1 << 18
_ROWS = 50
"""Lines of a binary patch between two calls of `give_way`."""
_NO_BLOB = b"0" * 40
_NO_NEWLINE = b"\n\\ No newline at end of file\n"
_ESCAPES = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}


@dataclass(frozen=True, slots=True)
class PatchBound:
    """Leave files out that are larger, before or after, than `file_bytes`: the patch is one to read, and not to apply.
    All that stands before the file has been handed on when `omit` is called."""

    file_bytes: int
    omit: Omit


def write_patch(a: View, b: View, root: bytes, write: Write, bound: PatchBound | None = None) -> int:
    """Write the changes below the directory `root` from `a` to `b`, with paths relative to it. Returns the number of
    changes outside of it.

    `write` gets pieces of up to some MiB. Raises NotADirectoryError (`root` is none), LimitExceeded (without a bound, a
    file over MAX_FILE_BYTES; a part of the patch may have been written then) and the errors of `View`. A missing `root`
    is an empty one. Memory: one block, or for text files up to MAX_COMPARED_BYTES both versions; time is bounded by the
    size of the changed files.
    """
    out = Gather(write)
    write = out.write
    top = b"/".join(part for part in root.split(b"/") if part)
    prefix = top + b"/" if top else b""
    outside = 0
    waiting: tuple[bytes, _Blob] | None = None
    for change in diff(a, b):
        if waiting is not None and not change.path.startswith(waiting[0] + b"/"):
            _write_change(_relative(waiting[0], prefix), None, waiting[1], write)
            waiting = None
        if change.path == top:
            _check_root(change)
        elif not change.path.startswith(prefix):
            outside += 1
        elif bound is not None and (size := _size(change)) > bound.file_bytes:
            out.flush()
            bound.omit(_relative(change.path, prefix), size)
        else:
            before, after = _blob(a, change.path, change.before), _blob(b, change.path, change.after)
            if after is not None and change.before is not None and change.before.kind is Kind.DIRECTORY:
                waiting = change.path, after  # after the deletion of the directory's entries
            else:
                _write_change(_relative(change.path, prefix), before, after, write)
    if waiting is not None:
        _write_change(_relative(waiting[0], prefix), None, waiting[1], write)
    out.flush()
    return outside


class Gather:
    """Small writes, handed on as large ones. Call `flush` at the end; the gathered rest is lost otherwise."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._gathered = bytearray()

    def write(self, data: bytes) -> None:
        """Take `data`, and hand on the gathered bytes when they are 256 KiB or more. A piece that is as large by itself
        is not copied."""
        if len(data) >= _GATHERED_BYTES:
            self.flush()
            self._sink(data)
            return
        self._gathered += data
        if len(self._gathered) >= _GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            self._sink(bytes(self._gathered))
            self._gathered.clear()


@dataclass(frozen=True, slots=True)
class _Blob:
    """One version of a file in git's sense: a regular file or a link."""

    view: View
    path: bytes
    mode: bytes
    size: int

    def blocks(self) -> Iterator[bytes]:
        if self.mode == b"120000":
            yield self.view.readlink(self.path)
            return
        with closing_fd(self.view.open(self.path)) as fd:
            while block := os.read(fd, _BLOCK_BYTES):
                yield block


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts that one pass over a version finds."""

    sha1: bytes = _NO_BLOB
    binary: bool = False
    lines: int = 0


def _check_root(change: Change) -> None:
    for entry in (change.before, change.after):
        if entry is not None and entry.kind is not Kind.DIRECTORY:
            raise NotADirectoryError(20, "the patch's root is not a directory", os.fsdecode(change.path))


def _size(change: Change) -> int:
    """Bytes of the larger version of a file; 0 for anything else."""
    files = (entry for entry in (change.before, change.after) if entry is not None and entry.kind is Kind.FILE)
    return max((entry.size for entry in files), default=0)


def _relative(path: bytes, prefix: bytes) -> bytes:
    return path[len(prefix) :]


def _blob(view: View, path: bytes, entry: Entry | None) -> _Blob | None:
    if entry is None:
        return None
    if entry.kind is Kind.SYMLINK:
        return _Blob(view, path, b"120000", len(view.readlink(path)))
    if entry.kind is not Kind.FILE:
        return None
    if entry.size > MAX_FILE_BYTES:
        raise LimitExceeded(
            f"cannot write {os.fsdecode(path)!r} into a patch: it has {entry.size} bytes and the limit is {MAX_FILE_BYTES};"
            " use `snapshotd restore`"
        )
    return _Blob(view, path, b"100755" if entry.mode & stat.S_IXUSR else b"100644", entry.size)


def _write_change(path: bytes, before: _Blob | None, after: _Blob | None, write: Write) -> None:
    if before is None and after is None:
        return
    if before is not None and after is not None and (before.mode == b"120000") != (after.mode == b"120000"):
        _write_change(path, before, None, write)
        _write_change(path, None, after, write)
        return
    old, new = _facts(before), _facts(after)
    same_mode = before is not None and after is not None and before.mode == after.mode
    if same_mode and old.sha1 == new.sha1:
        return  # only properties that a patch cannot express have changed
    name_a, name_b = _quote(b"a/" + path), _quote(b"b/" + path)
    write(b"diff --git " + name_a + b" " + name_b + b"\n")
    if before is None:
        write(b"new file mode " + (after.mode if after else b"") + b"\n")
    elif after is None:
        write(b"deleted file mode " + before.mode + b"\n")
    elif not same_mode:
        write(b"old mode " + before.mode + b"\nnew mode " + after.mode + b"\n")
    if old.sha1 == new.sha1:
        return
    write(b"index " + old.sha1 + b".." + new.sha1 + (b" " + before.mode if before and same_mode else b"") + b"\n")
    if old.binary or new.binary:
        write(b"GIT binary patch\n")
        _write_literal(after, write)
        _write_literal(before, write)
        return
    if old.lines == 0 and new.lines == 0:
        return  # an empty file came or went: git has no body for it
    write(b"--- " + (name_a if before else b"/dev/null") + b"\n+++ " + (name_b if after else b"/dev/null") + b"\n")
    if (
        before
        and after
        and max(before.size, after.size) <= MAX_COMPARED_BYTES
        and max(old.lines, new.lines) <= MAX_COMPARED_LINES
    ):
        _write_hunks(b"".join(before.blocks()), b"".join(after.blocks()), write)
    else:
        _write_replacement(before, after, old.lines, new.lines, write)


def _facts(blob: _Blob | None) -> _Facts:
    if blob is None:
        return _Facts()
    sha1 = hashlib.sha1(b"blob %d\0" % blob.size, usedforsecurity=False)
    binary, lines, last = False, 0, b""
    for block in blob.blocks():
        sha1.update(block)
        binary = binary or b"\0" in block
        lines += block.count(b"\n")
        last = block[-1:]
    return _Facts(sha1.hexdigest().encode(), binary, lines + (last not in (b"", b"\n")))


# -- text --------------------------------------------------------------------------------------------------------------


def _write_hunks(before: bytes, after: bytes, write: Write) -> None:
    old, new = _lines(before), _lines(after)
    for hunk in hunks(old, new, CONTEXT_LINES):
        write(_header(hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count))
        for sign, line in hunk.lines:
            write(sign + (line if line.endswith(b"\n") else line + _NO_NEWLINE))


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends. Only a line feed ends a line, for git and patch alike."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()
    return [*lines, last[:-1]] if last != b"\n" else lines


def _header(old_start: int, old_count: int, new_start: int, new_count: int) -> bytes:
    return b"@@ -%d,%d +%d,%d @@\n" % (old_start, old_count, new_start, new_count)


def _write_replacement(before: _Blob | None, after: _Blob | None, old_lines: int, new_lines: int, write: Write) -> None:
    """One hunk that takes every old line away and puts every new one in, without holding either version."""
    write(_header(1 if old_lines else 0, old_lines, 1 if new_lines else 0, new_lines))
    for blob, sign in ((before, b"-"), (after, b"+")):
        at_start = True
        for block in blob.blocks() if blob else ():
            body = block[:-1] if block.endswith(b"\n") else block
            write((sign if at_start else b"") + body.replace(b"\n", b"\n" + sign))
            at_start = block.endswith(b"\n")
            if at_start:
                write(b"\n")
        if not at_start:
            write(_NO_NEWLINE)


# -- binary ------------------------------------------------------------------------------------------------------------


def _write_literal(blob: _Blob | None, write: Write) -> None:
    """git's base85 form: each line starts with the letter of its byte count (A-Z = 1-26, a-z = 27-52)."""
    write(b"literal %d\n" % (blob.size if blob else 0))
    packer = zlib.compressobj()
    pending = b""
    for block in blob.blocks() if blob else ():
        pending = _write_rows(pending + packer.compress(block), write)
    pending = _write_rows(pending + packer.flush(), write)
    if pending:
        write(_row(pending))
    write(b"\n")


def _write_rows(data: bytes, write: Write) -> bytes:
    full = len(data) - len(data) % 52
    for start in range(0, full, 52 * _ROWS):
        turns.give_way()
        write(b"".join([_row(data[i : i + 52]) for i in range(start, min(start + 52 * _ROWS, full), 52)]))
    return data[full:]


def _row(data: bytes) -> bytes:
    count = len(data)
    letter = bytes([count + (64 if count <= 26 else 70)])
    return letter + b85encode(data, pad=True) + b"\n"


# -- names -------------------------------------------------------------------------------------------------------------


def _quote(name: bytes) -> bytes:
    """A name as git's C-style string if it needs one. One with a space is quoted, too: GNU patch ends an unquoted name
    there."""
    if all(0x20 < byte < 0x7F and byte not in (34, 92) for byte in name):
        return name
    return (
        b'"'
        + b"".join(_ESCAPES.get(byte) or (b"%c" % byte if 0x20 <= byte < 0x7F else b"\\%03o" % byte) for byte in name)
        + b'"'
    )
