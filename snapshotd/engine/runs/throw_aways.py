"""Throw-away sandboxes: no row of the catalog mentions them, and nothing of them is recorded."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from snapshotd.engine.context import Context
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import SandboxFailed
from snapshotd.types import ContainerID, Snapshot, Trajectory

_END_S = 10.0
_log = logging.getLogger(__name__)


class ThrowAways:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        launch: Callable[[Trajectory, Snapshot], tuple[Sandbox, AgentCalls]],
        discard: Callable[[Sandbox], object],
    ) -> None:
        self._context, self._launch, self._discard = context, launch, discard
        self._live: dict[ContainerID, Sandbox] = {}
        self._closed = False
        self._changing = threading.Condition()
        """Told of sandboxes that have ended."""

    @contextlib.contextmanager
    def start(self, trajectory: Trajectory, snapshot: Snapshot) -> Iterator[Sandbox]:
        """A sandbox that exists inside. SandboxFailed: the daemon was told to stop meanwhile."""
        sandbox, calls = self._launch(trajectory, snapshot)
        try:
            with self._changing:
                if self._closed:
                    raise _stopped()
                self._live[sandbox.container.id] = sandbox
            calls.bind(sandbox, None)
            yield sandbox
            if sandbox.closed:
                raise _stopped()
        finally:
            try:
                self._discard(sandbox)
            finally:
                self._context.secrecy.forget(trajectory.id)  # its output was searched for secrets, and is not kept
                with self._changing:
                    self._live.pop(sandbox.container.id, None)
                    self._changing.notify_all()

    def end(self, end: Callable[[Sandbox], object]) -> None:
        """Have `end` end all, and let none begin any more. Errors are logged."""
        with self._changing:
            self._closed = True
            live = list(self._live.values())
        for sandbox in live:
            try:
                end(sandbox)
            except Exception:  # noqa: BLE001 - a defect with one must not cost the others what they hold
                _log.exception("a throw-away sandbox is left behind")

    def wait_until_gone(self) -> None:
        """Return when the threads that use them have noticed their end, or after some seconds."""
        with self._changing:
            self._changing.wait_for(lambda: not self._live, _END_S)


def _stopped() -> SandboxFailed:
    return SandboxFailed("the daemon was told to stop, which ended this throw-away sandbox; repeat the command")
