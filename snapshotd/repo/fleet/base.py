"""The repository of a fleet: many nodes, one bucket, one key, and one writer for each node's prefix.

    nodes/<node>/packs/<aa>/<id>      the packs that a node made
    nodes/<node>/index/<n>            its index segments (format/segment.py): 1, 2, 3, ..., written once
    nodes/<node>/tombstones/<pack>    a pack of the node that the garbage collection condemned, and when
    reads/<tree>.<below>              the order in which a tree was read when it began cold (reads.py)
    fleet/key                         the proof that a node has the fleet's key

Every node has an index of all packs (`FleetIndex`): its own changes, and the segments of the others, merged in their order.
So what one node has stored no other stores again, and each reads what all have stored.

Publishing. Packs are durable, then the local index, then the segment (`FleetMaintenance.publish`), then the caller's
transaction in the catalog of the fleet. A crash in between leaves a segment that nothing refers to yet, which is no harm,
and the next publication puts the same bytes again.

Garbage. Any number of collections may run at once, though one at a time is enough. They lose
nothing that a published snapshot needs, because an object goes in three steps, and each node learns of each by a segment:

    condemned    no root reached it: it can be read, and no new object builds upon it
    removed      a pack with condemned objects alone, or whose objects were copied, has a tombstone
    gone         it was condemned for the grace, and a collection that read its roots after that did not reach it either

A publication whose objects were condemned meanwhile takes them back (they are written into its segment) while less than
half of the grace has passed, and is refused with Conflict later: its snapshots are archived again. So a root that needs a
condemned object is in the catalog before the collection that would delete it reads the roots. The caller commits a publication
to the catalog within a quarter of the grace; a node's lease is far shorter. Clocks of nodes may differ by a quarter, too.

Errors: as of the repository; besides them NotPermitted (another key), Conflict (a publication must be archived again).
"""

from __future__ import annotations

import re

import blake3

from snapshotd.errors import Conflict, NotPermitted, UsageError
from snapshotd.store.base import Store

GRACE_S = 24 * 3600.0
"""Time between the condemnation of a pack and its deletion."""
_KEY = "fleet/key"
_NODE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def check_node(node: str) -> str:
    """`node` itself. UsageError when it cannot be a part of a key."""
    if not _NODE.fullmatch(node):
        raise UsageError(f"{node[:100]!r} is not the name of a node: use 1 to 63 of a-z, 0-9 and -, no - at either end")
    return node


def segment_key(node: str, number: int) -> str:
    """Key of a segment in the bucket; keys sort as numbers do."""
    return f"nodes/{node}/index/{number:010}"


def tombstone_key(node: str, pack: bytes) -> str:
    """Key of the tombstone of a pack of a node."""
    return f"nodes/{node}/tombstones/{pack.hex()}"


def check_key(store: Store, key: bytes) -> None:
    """Compare a node's key with the fleet's. The first node of a fleet writes the proof. NotPermitted when they differ.

    The key itself is a file that the operator brings to each node, because a bucket that holds the key protects nothing;
    the proof (a hash that is keyed with it) tells nothing about it.
    """
    proof = blake3.blake3(key, derive_key_context="snapshotd 1 proof of the fleet's key").hexdigest()
    try:
        store.put(_KEY, [f"snapshotd fleet key 1 {proof}\n".encode()])
    except Conflict:
        raise NotPermitted(
            "the key of this node's repository is not the key of the fleet in this bucket, so neither could read what the "
            "other stores: copy the file `repo/key` of another node before this one starts for the first time"
        ) from None
