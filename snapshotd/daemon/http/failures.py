"""Exceptions as answers: our own errors unchanged, every other exception as an InternalError whose traceback is in the
log."""

from __future__ import annotations

import errno
import logging
import os

from snapshotd.errors import (
    NO_ROOM,
    InternalError,
    OutOfSpace,
    ServiceAwayError,
    SnapshotdError,
    Unavailable,
    UsageError,
)

log = logging.getLogger("snapshotd.daemon")

_log_place = "the daemon's log"
_ROOM_BYTES = 16 << 20


def set_log_place(place: str) -> None:
    """The place of the log, for people; named in every InternalError."""
    global _log_place
    _log_place = place


def failure_of(exc: BaseException) -> SnapshotdError:
    """The error to answer with. A defect is logged here, with its traceback."""
    if isinstance(exc, SnapshotdError):
        if isinstance(exc, InternalError):
            log.error("internal error", exc_info=exc)
        return exc
    if isinstance(exc, OSError) and exc.errno in NO_ROOM:
        log.error("no space left", exc_info=exc)
        return OutOfSpace(
            f"the disk is full ({exc}); free some space and repeat the command: nothing recorded was lost"
        )
    if isinstance(exc, OSError) and exc.errno in (errno.EIO, errno.EROFS):
        log.error("the disk reports an error", exc_info=exc)
        if _is_full():  # below the image that holds the layers, a full disk is an error of the image's device
            return OutOfSpace(
                f"the disk is full, and the layers on it report an error ({exc.strerror}); free space, restart the daemon"
            )
        return InternalError(f"the disk reports an error ({exc}); check it, then restart the daemon")
    if isinstance(exc, ServiceAwayError):
        log.warning("%s", exc)
        return Unavailable(str(exc))
    if isinstance(exc, OSError) and exc.errno == errno.ENAMETOOLONG and isinstance(exc.filename, str | bytes):
        # Only names of the request are as long; those of the state directory are the daemon's.
        return UsageError(f"{os.fsdecode(exc.filename)[:60]!r}... is longer than a path can be; name a shorter one")
    if isinstance(exc, PermissionError):
        log.error("not permitted", exc_info=exc)
        return InternalError(f"{not_usable(exc)}; the traceback is in {_log_place}")
    log.error("defect", exc_info=exc)
    return InternalError(
        f"a defect of snapshotd ({type(exc).__name__}) stopped this request; the traceback is in {_log_place}, please report it"
    )


def not_usable(exc: PermissionError) -> str:
    """The sentence about a file of the daemon's own that its user may not use."""
    name = repr(os.fsdecode(exc.filename)) if isinstance(exc.filename, str | bytes) else "a file in the state directory"
    return (
        f"user {os.geteuid()}, who runs the daemon, may not use {name} ({exc.strerror}); give what lies in the state directory back "
        "to that user with `chown` and `chmod u+rwX`"
    )


def _is_full() -> bool:
    """True if the file system of the state directory is nearly full."""
    try:
        st = os.statvfs(os.path.dirname(_log_place))
    except OSError:
        return False
    return st.f_bavail * st.f_frsize < _ROOM_BYTES
