"""The one writer of a trajectory: its head as the sandbox knows it, and the fence under which the sandbox moves it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.errors import Conflict
from snapshotd.types import Snapshot, SnapshotID, TrajectoryID, short


@dataclass(slots=True)
class TrajectoryWriter:
    """The writer of one sandbox, whose lock guards it."""

    head: SnapshotID
    """The snapshot that the next one's parent will be."""
    seq: int
    messages: int
    """Number of messages in the conversation of the head."""
    fence: int | None = None
    """The fence of this trajectory's one writer; None: nothing is recorded (a throw-away sandbox)."""
    _claimed: SnapshotID | None = None
    """The head from which a client that named it is taking the next step."""

    def own(self, fence: int) -> None:
        """Record under this fence from now on."""
        self.fence = fence

    def move_to(self, head: Snapshot) -> None:
        """Take this snapshot for the trajectory's head."""
        self.head, self.seq, self.messages = head.id, head.seq, head.messages

    @contextlib.contextmanager
    def claim(self, lock: threading.RLock, trajectory: TrajectoryID, head: SnapshotID | None) -> Iterator[None]:
        """Lets one of several clients that name the same head go on; the others raise Conflict until it is done. Takes
        the sandbox's `lock`."""
        if head is None:
            yield
            return
        name = short(trajectory)
        with lock:
            if self.head != head:
                raise Conflict(
                    f"the head of {name} is {short(self.head)} and not {short(head)}: look at what came since (`snapshotd log {name}`) "
                    f"and go on from there, or fork the other one (`snapshotd fork {short(head)}`)"
                )
            if self._claimed == head:
                raise Conflict(
                    f"another writer is taking the next step of {name} from its head {short(head)}: wait for it and go on from the new "
                    f"head, or fork (`snapshotd fork {short(head)}`)"
                )
            self._claimed = head
        try:
            yield
        finally:
            with lock:
                if self._claimed == head:  # else a writer without a claim moved the head, and another has claimed that
                    self._claimed = None
