"""The tags of a node that the fleet is told of, as far as their snapshots are published."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from snapshotd.catalog.base import Catalog
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.errors import Conflict, NotFound
from snapshotd.types import SnapshotID

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TagChanges:
    """Changes of tags for the fleet. `now`: all tags that it knows afterwards; `given`: the new and moved ones;
    `taken`: names that are gone."""

    now: dict[str, SnapshotID]
    given: dict[str, SnapshotID]
    taken: tuple[str, ...]

    @property
    def any(self) -> bool:
        return bool(self.given or self.taken)


class PublishedTags:
    """For the publisher's thread."""

    def __init__(self, catalog: Catalog, fleet: Catalog, marks: PublishedMarks) -> None:
        self._catalog, self._fleet, self._marks = catalog, fleet, marks

    def changes(self, going: Collection[SnapshotID]) -> TagChanges:
        """Compare the tags with those that the fleet was told of. `going`: snapshots that are published with them."""
        told, here = self._marks.told_tags(), self._catalog.refs.tags()
        if here == told:
            return TagChanges(told, {}, ())
        there = {
            one.id
            for one in self._catalog.snapshots.get_many(here.values()).values()
            if one.id in going or self._marks.is_published(one)
        }
        now = {name: snapshot for name, snapshot in here.items() if snapshot in there}
        given = {name: snapshot for name, snapshot in now.items() if told.get(name) != snapshot}
        return TagChanges(now, given, tuple(name for name in told if name not in here))

    def write(self, tags: TagChanges) -> None:
        """A tag that another node's thing has stays as it is there. Within a transaction."""
        for name in tags.taken:
            with suppress(NotFound):
                self._fleet.refs.untag(name)
        for name, snapshot in tags.given.items():
            try:
                self._fleet.refs.tag(snapshot, name, move=True)
            except (Conflict, NotFound) as exc:
                _log.warning("the tag %s stays on this node: %s", name, exc.message)
