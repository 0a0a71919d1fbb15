"""The parts of the client's verbs: the way to the daemon, refs and paths for it, and waiting until a snapshot is
stored."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from snapshotd.api import operations
from snapshotd.api.operations import Operation
from snapshotd.api.record import Request
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.client.transport import Transport
from snapshotd.errors import DaemonUnavailable, UsageError

Wait = Literal["captured", "stored"]
"""Durability that a method waits for when it makes a snapshot: `captured` survives a crash of the daemon, `stored` also
a power loss."""


Verb = TypeVar("Verb", bound=Callable[..., Any])


def on_this_machine(verb: Verb) -> Verb:
    """Marks a verb that works on files of this machine, or that is made of many requests at once. The asynchronous
    client runs it in a thread (`aio/apart.py`)."""
    return verb


class Verbs:
    """Base of the parts of `Snapshotd`; each part holds the verbs of one subject."""

    _transport: Transport

    def flush(self, trajectory: str | None = None) -> None:
        """Return when every snapshot so far (of one trajectory, or all) survives power loss."""
        self._transport.call(operations.FLUSH, query={"trajectory": trajectory})

    def snapshot(self, ref: str) -> SnapshotInfo:
        return self._transport.call(operations.SNAPSHOT, ref)

    def _settled(self, taken: SnapshotInfo, wait: Wait) -> SnapshotInfo:
        """The snapshot as it is after the wait."""
        if wait == "captured":
            return taken
        self.flush(taken.trajectory)
        return self.snapshot(taken.id)

    def _step(self, operation: Operation[SnapshotInfo], ref: str, body: Request | None, wait: Wait) -> SnapshotInfo:
        """An operation that is answered with the snapshot of one step."""
        check_wait(wait)
        return self._settled(self._transport.call(operation, ref, body=body), wait)


def check_wait(wait: str) -> None:
    if wait not in ("captured", "stored"):
        raise UsageError(f"{wait!r} is nothing to wait for; use captured or stored")


Progress = Callable[[str], object]
"""Receives one line of progress for people."""


def b64(path: str | bytes) -> str:
    """A sandbox path, or any bytes, for a request."""
    return base64.urlsafe_b64encode(os.fsencode(path)).decode()


def result_of(events: Iterator[dict[str, Any]], progress: Progress | None, what: str, then: str) -> dict[str, Any]:
    """The last event of long work, whose lines of progress go to `progress`."""
    for event in events:
        if event["event"] == "progress" and progress is not None:
            progress(event["message"])
        elif event["event"] == "result":
            return event
    raise DaemonUnavailable(f"the daemon ended {what} without a result; {then}")
