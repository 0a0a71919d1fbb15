"""The bytes of a tree object: one directory, encoded and decoded here.

Tree (integers little-endian, `varint` = LEB128 in its shortest form):

    u8        version: 1
    varint    number of entries
    varint    number of owners, then per owner (11 bytes, in the order in which entries first use them): u16 mode, u32 uid, u32 gid, u8 zero
    row       the directory's own, then one per entry in the order of their names
    32 each   the ids (contents and trees) of the entries that have one, in order

Row:

    u8        bits 0-2 kind, bit 3 it has an id, bit 4 extras follow
    u8        length of the name (0 for the directory's own row)
    -         the name
    and, except for sub-directories:
    varint    owner: which of the owners above
    u32       nanoseconds of the modification time, below 1,000,000,000
    u32       its seconds since the epoch (0 if extras carry them)
    u32       size (0 if extras carry it)
    extras    varint length, then fields in ascending order of their tag, each: u8 tag, varint length, value

Extras: 1 seconds (i64, where u32 cannot hold them), 2 size (u64, the same), 3 symlink target, 4 device number (u64), 5
hard link group (u64) and number of links (u32), 6 extents (varint pairs: hole before, length of data), 7 extended
attributes (per attribute: varint length, name, varint length, value).

Why so: rows carry no reference to their neighbours, so that a delta against the previous version of the directory costs
only the rows that changed; the ids, which do not compress, lie together at the end, where they do not spoil the
statistics of the rest. Decoding is strict: one tree has exactly one encoding, and anything else is refused.
"""

from __future__ import annotations

import struct

from snapshotd.repo.base import Tree, TreeEntry
from snapshotd.repo.format.pack import BadFrame, decode_varint, encode_varint
from snapshotd.types import BlobID, Kind, TreeID

