"""A rewind of a folder that has begun: noted before the first file changes, so that one that is cut off can be settled,
and what it has changed is not taken for somebody's."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotd.engine.folders.calls import Part
from snapshotd.engine.folders.names import name_of, path_of
from snapshotd.engine.folders.rewinding.out_place import new_place
from snapshotd.engine.folders.rewinding.plan import FolderChanges, RewindPlan
from snapshotd.engine.folders.rewinding.putting_back import PuttingBack, relative
from snapshotd.types import Snapshot, SnapshotID


@dataclass(frozen=True, slots=True)
class CutOff:
    """The rewind from `head` to `to`. `paths`: as they are numbered in `place`; `changes`: whose they were."""

    head: SnapshotID
    to: SnapshotID
    place: bytes
    paths: Sequence[bytes]
    changes: FolderChanges

    @staticmethod
    def of(head: Snapshot, to: Snapshot, plan: RewindPlan) -> CutOff:
        """The rewind that follows a plan."""
        changes = FolderChanges()
        for path, owners in plan.owners.items():
            changes.add(owners, path)
        return CutOff(head.id, to.id, new_place(), [relative(change) for change in plan.changes], changes)

    def text(self) -> str:
        """The form that the catalog keeps."""
        names = [name_of(path) for path in self.paths]
        facts = {"head": self.head, "to": self.to, "place": self.place.decode(), "paths": names}
        return json.dumps(facts | {"changes": self.changes.record(0)})

    @staticmethod
    def at(text: str) -> CutOff:
        """Read the text that the catalog keeps."""
        facts = json.loads(text)
        paths = [path_of(name) for name in facts["paths"]]
        return CutOff(facts["head"], facts["to"], facts["place"].encode(), paths, FolderChanges.of(facts["changes"]))

    def claim(self, parts: Sequence[Part], folder: PuttingBack) -> None:
        """Give changes that the rewind made back to their owners: at such a path lies what `to` has."""
        planned = set(self.paths)
        for part in parts:
            for path in map(os.fsencode, part.paths):
                if path in planned and folder.holds(path):
                    part.changes.replace(self.changes.owners(path), path)
