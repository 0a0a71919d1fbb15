"""The conversation that a replayed program tells again: its messages are compared with the recorded ones, and not
recorded twice.

Where a person has edited the conversation (editing.py), the program still meets what was recorded before: up to the
edited snapshot it tells, and is told, the conversation of that snapshot. With the last call before the edit it comes to
the edited conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.mind.replay import EDITED, canonical
from snapshotd.types import CallID, JournalEntry, Message, Snapshot

_EDIT = "edit"


class OtherWords(Exception):  # noqa: N818 - what happened, for `Retracing` to judge
    """The program says something else than the recorded message that comes next; `recorded` None: nothing more is
    recorded."""

    def __init__(self, recorded: Message | None) -> None:
        super().__init__()
        self.recorded = recorded


@dataclass(frozen=True, slots=True)
class Edit:
    """Snapshot `edited`, which a person has made of `source`. `entries`: the calls up to it."""

    source: Snapshot
    edited: Snapshot
    entries: Set[CallID]


class Retelling:
    """Not thread-safe: `Retracing` holds its lock. `edits`: those on the way to `head`, in order; `met`: tells if the
    program has met all of these calls."""

    def __init__(
        self, catalog: Catalog, began: Snapshot, head: Snapshot, edits: list[Edit], met: Callable[[Set[CallID]], bool]
    ) -> None:
        self._catalog, self._head, self._met = catalog, head, met
        self._edits = [edit for edit in edits if _says_otherwise(catalog, edit)]
        self._position = began.messages

    @property
    def position(self) -> int:
        """Number of messages that the program knows of."""
        while self._edits and self._position >= self._edits[0].source.messages and self._met(self._edits[0].entries):
            self._position = self._edits.pop(0).edited.messages
        return self._position

    def known(self, start: int) -> Iterator[Message]:
        """The messages that the program knows of, from number `start`."""
        count = max(0, self.position - start)
        return islice(self._catalog.conversation(self._told.id, start), count) if count else iter(())

    def meet(self, message: Message) -> None:
        """Take the recorded message that this is. OtherWords."""
        position = self.position
        known = None
        if position < self._told.messages:
            known = next(self._catalog.conversation(self._told.id, position), None)
        if known is None or (known.role, canonical(known.content)) != (message.role, canonical(message.content)):
            raise OtherWords(known)
        self._position += 1

    def skip(self, count: int) -> None:
        """The program knows `count` more messages without sending them again."""
        self._position = self.position + count

    def reach(self, call: CallID, messages: int) -> None:
        """The program knows of everything up to this call, whose snapshot has so many messages."""
        while self._edits and call not in self._edits[0].entries:
            self._position = self._edits.pop(0).edited.messages
        self._position = max(self._position, messages)

    @property
    def _told(self) -> Snapshot:
        """The end of the conversation that the program tells."""
        return self._edits[0].source if self._edits else self._head


def edits(catalog: Catalog, began: Snapshot, head: Snapshot) -> list[Edit]:
    """The edits on the way from the beginning to the head, in order."""
    found: list[Edit] = []
    trajectory = catalog.get_trajectory(head.trajectory)
    while trajectory.forked_from is not None and trajectory.id != began.trajectory:
        first = next(iter(catalog.snapshots(trajectory.id)), None)
        if first is not None and first.call.name == _EDIT and first.parent is not None:
            entries = frozenset(entry.id for entry in catalog.journal(first.id, since=began.id))
            found.insert(0, Edit(catalog.get_snapshot(first.parent), first, entries))
        trajectory = catalog.get_trajectory(catalog.get_snapshot(trajectory.forked_from).trajectory)
    return found


def _says_otherwise(catalog: Catalog, edit: Edit) -> bool:
    """True if the edit has changed the conversation, or the place in it from which its own messages count."""
    return edit.source.messages != edit.edited.messages or bool(catalog.own_messages(edit.edited.id))


def files_left_by(catalog: Catalog, entry: JournalEntry) -> Snapshot | None:
    """The snapshot with the files that the call left; None if the entry is not of a call that ended with one."""
    if entry.snapshot is None:
        return None
    snapshot = catalog.get_snapshot(entry.snapshot)
    return snapshot if snapshot.call.id == entry.id or EDITED in entry.details else None


_CHANGED_BY_PEOPLE = ("edit", "retry")
"""Markers with a state that no program has made."""


def changes_by_people(
    catalog: Catalog, reached: Snapshot, head: Snapshot
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The changes of the state that people made from `reached` to `head`, as the states before and after, oldest first."""
    changes = []
    while head.id != reached.id and head.continues is not None:
        before = catalog.get_snapshot(head.continues)
        if head.call.name in _CHANGED_BY_PEOPLE:
            changes.append((catalog.state(before.id), catalog.state(head.id)))
        head = before
    return changes[::-1]