TREE_VERSION = 1
MAX_ENTRIES = 4_000_000
_MAX_NAME_BYTES = 255
_MAX_TARGET_BYTES = 4096
_MAX_EXTRAS_BYTES = 16 << 20
_U32, _U64 = 1 << 32, 1 << 64
_KINDS = (Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK, Kind.FIFO, Kind.SOCKET, Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_HAS_ID, _HAS_EXTRAS, _KIND_MASK = 0x08, 0x10, 0x07
_OWNER = struct.Struct("<HIIx")
_TIMES = struct.Struct("<III")
_SECONDS, _SIZE, _TARGET, _RDEV, _LINK, _EXTENTS, _XATTRS = 1, 2, 3, 4, 5, 6, 7
_I64, _Q, _GROUP = struct.Struct("<q"), struct.Struct("<Q"), struct.Struct("<QI")
_ID_BYTES = 32


class BadTree(Exception):  # noqa: N818
    """The bytes are no tree; the text says why."""


def _show_name(name: bytes) -> str:
    return repr(name[:80].decode(errors="backslashreplace"))


def encode_tree(tree: Tree) -> bytes:
    """ValueError when the tree is malformed (order, names, values out of range, fields that its kind does not have)."""
    owners: dict[tuple[int, int, int], int] = {}
    rows: list[bytes] = []
    ids: list[bytes] = []
    own = tree.own
    if own.name or own.kind is not Kind.DIRECTORY or own.tree is not None:
        raise ValueError("the row of a tree's own metadata is not that of a directory without a name")
    _encode_row(own, owners, rows, ids, True)
    previous = b""
    for entry in tree.entries:
        name = entry.name
        if name <= previous or len(name) > _MAX_NAME_BYTES or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise ValueError(f"the entries of a tree are not in order, or {_show_name(name)} cannot be a name")
        previous = name
        _encode_row(entry, owners, rows, ids, False)
    head = [bytes((TREE_VERSION,)), encode_varint(len(tree.entries)), encode_varint(len(owners))]
    try:
        head += [_OWNER.pack(*owner) for owner in owners]
    except struct.error as exc:
        raise ValueError(f"an owner or mode in a tree is out of range ({exc})") from None
    return b"".join(head + rows + ids)


def _encode_row(
    entry: TreeEntry, owners: dict[tuple[int, int, int], int], rows: list[bytes], ids: list[bytes], own: bool
) -> None:
    kind, name = entry.kind, entry.name
    number = _NUMBER[kind]
    if kind is Kind.DIRECTORY and not own:
        if entry.tree is None or entry != TreeEntry(name, kind, 0, 0, 0, 0, tree=entry.tree):
            raise ValueError(f"the entry of the directory {_show_name(name)} carries more than its name and tree")
        ids.append(_raw(entry.tree))
        rows.append(bytes((number | _HAS_ID, len(name))) + name)
        return
    if entry.content is not None:
        if kind is not Kind.FILE:
            raise ValueError(f"{_show_name(name)} is no file and has content")
        ids.append(_raw(entry.content))
        number |= _HAS_ID
    owner = (entry.mode, entry.uid, entry.gid)
    if entry.mode > 0o7777:
        raise ValueError(f"the mode {entry.mode:o} of {_show_name(name)} has more than permission bits")
    place = owners.setdefault(owner, len(owners))
    seconds, nanoseconds = divmod(entry.mtime_ns, 1_000_000_000)
    size = entry.size
    extras = b""
    if not (
        0 <= seconds < _U32
        and 0 <= size < _U32
        and (kind is Kind.FILE or kind is Kind.DIRECTORY)
        and not entry.xattrs
        and not entry.link
        and entry.extents is None
        and entry.nlink == 1
        and not entry.target
        and not entry.rdev
        and not entry.tree
    ):
        extras = _encode_extras(entry, seconds)
        number |= _HAS_EXTRAS if extras else 0
        seconds = seconds if 0 <= seconds < _U32 else 0
        size = size if size < _U32 else 0
    if size and kind is not Kind.FILE:
        raise ValueError(f"{_show_name(name)} is no file and has a size")
    owner_bytes = bytes((place,)) if place < 0x80 else encode_varint(place)
    rows.append(bytes((number, len(name))) + name + owner_bytes + _TIMES.pack(nanoseconds, seconds, size))
    if extras:
        rows.append(encode_varint(len(extras)) + extras)


def _raw(object_id: str) -> bytes:
    raw = bytes.fromhex(object_id)
    if len(raw) != _ID_BYTES:
        raise ValueError(f"{object_id[:80]!r} is not the id of an object")
    return raw


def _encode_extras(entry: TreeEntry, seconds: int) -> bytes:
    fields: list[tuple[int, bytes]] = []
    kind = entry.kind
    _check_fields(entry)
    try:
        if not 0 <= seconds < _U32:
            fields.append((_SECONDS, _I64.pack(seconds)))
        if entry.size >= _U32:
            fields.append((_SIZE, _Q.pack(entry.size)))
        if kind is Kind.SYMLINK:
            fields.append((_TARGET, entry.target))
        if entry.rdev:
            fields.append((_RDEV, _Q.pack(entry.rdev)))
        if entry.link or entry.nlink != 1:
            fields.append((_LINK, _GROUP.pack(entry.link, entry.nlink)))
    except struct.error as exc:
        raise ValueError(f"a number of {_show_name(entry.name)} is out of range ({exc})") from None
    if entry.extents is not None:
        fields.append((_EXTENTS, _encode_extents(entry)))
    if entry.xattrs:
        fields.append((_XATTRS, _encode_xattrs(entry)))
    return b"".join(bytes((tag,)) + encode_varint(len(value)) + value for tag, value in fields)


def _check_fields(entry: TreeEntry) -> None:
    """ValueError for a field that the entry's kind does not have."""
    kind, name = entry.kind, entry.name
    target = entry.target
    if (
        entry.tree is not None
        or (kind is Kind.SYMLINK) != bool(target)
        or len(target) > _MAX_TARGET_BYTES
        or b"\0" in target
    ):
        raise ValueError(f"the target of {_show_name(name)} is not what its kind has, too long, or has a NUL in it")
    if entry.rdev and kind not in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE):
        raise ValueError(f"{_show_name(name)} is no device and has a device number")
    if (
        entry.size < 0
        or (entry.size and kind is not Kind.FILE)
        or (entry.extents is not None and kind is not Kind.FILE)
    ):
        raise ValueError(f"{_show_name(name)} has a size or extents that its kind does not have")
    if entry.link < 0 or entry.nlink < 1 or (kind is Kind.DIRECTORY and (entry.link or entry.nlink != 1)):
        raise ValueError(f"the links of {_show_name(name)} are not what its kind has")


def _encode_extents(entry: TreeEntry) -> bytes:
    out: list[bytes] = []
    end = 0
    for offset, length in entry.extents or ():
        if offset < end or length <= 0 or offset + length > entry.size:
            raise ValueError(f"the extents of {_show_name(entry.name)} are not in order or beyond its end")
        out += (encode_varint(offset - end), encode_varint(length))
        end = offset + length
    return b"".join(out)


