"""Makes a golden catalog of the present format: `python -m tests.golden.make_catalog FILE.db`, once before there is a
newer one.

What it holds is said in FILE.json, read back with the version that wrote it.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from snapshotd.catalog import schema
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.types import ApprovalStatus, CallStatus, Compensation, SnapshotState
from tests.records import CREATED_AT_NS, World, blobs_of, make_approval

OLDER = range(schema.OLDEST, schema.VERSION)
"""The versions that are brought up to date. There is a golden catalog of each."""
_PLACES = (("default", "notes", "key"), ("default", "notes/below", "key"), ("\ud800", "ns", "välue"))
"""(tenant, namespace, key) of values."""


def make(path: Path) -> None:
    """A catalog in a new file, and what it holds in another one beside it."""
    with closing(SqliteCatalog(path)) as catalog:
        catalog.set_meta("instance", "7")
        world = World(catalog, random.Random(7))
        for number, snapshot in enumerate(world.grow(24)):
            if number % 3 == 0:
                world.store(snapshot)
        catalog.snapshots.set_state([world.all[1].id], SnapshotState.LOST)
        catalog.snapshots.set_pruned([world.all[3].id])
        for trajectory in catalog.trajectories.list()[:2]:
            catalog.trajectories.draw_fence(trajectory.id)
        _decisions(catalog, world)
        _values(catalog)
        content = read(catalog)
    path.with_suffix(".json").write_text(lines(content))


def _decisions(catalog: Catalog, world: World) -> None:
    asked = [make_approval(snapshot) for snapshot in world.all[:3]]
    asked[1] = replace(asked[1], question="now?", expires_at_ns=CREATED_AT_NS + 9)
    for approval in asked:
        catalog.approvals.add(approval)
    catalog.approvals.decide(
        asked[1].id, ApprovalStatus.APPROVED, at_ns=CREATED_AT_NS + 1, by="someone", reason=None, edited=([1.5],)
    )
    catalog.approvals.decide(asked[2].id, ApprovalStatus.DENIED, at_ns=CREATED_AT_NS + 2, by=None, reason="no \ud800")
    entries = [entry for snapshot in world.all for entry in catalog.journal.own(snapshot.id)][:2]
    for entry in entries:
        catalog.compensations.begin(Compensation(entry.id, world.all[0].trajectory, None, CREATED_AT_NS))
    catalog.compensations.end(
        entries[0].id, CallStatus.FAILED, at_ns=CREATED_AT_NS + 3, exit_code=2, error="it did not"
    )


def _values(catalog: Catalog) -> None:
    for place in _PLACES:
        for value in ({"a": [None, 1.5]}, "\ud800", None):
            catalog.values.put(*place, value, now_ns=CREATED_AT_NS)
    catalog.values.delete(*_PLACES[0], now_ns=CREATED_AT_NS + 1)
    catalog.values.put(*_PLACES[1], "for a while", now_ns=CREATED_AT_NS, expires_at_ns=CREATED_AT_NS + 10**18)


def read(catalog: Catalog) -> dict[str, Any]:
    """All that a catalog holds, in JSON."""
    snapshots = list(catalog.snapshots.all())
    entries = {one.id: [asdict(entry) for entry in catalog.journal.own(one.id)] for one in snapshots}
    made_up = [catalog.compensations.get(entry["id"]) for found in entries.values() for entry in found]
    content = {
        "images": [asdict(image) for image in catalog.images.list()],
        "trajectories": [asdict(trajectory) for trajectory in catalog.trajectories.list()],
        "snapshots": [asdict(snapshot) for snapshot in snapshots],
        "conversations": {
            one.id: [asdict(message) for message in catalog.conversations.read(one.id)] for one in snapshots
        },
        "layers": sorted(catalog.snapshots.referenced_layers()),
        "blobs": sorted(blobs_of(catalog)),
        "records": {one.id: catalog.snapshots.record(one.id) for one in snapshots},
        "states": {
            one.id: [catalog.conversations.state(one.id), catalog.conversations.own_state(one.id)] for one in snapshots
        },
        "entries": entries,
        "unbound": {
            one.id: [asdict(entry) for entry in catalog.journal.unbound(one.id)] for one in catalog.trajectories.list()
        },
        "approvals": [asdict(approval) for approval in catalog.approvals.list()],
        "compensations": [asdict(one) for one in made_up if one is not None],
        "values": [asdict(value) for place in _PLACES for value in catalog.values.history(*place)],
    }
    return json.loads(json.dumps(content))  # type: ignore[no-any-return]


def expected(version: int) -> dict[str, Any]:
    """What that version read, in the words of today."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / f"catalog-v{version}.json").read_text())
    for snapshot in content["snapshots"]:
        snapshot.setdefault("refused", [])
    for spec in (trajectory["spec"] for trajectory in content["trajectories"]):
        if isinstance(spec["network"], str):
            spec["network"] = {"kind": spec["network"], "rules": []}
    return content


def lines(content: dict[str, Any]) -> str:
    """JSON with a line for each row of a part."""
    parts = []
    for name, part in sorted(content.items()):
        rows = [json.dumps(row) for row in part] if isinstance(part, list) else []
        rows += [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in part.items()] if isinstance(part, dict) else []
        ends = "[]" if isinstance(part, list) else "{}"
        parts.append(f'"{name}": {ends[0]}\n' + ",\n".join(rows) + f"\n{ends[1]}")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    make(Path(sys.argv[1]))
