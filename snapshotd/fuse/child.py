"""The daemon's side of a process that serves a mount: start it, check that it lives, end it, and take away the mount of
a dead one."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from snapshotd.errors import BY_CODE, InternalError, Unsupported
from snapshotd.kernel import mounts
from snapshotd.kernel.processes import wait_readable

_log = logging.getLogger(__name__)

TYPE = "snapshotd"
"""The type of our mounts, which the kernel calls `fuse.snapshotd`."""
START_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
_MOUNTED = b"mounted\n"
_MAX_SAID_BYTES = 4096


class MountProcess:
    """One process of `server.py`. It ends when this object is closed, when this process dies, or when its mount is
    unmounted.

    Its log is this process's standard error. Thread-safe.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait until it has mounted. Raises the child's error, by its type (UsageError: no such
        directory); Unsupported when it ends, or says nothing within `START_DEADLINE_S`; InternalError when it is
        killed."""
        self._closing = threading.Lock()
        self._killed = False
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
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
        return not self._killed and self._process.poll() is None

    def kill(self) -> None:
        """End it at once: a thread that waits for its mount gets an error now."""
        self._killed = True
        self._process.kill()

    def drop(self, name: bytes) -> None:
        """Let it forget an entry of the mount's root that is not used any more. Returns at once."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), name + b"\n")  # shorter than PIPE_BUF, so never in parts
        except (OSError, ValueError) as exc:
            _log.info("the process that serves a mount is gone: %s", exc)

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

    def _wait_for_signal(self) -> int | None:
        """Wait for its end. The signal that ended it; None if it ended in another way, or not yet."""
        try:
            code = self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return None
        return -code if code < 0 else None

    def _wait_until_mounted(self) -> None:
        assert self._process.stdout is not None
        fd, deadline, said = self._process.stdout.fileno(), time.monotonic() + START_DEADLINE_S, b""
        while not said.endswith(b"\n"):
            ready = wait_readable(fd, deadline - time.monotonic())
            piece = os.read(fd, _MAX_SAID_BYTES) if ready else b""
            if not piece or len(said) > _MAX_SAID_BYTES:
                if ready and (number := self._wait_for_signal()) is not None:
                    raise InternalError(
                        f"a mount could not be made: signal {number} killed the process that was to serve it; try again"
                    )
                why = (
                    "the process that was to serve it ended"
                    if ready
                    else f"nothing happened for {START_DEADLINE_S:.0f} s"
                )
                raise Unsupported(
                    f"a mount could not be made: {why}; the log says why, and `snapshotd doctor` what is missing"
                )
            said += piece
        if said != _MOUNTED:
            _, code, message = (said.decode("utf-8", "replace").rstrip() + "  ").split(" ", 2)
            raise BY_CODE.get(code, Unsupported)(message.strip() or "a mount could not be made; the log says why")


def detach_dead(directory: Path) -> bool:
    """Take away the mounts of dead processes on a directory, as the calling thread sees the directory. False when there
    is no such mount: nothing else is touched. OSError."""
    point, found = os.fsencode(os.path.realpath(directory)), False
    while True:
        there = [mount for mount in mounts.read_mountinfo("thread-self") if mount.point == point]
        if not there or there[-1].fs_type != f"fuse.{TYPE}" or mounts.answers(point):
            return found
        mounts.detach(point)
        found = True
