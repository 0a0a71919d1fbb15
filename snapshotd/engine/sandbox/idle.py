"""Ends sandboxes in which nothing happened for so long as they were given, with a last snapshot, as `stop` does.

Something happens while a command or an agent runs, and when the head moves: a command has ended, a rewind was made. A
client may keep a sandbox alive without either.
Background processes do not count. `exec` starts such a sandbox again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import SnapshotdError
from snapshotd.types import ContainerID, SnapshotID, short

_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class IdleWatch:
    """See the module's text. `live`: the sandboxes that may be ended; `stop` ends one, if no command has begun in it.
    One thread."""

    def __init__(self, live: Callable[[], list[Sandbox]], stop: Callable[[Sandbox], None]) -> None:
        self._live, self._stop = live, stop
        self._closing = threading.Event()
        self._last: dict[ContainerID, tuple[SnapshotID, float]] = {}
        """The head of each, and when something happened last."""
        self._thread = threading.Thread(target=self._work, name="idle-watch")
        self._thread.start()

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(_EVERY_S):
            now, last = time.monotonic(), self._last
            self._last = {}
            for sandbox in self._live():
                head, since = last.get(sandbox.container.id, (None, now))
                if sandbox.use.commands or sandbox.use.agent_running or sandbox.head != head:
                    since = now
                since = max(since, sandbox.use.kept_alive_s)
                self._last[sandbox.container.id] = (sandbox.head, since)
                if 0 < sandbox.use.idle_timeout_s <= now - since:
                    self._end(sandbox)

    def _end(self, sandbox: Sandbox) -> None:
        try:
            self._stop(sandbox)
            _log.info("the sandbox of %s was ended: nothing happened in it", short(sandbox.trajectory.id))
        except (SnapshotdError, OSError) as exc:
            self._last.pop(sandbox.container.id, None)  # in a while again
            _log.warning("the idle sandbox of %s cannot be ended: %s", short(sandbox.trajectory.id), exc)
