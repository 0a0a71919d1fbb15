"""The daemon's side of a process that serves a mount: start it, see whether it lives, end it."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence

from snapshotd.errors import Unsupported

_log = logging.getLogger(__name__)

START_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
_MOUNTED = b"mounted\n"


class Child:
    """One process of `server.py`. It ends when this object is closed, when this process dies, or when its mount is unmounted.

    Its log is this process's standard error. Thread-safe.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait until it has mounted. Unsupported when it ends or says nothing within `START_DEADLINE_S`."""
        self._closing = threading.Lock()
        try:
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as exc:
            raise Unsupported(f"cannot start {command[0]!r} to serve a mount: {exc}") from exc
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once: whoever waits for its mount gets an error now."""
        if self.alive():
            self._process.kill()

    def close(self) -> None:
        """Let it unmount and end; kill it after `END_DEADLINE_S`. Idempotent."""
        with self._closing:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                _log.warning("process %d, which serves a mount, does not end; it is killed", self.pid)
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()

    def _wait_until_mounted(self) -> None:
        assert self._process.stdout is not None
        fd, deadline, said = self._process.stdout.fileno(), time.monotonic() + START_DEADLINE_S, b""
        while said != _MOUNTED:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(fd, len(_MOUNTED)) if ready else b""
            if not piece:
                why = "it ended" if ready else f"nothing happened for {START_DEADLINE_S:.0f} s"
                raise Unsupported(f"a mount could not be made: {why}; the log says why, and `snapshotd doctor` what is missing")
            said = (said + piece)[-len(_MOUNTED):]
