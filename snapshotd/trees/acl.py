"""Ids that are shifted by hand, alone and in access lists (linux/posix_acl_xattr.h)."""

from __future__ import annotations

import struct

UNMAPPED_ID = 0xFFFFFFFE
"""The id that stands for any id without a place above the shift: no container maps it, so it shows as nobody there."""

ACL_NAMES = (b"system.posix_acl_access", b"system.posix_acl_default")
_ACL_VERSION = 2
_ACL_USER, _ACL_GROUP = 0x02, 0x08
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")


def shifted_id(value: int, shift: int) -> int:
    """An owner id (0 to 2^32-2) as a host id."""
    moved = value + shift
    return moved if moved < 0xFFFFFFFF else UNMAPPED_ID


def shifted_acl(value: bytes, shift: int) -> bytes:
    """An access list with its users and groups `shift` higher. A malformed one stays as it is: the kernel refuses it."""
    if len(value) < 4 or (len(value) - 4) % _ACL_ENTRY.size or _ACL_HEADER.unpack_from(value)[0] != _ACL_VERSION:
        return value
    out = [value[:4]]
    for tag, perm, owner in _ACL_ENTRY.iter_unpack(value[4:]):
        out.append(_ACL_ENTRY.pack(tag, perm, shifted_id(owner, shift) if tag in (_ACL_USER, _ACL_GROUP) else owner))
    return b"".join(out)
