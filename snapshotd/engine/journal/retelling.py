"""The conversation that a replayed program tells again: its messages are compared with the recorded ones, and not
recorded twice.

Where a person has edited the conversation (editing.py), the program still meets what was recorded before: up to the
edited snapshot it tells, and is told, the conversation of that snapshot. With the last call before the edit it comes to
the edited conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.held import LOOKED_AT, HeldMessages, messages_in, unanswered
from snapshotd.engine.journal.replay import EDITED, canonical
from snapshotd.engine.markers import EDIT, is_marker
from snapshotd.types import CallID, JournalEntry, Message, Snapshot


class OtherWords(Exception):  # noqa: N818 - what happened, for `Retracing` to judge
    """The program says something else than the recorded message that comes next; `recorded` None: nothing more is
    recorded."""

    def __init__(self, recorded: Message | None) -> None:
        super().__init__()
        self.recorded = recorded


@dataclass(frozen=True, slots=True)
class Edit:
    """Snapshot `edited`, which a person has made of `source`. `entries`: the calls up to it. `held`: messages that wait for
    a result (held.py)."""

    source: Snapshot
    edited: Snapshot
    entries: Set[CallID]
    held: tuple[Message, ...] = ()


class Retelling:
    """Not thread-safe: `Retracing` holds its lock. `edits`: those on the way to `head`, in order; `met`: tells if the
    program has met all of these calls."""

    def __init__(
        self, catalog: Catalog, began: Snapshot, head: Snapshot, edits: list[Edit], met: Callable[[Set[CallID]], bool]
    ) -> None:
        self._catalog, self._head, self._met = catalog, head, met
        self._edits = [edit for edit in edits if _says_otherwise(catalog, edit)]
        self._position = began.messages
        self.held = HeldMessages()
        """The messages that wait for results of calls at its position."""

    @staticmethod
    def count_same(one: Iterable[Message], other: Iterable[Message]) -> int:
        """The number of messages with which both begin."""
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

    @property
    def position(self) -> int:
        """Number of messages that the program knows of."""
        while self._edits and self._position >= self._edits[0].source.messages and self._met(self._edits[0].entries):
            self._pass_edit()
        return self._position

    def known_messages(self, start: int) -> Iterator[Message]:
        """The messages that the program knows of, from number `start`."""
        count = max(0, self.position - start)
        return islice(self._catalog.conversations.read(self._told.id, start), count) if count else iter(())

    def meet(self, message: Message) -> None:
        """Take this message for the recorded one that comes next. OtherWords: it is another."""
        position = self.position
        before, after, held = self.held.around(message)
        recorded = self._read(position, len(before) + 1 + len(after))
        if tuple(recorded[: len(before)]) != before:
            raise OtherWords(recorded[0] if recorded else None)
        known = next(iter(recorded[len(before) :]), None)
        if known is None or (known.role, canonical(known.content)) != (message.role, canonical(message.content)):
            raise OtherWords(known)
        joined = tuple(recorded[len(before) + 1 :]) == after
        self.held = held if joined else HeldMessages(after)
        self._position = position + len(before) + 1 + (len(after) if joined else 0)

    def take_around(self, message: Message) -> tuple[Sequence[Message], Sequence[Message]]:
        """Take the messages of a person that come before and behind this new one of the program."""
        before, after, self.held = self.held.around(message)
        return before, after

    def skip(self, count: int) -> None:
        """Count `count` more messages as known: the program does not send them again."""
        self._move(self.position + count)

    def reach(self, call: CallID, messages: int) -> None:
        """Count all messages up to this call, whose snapshot has `messages` of them, as known to the program."""
        while self._edits and call not in self._edits[0].entries:
            self._pass_edit()
        self._move(max(self._position, messages))

    def _pass_edit(self) -> None:
        edit = self._edits.pop(0)
        self._position = edit.edited.messages
        if edit.held:
            end = self._read(max(0, self._position - LOOKED_AT), LOOKED_AT, edit.edited)
            self.held = HeldMessages(self.held.messages + edit.held, unanswered(end))

    def _move(self, position: int) -> None:
        """Count the messages before number `position` as known."""
        if self.held.messages:
            self.held = self.held.behind(self._read(self._position, position - self._position))
        self._position = position

    def _read(self, start: int, count: int, upto: Snapshot | None = None) -> list[Message]:
        """`count` messages from number `start`: of the conversation that the program tells, or of the one up to a snapshot."""
        told = upto or self._told
        count = min(count, told.messages - start)
        return list(islice(self._catalog.conversations.read(told.id, start), count)) if count > 0 else []

    @property
    def _told(self) -> Snapshot:
        """The end of the conversation that the program tells."""
        return self._edits[0].source if self._edits else self._head


def edits(catalog: Catalog, began: Snapshot, head: Snapshot) -> list[Edit]:
    """The edits on the way from the beginning to the head, in order."""
    found: list[Edit] = []
    trajectory = catalog.trajectories.get(head.trajectory)
    while trajectory.forked_from is not None and trajectory.id != began.trajectory:
        first = next(iter(catalog.snapshots.of_trajectory(trajectory.id)), None)
        if first is not None and first.parent is not None and is_marker(catalog, first, (EDIT,)):
            entries = frozenset(entry.id for entry in catalog.journal.read(first.id, since=began.id))
            found.insert(
                0, Edit(catalog.snapshots.get(first.parent), first, entries, messages_in(first.call.arguments))
            )
        trajectory = catalog.trajectories.get(catalog.snapshots.get(trajectory.forked_from).trajectory)
    return found


def held_at(catalog: Catalog, began: Snapshot, head: Snapshot, pending: Sequence[Message]) -> HeldMessages:
    """The messages that wait for a result at a head where no replay knows them. `pending`: messages that no snapshot binds yet."""
    found = [edit for edit in edits(catalog, began, head) if edit.held]
    if not found:
        return HeldMessages()
    retelling = Retelling(catalog, began, head, found[-1:], lambda _: True)
    retelling.reach(head.call.id, head.messages)
    return retelling.held.behind(pending)


def _says_otherwise(catalog: Catalog, edit: Edit) -> bool:
    """True if the edit has changed the conversation, or the place in it from which its own messages count."""
    return bool(edit.held or edit.source.messages != edit.edited.messages or catalog.conversations.own(edit.edited.id))


def files_left_by(catalog: Catalog, entry: JournalEntry) -> Snapshot | None:
    """The snapshot with the files that the call left; None if the entry is not of a call that ended with one."""
    if entry.snapshot is None:
        return None
    snapshot = catalog.snapshots.get(entry.snapshot)
    return snapshot if snapshot.call.id == entry.id or EDITED in entry.details else None


_CHANGED_BY_PEOPLE = (EDIT, "retry")
"""Markers with a state that no program has made."""


def changes_by_people(
    catalog: Catalog, reached: Snapshot, head: Snapshot
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The changes of the state that people made from `reached` to `head`, as the states before and after, oldest first."""
    changes = []
    while head.id != reached.id and head.continues is not None:
        before = catalog.snapshots.get(head.continues)
        if is_marker(catalog, head, _CHANGED_BY_PEOPLE):
            changes.append((catalog.conversations.state(before.id), catalog.conversations.state(head.id)))
        head = before
    return changes[::-1]
