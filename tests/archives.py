"""Archives made by hand, honest and hostile."""

from __future__ import annotations

import errno
import io
import os
import tarfile

PAST_S = 1_600_000_000


def entry(
    name: str | bytes, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(os.fsdecode(name))
    info.type, info.size, info.mtime = kind, len(data), PAST_S
    info.uid, info.gid = os.getuid(), os.getgid()
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def directory(name: str, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE, **fields)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind, linkname=target)


def archive(*entries: tuple[tarfile.TarInfo, bytes], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def pax_record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


def raw_header(kind: bytes, data: bytes) -> bytes:
    header = fixed_checksum(bytearray(with_size(bytearray(archive(entry("PaxHeader"))[:512]), len(data))), kind=kind)
    return header + data + bytes(-len(data) % 512)


def with_size(header: bytearray, size: int) -> bytes:
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    return fixed_checksum(header)


def fixed_checksum(header: bytearray, kind: bytes | None = None) -> bytes:
    if kind is not None:
        header[156:157] = kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


NO_REDIRECTS = (
    (b"", errno.EINVAL),
    (b"/", errno.EINVAL),
    (b"/a/", errno.EINVAL),
    (b"//a", errno.EINVAL),
    (b"a/b", errno.EINVAL),
    (b"..", errno.EACCES),
    (b"/../../etc", errno.EACCES),
    (b".", errno.EACCES),
)
"""Values of `overlay.redirect` that lead nowhere, and the error of the kernel."""
