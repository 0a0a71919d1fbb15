"""Programs of others that tell where two trees differ: rsync, mtree and tar. Each answers with paths, relative, "." for
the root.

None of them gets deeper than PATH_MAX; tests/variety.py reads trees of any depth.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_TIMEOUT_S = 120
_KEYWORDS = "type,mode,uid,gid,size,time,link,sha256,device"


def rsync(original: Path, copy: Path) -> set[bytes]:
    """Content, type, mode, owner, times, hard links, attributes and access lists. Nothing of `copy` changes.

    Left out is what XFS lists of access lists a second time, in its own form, for root.
    """
    said = _run(
        "rsync",
        "-aHAXSn",
        "--numeric-ids",
        "--checksum",
        "--delete",
        "--filter=-x trusted.SGI_ACL_*",
        "--out-format=%i %n",
        f"{original}/",
        ".",
        cwd=copy,
    )
    # A line: eleven letters (or "*deleting  "), a space, the name with every odd byte as \#ooo.
    lines = [line for line in said.split(b"\n") if line]
    return {re.sub(rb"\\#([0-7]{3})", _byte, line[12:]).rstrip(b"/") or b"." for line in lines}


def mtree_spec(root: Path) -> bytes:
    """What NetBSD's mtree says about a tree, for `mtree`."""
    return _run("mtree", "-c", "-p", str(root), "-k", _KEYWORDS)


def mtree(spec: bytes, copy: Path) -> set[bytes]:
    """Content, type, mode, owner, times, link targets, device numbers. What it says of the very tree that the
    specification comes from (it cannot take names with a line end, nor the longest link targets) means nothing of a
    copy either."""
    with tempfile.NamedTemporaryFile("wb") as given:
        given.write(spec)
        given.flush()
        said = _run("mtree", "-f", given.name, "-p", str(copy), codes=(0, 2))
    return {
        _unescaped(found[1] or found[2])
        for found in re.finditer(rb"(?m)^(?:(?:missing|extra): (?:\./)?(.+)|(\S.*):)", said)
    }


def tar_of(root: Path, archive: Path) -> Path:
    """Pack a tree with GNU tar."""
    _run("tar", "-C", str(root), "--format=posix", "--xattrs", "--acls", "--sparse", "-cf", str(archive), ".")
    return archive


def tar(archive: Path, copy: Path) -> set[bytes]:
    """Content, type, mode, owner, times, link targets, hard links. What is too much is not seen."""
    said = _run("tar", "-C", str(copy), "--quoting-style=escape", "--compare", "-f", str(archive), codes=(0, 1, 2))
    found = re.findall(rb"(?m)^(?:tar: )?(.+?): [A-Z].*$", said)
    return {_unescaped(path).removeprefix(b"./").rstrip(b"/") or b"." for path in found}


def _run(*command: str, codes: tuple[int, ...] = (0,), cwd: Path | None = None) -> bytes:
    result = subprocess.run(
        command,
        env=_ENVIRONMENT,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert result.returncode in codes, (command, result.returncode, result.stdout[-3000:])
    return result.stdout


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes((int(found[1], 8),))


_ESCAPES = {
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
    b"s": b" ",
    b"E": b"\x1b",
}


def _unescaped(shown: bytes) -> bytes:
    """Of a name as C, or vis(3) of BSD in C style, writes it."""

    def plain(found: re.Match[bytes]) -> bytes:
        return bytes((int(found[1], 8),)) if found[1] else _ESCAPES.get(found[2], found[2])

    return re.sub(rb"\\(?:([0-7]{3})|(.))", plain, shown)
