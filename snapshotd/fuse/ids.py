"""Owner ids as the kernel wants them on a mount that cannot be id-mapped: shifted by hand, in attributes and inside of
xattrs.

A tree holds the container's ids (0..65535). A container in a user namespace lives at host ids `shift`..., so ids in a
mount must be shifted. Layers on disk get this from id-mapped clones; libfuse 3.14 does not offer FUSE_ALLOW_IDMAP. With
shift 0 nothing changes.

Source: linux/posix_acl_xattr.h, linux/capability.h (vfs_cap_data, vfs_ns_cap_data).
"""

from __future__ import annotations

import struct

from snapshotd.kernel import marks

UNMAPPED_ID = 0xFFFFFFFE
"""The id that stands for any id without a place above the shift: no container maps it, so it shows as nobody there."""

_ACL_NAMES = (b"system.posix_acl_access", b"system.posix_acl_default")
_ACL_VERSION = 2
_ACL_USER, _ACL_GROUP = 0x02, 0x08
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")

_CAPABILITY = b"security.capability"
_REVISION_MASK, _REVISION_1, _REVISION_2, _REVISION_3 = 0xFF000000, 0x01000000, 0x02000000, 0x03000000
_MAGIC = struct.Struct("<I")
_SIZES = {_REVISION_1: 12, _REVISION_2: 20, _REVISION_3: 24}

PRIVATE_PREFIX = marks.OVERLAY_BYTES
"""Names that would steer overlayfs: never shown, even if a tree holds them."""


def shifted_id(value: int, shift: int) -> int:
    """An owner id (0 to 2^32-2) as a host id."""
    moved = value + shift
    return moved if moved < 0xFFFFFFFF else UNMAPPED_ID


def shifted_xattrs(xattrs: dict[bytes, bytes], shift: int) -> dict[bytes, bytes]:
    """Extended attributes with the ids in their values shifted, and without overlayfs's own."""
    shown = {name: value for name, value in xattrs.items() if not name.startswith(PRIVATE_PREFIX)}
    if shift:
        for name, value in shown.items():
            if name in _ACL_NAMES:
                shown[name] = _shifted_acl(value, shift)
            elif name == _CAPABILITY:
                shown[name] = _shifted_capability(value, shift)
    return shown


def _shifted_acl(value: bytes, shift: int) -> bytes:
    """A malformed one stays as it is: the kernel refuses it."""
    if len(value) < 4 or (len(value) - 4) % _ACL_ENTRY.size or _ACL_HEADER.unpack_from(value)[0] != _ACL_VERSION:
        return value
    out = [value[:4]]
    for tag, perm, owner in _ACL_ENTRY.iter_unpack(value[4:]):
        out.append(_ACL_ENTRY.pack(tag, perm, shifted_id(owner, shift) if tag in (_ACL_USER, _ACL_GROUP) else owner))
    return b"".join(out)


def _shifted_capability(value: bytes, shift: int) -> bytes:
    """File capabilities as revision 3 with the namespace's root in them. Revisions 1 and 2 belong to the host's root,
    which no container has: there they would mean nothing. A malformed one stays as it is: the kernel refuses it."""
    if len(value) < 4:
        return value
    magic = _MAGIC.unpack_from(value)[0]
    revision = magic & _REVISION_MASK
    if _SIZES.get(revision) != len(value):
        return value
    root = _MAGIC.unpack_from(value, 20)[0] if revision == _REVISION_3 else 0
    sets = value[4:20].ljust(16, b"\0")
    return _MAGIC.pack((magic & ~_REVISION_MASK) | _REVISION_3) + sets + _MAGIC.pack(shifted_id(root, shift))
