"""Ends the processes of a sandbox that takes more disk than its limit, if the file system keeps no project quotas.

It is a substitute: a project quota tells a program that no space is left. Here a second passes between two checks, in
which a sandbox may take any space it gets; then its processes are ended as at its memory limit. Their files are
captured like any others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from snapshotd.engine.context import Context
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import SnapshotdError
from snapshotd.kernel import files
from snapshotd.kernel.quota import Used
from snapshotd.layers.disk_use import measure
from snapshotd.terms import number_of
from snapshotd.types import LayerID, short

_EVERY_S = 1.0
_REST = 5
"""After a check, the thread rests for this many times the check's duration."""
_log = logging.getLogger(__name__)


class DiskWatch:
    """See the module's text. `live`: the sandboxes that run. One thread; none where the file system keeps quotas."""

    def __init__(self, context: Context, live: Callable[[], list[Sandbox]]) -> None:
        self._context, self._live = context, live
        self._closing = threading.Event()
        self._seen: dict[LayerID, Used] = {}
        self._free: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        if not context.store.limits.enforced:
            self._thread = threading.Thread(target=self._work, name="disk-watch")
            self._thread.start()

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        rest = _EVERY_S
        while not self._closing.wait(rest):
            began = time.monotonic()
            st = os.statvfs(self._context.store.root)
            sandboxes = self._live()
            if (st.f_bfree, st.f_ffree) != self._free:
                self._free = st.f_bfree, st.f_ffree
                for sandbox in sandboxes:
                    self._look(sandbox)
                self._seen = {s.root.upper: self._seen[s.root.upper] for s in sandboxes if s.root.upper in self._seen}
            rest = max(_EVERY_S, _REST * (time.monotonic() - began))

    def _look(self, sandbox: Sandbox) -> None:
        """End a sandbox above its limit, unless it takes no more than at the last look: it may be removing things."""
        upper, room = sandbox.root.upper, sandbox.root.room()
        before = self._seen.get(upper, Used(0, 0))
        try:
            with files.closing_fd(self._context.store.read_upper(upper)) as fd:
                found = measure(fd, Used(max(room.bytes, before.bytes), max(room.inodes, before.inodes)))
            self._seen[upper] = found
            if (found.bytes > room.bytes and found.bytes > before.bytes) or (
                found.inodes > room.inodes and found.inodes > before.inodes
            ):
                self._end(sandbox, upper, room)
        except (SnapshotdError, OSError) as exc:
            _log.debug(
                "sandbox of %s cannot be looked at: %s", short(sandbox.trajectory.id), exc
            )  # it has ended, or moved on

    def _end(self, sandbox: Sandbox, upper: LayerID, room: Used) -> None:
        with sandbox.lock:
            if sandbox.closed or sandbox.root.upper != upper:
                return
            sentence = (
                f"what ran in the sandbox of {short(sandbox.trajectory.id)} was ended: it had written more than the {room.bytes} bytes or "
                f"{number_of(room.inodes, 'file')} that its disk limit leaves it; rewind it, or begin again with a larger limit"
            )

            def every(pids: list[int]) -> list[int]:
                sandbox.use.ended_for.append(sentence)
                return pids

            sandbox.kill(every)
        _log.warning("%s", sentence)
        log = self._context.events.live(sandbox.trajectory.id)
        if log is not None:
            log.append({"event": "warning", "message": sentence})
