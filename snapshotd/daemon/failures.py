"""How an exception becomes an answer: ours as they are, everything else as an InternalError whose traceback is in the log."""

from __future__ import annotations

import errno
import logging
from typing import Any

from snapshotd.errors import InternalError, OutOfSpace, SnapshotdError

log = logging.getLogger("snapshotd.daemon")

_log_place = "the daemon's log"


def set_log_place(place: str) -> None:
    """Where people find the log; named in every InternalError."""
    global _log_place
    _log_place = place


def failure_of(exc: BaseException) -> SnapshotdError:
    """The error to answer with. A defect is logged here, with its traceback."""
    if isinstance(exc, SnapshotdError):
        if isinstance(exc, InternalError):
            log.error("internal error", exc_info=exc)
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        log.error("no space left", exc_info=exc)
        return OutOfSpace(f"the disk is full ({exc}); free some space and repeat the command: nothing recorded was lost")
    log.error("defect", exc_info=exc)
    return InternalError(
        f"a defect of snapshotd ({type(exc).__name__}) stopped this request; the traceback is in {_log_place}, please report it"
    )


def error_json(failure: SnapshotdError) -> dict[str, Any]:
    """`{"error": {"code", "message"}}`."""
    return {"error": {"code": failure.code, "message": failure.message}}
