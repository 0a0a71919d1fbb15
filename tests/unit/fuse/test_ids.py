from __future__ import annotations

import struct

from snapshotd.fuse.ids import shift_xattrs
from snapshotd.trees.target import UNMAPPED_ID, shift_id

SHIFT = 1_700_000_000
NO_ID = 0xFFFFFFFF


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_ids_are_moved_and_what_has_no_place_above_is_nobodys() -> None:
    assert shift_id(1000, 0) == 1000
    assert shift_id(0, SHIFT) == SHIFT
    assert shift_id(0xFFFFFFFE - SHIFT, SHIFT) == 0xFFFFFFFE
    assert shift_id(0xFFFFFFFF - SHIFT, SHIFT) == UNMAPPED_ID
    assert shift_id(0xFFFFFFFE, SHIFT) == UNMAPPED_ID


def test_without_a_shift_only_overlayfs_own_are_hidden() -> None:
    given = {
        b"user.x": b"1",
        b"security.capability": b"odd",
        b"trusted.overlay.opaque": b"y",
        b"trusted.overlay.redirect": b"/etc",
    }
    assert shift_xattrs(given, 0) == {b"user.x": b"1", b"security.capability": b"odd"}


def test_named_users_and_groups_of_acls_are_shifted() -> None:
    entries = ((0x01, 7, NO_ID), (0x02, 4, 1000), (0x04, 5, NO_ID), (0x08, 6, 20), (0x10, 7, NO_ID), (0x20, 0, NO_ID))
    moved = (
        (0x01, 7, NO_ID),
        (0x02, 4, SHIFT + 1000),
        (0x04, 5, NO_ID),
        (0x08, 6, SHIFT + 20),
        (0x10, 7, NO_ID),
        (0x20, 0, NO_ID),
    )
    for name in (b"system.posix_acl_access", b"system.posix_acl_default"):
        assert shift_xattrs({name: acl(*entries)}, SHIFT) == {name: acl(*moved)}


def test_capabilities_of_the_hosts_root_become_those_of_the_containers() -> None:
    def shifted(value: bytes) -> bytes:
        return shift_xattrs({b"security.capability": value}, SHIFT)[b"security.capability"]

    second = struct.pack("<IIIII", 0x02000001, 1, 2, 3, 4)
    assert shifted(second) == struct.pack("<IIIIII", 0x03000001, 1, 2, 3, 4, SHIFT)
    assert shifted(struct.pack("<III", 0x01000000, 1, 2)) == struct.pack("<IIIIII", 0x03000000, 1, 2, 0, 0, SHIFT)
    third = struct.pack("<IIIIII", 0x03000001, 1, 2, 3, 4, 100)
    assert shifted(third) == struct.pack("<IIIIII", 0x03000001, 1, 2, 3, 4, SHIFT + 100)


def test_malformed_values_stay_as_they_are_for_the_kernel_to_refuse() -> None:
    for name, values in {
        b"system.posix_acl_access": (b"", b"\2", b"\2\0\0\0\1", struct.pack("<IHHI", 3, 2, 4, 1000)),
        b"security.capability": (
            b"",
            b"\0\0",
            struct.pack("<III", 0x02000001, 1, 2),
            struct.pack("<IIIII", 0x09000001, 1, 2, 3, 4),
        ),
    }.items():
        for value in values:
            assert shift_xattrs({name: value}, SHIFT) == {name: value}
