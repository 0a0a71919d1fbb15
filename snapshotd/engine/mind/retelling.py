"""The conversation that a replayed program tells again: its messages are compared with the recorded ones, and not
recorded twice.

Where a person has edited the conversation (editing.py), the program still sends its first messages: those messages are
passed over, and the edited ones stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.catalog.base import Catalog
from snapshotd.engine.mind.replay import canonical
from snapshotd.types import Message, Snapshot

_EDIT = "edit"


class OtherWords(Exception):  # noqa: N818 - what happened, for the recorder to judge
    """The program says something else than the recorded message that comes next; `recorded` None: nothing more is
    recorded."""

    def __init__(self, recorded: Message | None) -> None:
        super().__init__()
        self.recorded = recorded


@dataclass(slots=True)
class _Edited:
    """Messages `start` to `end` of the conversation stand where the program says `said` others."""

    start: int
    end: int
    said: int


class Retelling:
    """Not thread-safe: the recorder holds its lock. `position`: how many messages of the conversation the program knows
    of."""

    def __init__(self, catalog: Catalog, began: Snapshot, head: Snapshot) -> None:
        self._catalog, self._head = catalog, head
        self._edited = _edits(catalog, began, head)
        self.position = began.messages
        self._pass_over(0)

    def meet(self, message: Message) -> None:
        """Take the recorded message that this is. OtherWords."""
        if self._edited and self.position == self._edited[0].start and self._edited[0].said:
            self._pass_over(1)
            return
        known = None
        if self.position < self._head.messages:
            known = next(self._catalog.conversation(self._head.id, self.position), None)
        if known is None or (known.role, canonical(known.content)) != (message.role, canonical(message.content)):
            raise OtherWords(known)
        self.position += 1
        self._pass_over(0)

    def skip(self, count: int) -> None:
        """The program knows `count` more messages without sending them again."""
        for _ in range(count):
            if self._edited and self.position == self._edited[0].start and self._edited[0].said:
                self._pass_over(1)
            else:
                self.position += 1
                self._pass_over(0)

    def reach(self, position: int) -> None:
        """The program knows of everything up to there."""
        self.position = max(self.position, position)
        while self._edited and self._edited[0].end <= self.position:
            del self._edited[0]

    def _pass_over(self, said: int) -> None:
        while self._edited and self.position == self._edited[0].start:
            self._edited[0].said -= said
            said = 0
            if self._edited[0].said > 0:
                return
            self.position = self._edited.pop(0).end


def _edits(catalog: Catalog, began: Snapshot, head: Snapshot) -> list[_Edited]:
    """The edits on the way from the beginning to the head, in order."""
    found: list[_Edited] = []
    trajectory = catalog.get_trajectory(head.trajectory)
    while trajectory.forked_from is not None and trajectory.id != began.trajectory:
        first = next(iter(catalog.snapshots(trajectory.id)), None)
        if first is not None and first.call.name == _EDIT and first.parent is not None:
            start = first.messages - len(catalog.own_messages(first.id))
            said = catalog.get_snapshot(first.parent).messages - start
            if first.messages - start or said:
                found.insert(0, _Edited(start, first.messages, said))
        trajectory = catalog.get_trajectory(catalog.get_snapshot(trajectory.forked_from).trajectory)
    return found
