"""The daemon's side of the watchdog, a process that stops the sandboxes when the daemon does not (kernel/holding/watchdog_main.py)."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from snapshotd.kernel.holding.held import HeldMembers
from snapshotd.kernel.holding.watchdog_main import describe
from snapshotd.kernel.processes import start_time

_ANSWER_S = 3.0
_log = logging.getLogger(__name__)


class Watchdog:
    """The watchdog process of this daemon. It outlives a daemon that is killed, until the lease is over, or the next daemon
    has one of its own. Thread-safe."""

    def __init__(self, file: Path, slack_ns: int) -> None:
        """`file`: names the watchdog process for the next daemon. `slack_ns`: the watchdog freezes so much later than
        the daemon."""
        self._file, self._slack_ns = file, slack_ns
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._earlier: tuple[int, int] | None = None

    def start(self) -> None:
        """Start the watchdog. An earlier daemon's watchdog guards what that daemon left, until the first `renew`.
        OSError."""
        with self._lock:
            with suppress(OSError, ValueError):
                pid, started = map(int, self._file.read_text().split())
                self._earlier = pid, started
            self._start()

    def renew(self, until_ns: int, everything: Iterable[HeldMembers]) -> bool:
        """Let the sandboxes run until this time. True if the watchdog had frozen them, or had ended."""
        word = {"until_ns": until_ns, "members": [describe(one) for one in everything]}
        with self._lock:
            self._end_earlier()
            try:
                return self._ask(word) == b"f"
            except OSError as exc:
                _log.warning("the watchdog of the lease is started again: %s", exc)
                self._end()
                self._start()
                self._ask(word)
                return True

    def add(self, members: HeldMembers) -> None:
        """Watch one more sandbox. If the watchdog was killed, the next renewal starts another."""
        with self._lock, suppress(OSError):
            self._send({"add": describe(members)})

    def close(self) -> None:
        """End the watchdog when no sandbox runs any more. Idempotent."""
        with self._lock:
            if self._process is None:
                return
            with suppress(OSError):
                self._send({"end": True})
            self._end()
            self._file.unlink(missing_ok=True)

    def _start(self) -> None:
        own, its = socket.socketpair()
        own.settimeout(_ANSWER_S)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "snapshotd.kernel.holding.watchdog_main", str(self._slack_ns)],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = own
        self._file.write_text(f"{self._process.pid} {start_time(self._process.pid)}")

    def _end(self) -> None:
        assert self._process is not None
        assert self._socket is not None
        self._socket.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None

    def _end_earlier(self) -> None:
        if self._earlier is None:
            return
        (pid, started), self._earlier = self._earlier, None
        with suppress(OSError):  # it has ended
            pidfd = os.pidfd_open(pid)
            try:
                if start_time(pid) == started:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def _ask(self, word: dict[str, Any]) -> bytes:
        self._send(word)
        assert self._socket is not None
        answer = self._socket.recv(1)
        if not answer:
            raise ConnectionError("it has ended")
        return answer

    def _send(self, word: dict[str, Any]) -> None:
        if self._socket is None:
            raise ConnectionError("it does not run")
        self._socket.sendall(json.dumps(word).encode() + b"\n")