def _encode_xattrs(entry: TreeEntry) -> bytes:
    out: list[bytes] = []
    previous = b""
    for name, value in entry.xattrs:
        if name <= previous or len(name) > _MAX_NAME_BYTES:
            raise ValueError(f"the extended attributes of {_show_name(entry.name)} are not in order")
        previous = name
        out += (encode_varint(len(name)), name, encode_varint(len(value)), value)
    return b"".join(out)


def decode_tree(data: bytes) -> Tree:
    """BadTree unless `encode_tree` makes exactly these bytes of the result. Cost and memory follow the length of the
    data."""
    try:
        return _decode(data)
    except (BadFrame, IndexError, struct.error) as exc:
        raise BadTree(f"it is cut off or a number in it is wrong ({exc})") from None


def _decode(data: bytes) -> Tree:
    if not data or data[0] != TREE_VERSION:
        raise BadTree("it is of an unknown version" if data else "it is empty")
    count, at = decode_varint(data, 1, MAX_ENTRIES)
    owner_count, at = decode_varint(data, at, count + 1)
    if at + owner_count * _OWNER.size + count * 2 > len(data):
        raise BadTree("it is cut off")
    owners: list[tuple[int, int, int]] = []
    for _ in range(owner_count):
        owners.append(_OWNER.unpack_from(data, at))
        if owners[-1][0] > 0o7777 or data[at + _OWNER.size - 1]:
            raise BadTree("a mode in it has more than permission bits")
        at += _OWNER.size
    if len(set(owners)) != owner_count:
        raise BadTree("an owner is in it twice")
    ids_at, starts = _measure(data, at, count)
    ids = [data[place : place + _ID_BYTES].hex() for place in range(ids_at, len(data), _ID_BYTES)]
    next_id, seen = 0, 0
    entries: list[TreeEntry] = []
    previous = b""
    for number, place in enumerate(starts):
        object_id = None
        if data[place] & _HAS_ID:
            object_id = ids[next_id]
            next_id += 1
        entry, owner = _decode_row(data, place, owners, object_id, number == 0)
        if owner > seen:
            raise BadTree("its owners are not in the order of their use")
        seen += owner == seen
        name = entry.name
        if number and (name <= previous or name == b"." or name == b".." or b"/" in name or b"\0" in name):
            raise BadTree(f"its names are not in order, or {_show_name(name)} cannot be a name")
        previous = name
        entries.append(entry)
    if seen != owner_count:
        raise BadTree("it has an owner that no entry uses")
    return Tree(entries[0], tuple(entries[1:]))


def _measure(data: bytes, at: int, count: int) -> tuple[int, list[int]]:
    """(where the ids begin, where each row begins). BadTree when rows and ids do not fill the data."""
    starts: list[int] = []
    ids = 0
    for number in range(count + 1):
        starts.append(at)
        flags, length = data[at], data[at + 1]
        kind = flags & _KIND_MASK
        if (
            flags > 0x1F
            or kind >= len(_KINDS)
            or (number == 0) != (length == 0)
            or (number == 0 and flags & ~_HAS_EXTRAS != 1)
        ):
            raise BadTree("a row in it has flags that do not exist or no name")
        at += 2 + length
        ids += (flags & _HAS_ID) >> 3
        if number and kind == 1:
            if flags != 1 | _HAS_ID:
                raise BadTree("a directory in it has no tree")
            continue
        if data[at] < 0x80:
            at += 1
        else:
            at = decode_varint(data, at, MAX_ENTRIES)[1]
        at += _TIMES.size
        if flags & _HAS_EXTRAS:
            extras, at = decode_varint(data, at, _MAX_EXTRAS_BYTES)
            at += extras
    if at + ids * _ID_BYTES != len(data):
        raise BadTree("its length is not what its rows say")
    return at, starts


