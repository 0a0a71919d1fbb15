"""The record of who did what: one JSON object per line, only appended to, in files of bounded size and number.

It is kept while the daemon listens for other machines: each of their requests, those that were refused too, and what the
users of the socket change. It has no bodies, no query and no token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from snapshotd.api.forms import iso_time
from snapshotd.api.operation import READ, Operation
from snapshotd.daemon.access.limits import Pace
from snapshotd.daemon.access.principals import Principal

FILE_MAX_BYTES = 16 << 20
FILES_KEPT = 8
PATH_CHARS = 64
"""So much is kept of the path of a caller who shows no token ..."""
STRANGERS_PER_S, STRANGERS_BURST = 1.0, 20.0
"""... and so many of these callers' requests are recorded; the next record says how many were left out. So nobody without
a token pushes the records of others out of the files."""
_NAME = "audit.log"


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Mode 0600, also after a rotation."""

    def _open(self) -> Any:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return os.fdopen(fd, "a", encoding="utf-8")


class Audit:
    """Thread-safe."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / _NAME
        self._file = _PrivateFile(self._path, maxBytes=FILE_MAX_BYTES, backupCount=FILES_KEPT)
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self._lock = threading.Lock()
        self._strangers, self._left_out = Pace(STRANGERS_PER_S, STRANGERS_BURST), 0

    def add(
        self,
        principal: Principal | None,
        address: str,
        method: str,
        path: str,
        operation: Operation[Any] | None,
        status: int,
    ) -> None:
        """Record a request. `principal`: None: the request had no valid token. `address`: empty: it came by the socket."""
        if not address and (operation is None or operation.scope == READ or method == "GET"):
            return
        if principal is None:
            with self._lock:
                if self._strangers.take():
                    self._left_out += 1
                    return
                left_out, self._left_out = self._left_out, 0
            path = f"{path[:PATH_CHARS]}{f' ({left_out} more before)' if left_out else ''}"
        item = {
            "happened_at": iso_time(time.time_ns()),
            "caller": None if principal is None else principal.name,
            "token_id": None if principal is None else principal.token or None,
            "tenant": None if principal is None else principal.tenant,
            "address": address or None,
            "verb": None if operation is None else operation.name.lower(),
            "operation": f"{method} {path[:1000]}",
            "status": str(status),
        }
        self._file.handle(logging.makeLogRecord({"msg": json.dumps(item), "levelno": logging.INFO}))

    def close(self) -> None:
        self._file.close()


def read_audit(state_dir: Path, last: int) -> list[dict[str, Any]]:
    """Return the `last` newest records, oldest first, also those from before the daemon stopped listening. A line that a crash has
    cut off is left out."""
    lines: deque[str] = deque(maxlen=last)
    base = state_dir / _NAME
    for path in [*(base.with_name(f"{_NAME}.{number}") for number in range(FILES_KEPT, 0, -1)), base]:
        with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
            lines.extend(file)
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
