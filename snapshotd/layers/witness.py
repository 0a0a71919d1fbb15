"""Tells if the layers that a daemon finds are what an earlier one acknowledged.

A sealed layer lies in the page cache when its snapshot is captured, and is written later. A write that fails is told
once, to whoever has had the file system open since before: a daemon that was killed is not told, and the next one reads
zeros where there was data. So a small process holds the layers' file system, and the file of its image, open from
before the first write. When the daemon is gone it syncs both, and says in `layers.state` that the layers are whole. The
file says so after no other end than this and a clean one.

    daemon starts     takes the file's lock, for which it waits until the witness of an earlier daemon has ended; reads
                      it; once nothing is left that it must not trust: `open`, then the witness
    daemon is killed  the witness: sync, then `whole`; a write failed: it stays `open`
    clean end         the daemon: sync, then `whole`
    witness killed, or power loss: it stays `open`

The content is overwritten in place, which needs no space on a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

from snapshotd.errors import NO_ROOM, OutOfSpace
from snapshotd.kernel import files
from snapshotd.layers import witness_main
from snapshotd.layers.witness_main import OPEN, WHOLE

_NAME = "layers.state"
_log = logging.getLogger(__name__)


class Witness:
    """See the module's text. `proven`: the layers found here are what was acknowledged. One for a state directory."""

    def __init__(self, state_dir: Path) -> None:
        """Waits for the witness of an earlier daemon. OutOfSpace."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._fd = os.open(state_dir / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            raise OutOfSpace(f"{state_dir / _NAME} cannot be made: the disk is full; free some space") from exc
        self._path = state_dir / _NAME
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting until what the last daemon wrote is on the disk")
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.proven = os.pread(self._fd, len(OPEN), 0) in (WHOLE, b"")  # empty: made just now

    def watch(self, layers: Path, image: Path | None) -> None:
        """Start the process that outlives this daemon. Before the first write to the layers that counts. OSError."""
        self._write(OPEN)
        files.sync_dir(self._path.parent)
        with contextlib.ExitStack() as opened:
            # Files of its own: an error is told once for each opened file.
            fds = [opened.enter_context(files.closing_fd(os.open(layers, files.DIR_FLAGS)))]
            if image is not None:
                fds.append(opened.enter_context(files.closing_fd(os.open(image, os.O_RDONLY | os.O_CLOEXEC))))
            numbers = [*map(str, fds), *(["-1"] if image is None else []), str(self._fd)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", witness_main.__file__, *numbers, str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(*fds, self._fd),
                start_new_session=True,
            )

    def settle(self) -> None:
        """Note that the layers are durable. Nothing may write to them any more. OSError."""
        self._write(WHOLE)

    def close(self) -> None:
        """End the process. The layers are as whole as `settle` has said. Idempotent."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it was killed
                self._process.stdin.write(b"x")
                self._process.stdin.close()
            self._process.wait()
            self._process = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, content: bytes) -> None:
        os.pwrite(self._fd, content, 0)
        os.fsync(self._fd)