def _decode_row(
    data: bytes, at: int, owners: list[tuple[int, int, int]], object_id: str | None, own: bool
) -> tuple[TreeEntry, int]:
    """The row that begins at `at`, and its owner's number (-1 for a sub-directory)."""
    flags, length = data[at], data[at + 1]
    kind = _KINDS[flags & _KIND_MASK]
    at += 2
    name = data[at : at + length]
    at += length
    if kind is Kind.DIRECTORY and not own:
        return TreeEntry(name, kind, 0, 0, 0, 0, 0, None, None, b"", 0, TreeID(object_id or "")), -1
    owner = data[at]
    if owner < 0x80:
        at += 1
    else:
        owner, at = decode_varint(data, at, MAX_ENTRIES)
    nanoseconds, seconds, size = _TIMES.unpack_from(data, at)
    if owner >= len(owners) or nanoseconds >= 1_000_000_000 or (object_id is not None and kind is not Kind.FILE):
        raise BadTree(f"the owner, time or content of {_show_name(name)} is wrong")
    mode, uid, gid = owners[owner]
    content = BlobID(object_id) if object_id is not None else None
    if not flags & _HAS_EXTRAS:
        if kind is Kind.SYMLINK or (size and kind is not Kind.FILE):
            raise BadTree(f"{_show_name(name)} has not what its kind has")
        return TreeEntry(name, kind, mode, uid, gid, seconds * 1_000_000_000 + nanoseconds, size, content), owner
    entry = _decode_extras(
        data, at + _TIMES.size, TreeEntry(name, kind, mode, uid, gid, nanoseconds, size, content), seconds
    )
    return entry, owner


def _decode_extras(data: bytes, at: int, plain: TreeEntry, seconds: int) -> TreeEntry:
    total, at = decode_varint(data, at, _MAX_EXTRAS_BYTES)
    end = at + total
    fields: dict[int, bytes] = {}
    last = 0
    while at < end:
        tag = data[at]
        length, at = decode_varint(data, at + 1, _MAX_EXTRAS_BYTES)
        if tag <= last or tag > _XATTRS or at + length > end:
            raise BadTree(f"the extras of {plain.name[:80]!r} are not in order or too long")
        fields[tag] = data[at : at + length]
        last, at = tag, at + length
    if not fields:
        raise BadTree(f"the extras of {plain.name[:80]!r} are empty")
    size = plain.size
    if _SECONDS in fields:
        far = _I64.unpack(fields[_SECONDS])[0]
        if seconds or 0 <= far < _U32:
            raise BadTree(f"the time of {plain.name[:80]!r} is given twice")
        seconds = far
    if _SIZE in fields:
        large = _Q.unpack(fields[_SIZE])[0]
        if size or large < _U32:
            raise BadTree(f"the size of {plain.name[:80]!r} is given twice")
        size = large
    link, nlink = _GROUP.unpack(fields[_LINK]) if _LINK in fields else (0, 1)
    rdev = _Q.unpack(fields[_RDEV])[0] if _RDEV in fields else 0
    if (_RDEV in fields and not rdev) or (_LINK in fields and (link, nlink) == (0, 1)) or fields.get(_XATTRS) == b"":
        raise BadTree(f"the extras of {plain.name[:80]!r} say nothing")
    entry = TreeEntry(
        plain.name,
        plain.kind,
        plain.mode,
        plain.uid,
        plain.gid,
        seconds * 1_000_000_000 + plain.mtime_ns,
        size,
        plain.content,
        _decode_extents(fields[_EXTENTS], size) if _EXTENTS in fields else None,
        fields.get(_TARGET, b""),
        rdev,
        None,
        link,
        nlink,
        _decode_xattrs(fields[_XATTRS]) if _XATTRS in fields else (),
    )
    try:
        _check_fields(entry)
    except ValueError as exc:
        raise BadTree(str(exc)) from None
    return entry


def _decode_extents(data: bytes, size: int) -> tuple[tuple[int, int], ...]:
    extents: list[tuple[int, int]] = []
    at = end = 0
    while at < len(data):
        hole, at = decode_varint(data, at, _U64)
        length, at = decode_varint(data, at, _U64)
        if not length or end + hole + length > size:
            raise BadTree("an extent in it is empty or beyond the end of its file")
        extents.append((end + hole, length))
        end += hole + length
    return tuple(extents)


def _decode_xattrs(data: bytes) -> tuple[tuple[bytes, bytes], ...]:
    xattrs: list[tuple[bytes, bytes]] = []
    at, previous = 0, b""
    while at < len(data):
        length, at = decode_varint(data, at, _MAX_NAME_BYTES)
        name, at = data[at : at + length], at + length
        length, at = decode_varint(data, at, _MAX_EXTRAS_BYTES)
        value, at = data[at : at + length], at + length
        if name <= previous or at > len(data):
            raise BadTree("its extended attributes are not in order or cut off")
        previous = name
        xattrs.append((name, value))
    return tuple(xattrs)
