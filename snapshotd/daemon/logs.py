"""Structured logs: one JSON object per line, with `time`, `level`, `logger`, `message`, the record's `fields`, and
`exception`."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snapshotd.api.wire import log_path_of
from snapshotd.daemon.http.failures import set_log_place

_FILE_MAX_BYTES = 16 << 20
_FILES_KEPT = 3


class JsonLines(logging.Formatter):
    """`log.info("text", extra={"fields": {...}})` adds members to the object."""

    def format(self, record: logging.LogRecord) -> str:
        item: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="microseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "thread": record.threadName,
        }
        item.update(getattr(record, "fields", {}))
        if record.exc_info:
            item["exception"] = self.formatException(record.exc_info)
        return json.dumps(item, default=str)


class _PrivateRotatingFile(logging.handlers.RotatingFileHandler):
    """Log lines hold names and commands of sandboxes: mode 0600, also after a rotation."""

    def _open(self) -> Any:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(fd, "a", encoding="utf-8")


def start_logging(state_dir: Path, *, foreground: bool) -> None:
    """Send everything from INFO up to <state>/daemon.log (rotated at 16 MiB, three kept), or to standard error with
    `foreground`."""
    handler: logging.Handler
    if foreground:
        handler = logging.StreamHandler(sys.stderr)
        set_log_place("the daemon's standard error")
    else:
        path = log_path_of(state_dir)
        handler = _PrivateRotatingFile(path, maxBytes=_FILE_MAX_BYTES, backupCount=_FILES_KEPT)
        set_log_place(str(path))
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "docker", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
