"""Owner ids as the kernel wants them on a mount that cannot be id-mapped: shifted by hand, in attributes and inside of
xattrs.

A tree holds the container's ids (0..65535). A container in a user namespace lives at host ids `shift`..., so ids in a
mount must be shifted. Layers on disk get this from id-mapped clones; libfuse 3.14 does not offer FUSE_ALLOW_IDMAP. With
shift 0 nothing changes.

Source: linux/capability.h (vfs_cap_data, vfs_ns_cap_data).
"""

from __future__ import annotations

import struct

from snapshotd.kernel.abilities import TRUSTED
from snapshotd.trees.target import ACL_NAMES, shift_acl, shift_id

_CAPABILITY = b"security.capability"
_REVISION_MASK, _REVISION_1, _REVISION_2, _REVISION_3 = 0xFF000000, 0x01000000, 0x02000000, 0x03000000
_MAGIC = struct.Struct("<I")
_SIZES = {_REVISION_1: 12, _REVISION_2: 20, _REVISION_3: 24}

PRIVATE_PREFIX = TRUSTED.prefix
"""Names that would steer overlayfs: never shown, even if a tree holds them."""


def shift_xattrs(xattrs: dict[bytes, bytes], shift: int) -> dict[bytes, bytes]:
    """Extended attributes with the ids in their values shifted, and without overlayfs's own."""
    shown = {name: value for name, value in xattrs.items() if not name.startswith(PRIVATE_PREFIX)}
    if shift:
        for name, value in shown.items():
            if name in ACL_NAMES:
                shown[name] = shift_acl(value, shift)
            elif name == _CAPABILITY:
                shown[name] = _shift_capability(value, shift)
    return shown


def _shift_capability(value: bytes, shift: int) -> bytes:
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
    return _MAGIC.pack((magic & ~_REVISION_MASK) | _REVISION_3) + sets + _MAGIC.pack(shift_id(root, shift))
