"""Every error a user can meet, named by what the caller should do about it.

    SnapshotdError
      UsageError            2    400   the request itself is wrong; change it
      NotFound              4    404   no such thing
      Ambiguous             5    409   the id prefix or name fits several things
      Conflict              6    409   right request, wrong state (running, has children, already exists)
      Unsupported           7    501   this machine lacks something; `snapshotd doctor` names it
      NotPermitted          8    403   needs root, or the peer is not allowed
      DaemonUnavailable     9    503   no daemon, or it went away
      VersionMismatch      10    426   client and daemon, or a file on disk, come from other versions
      LimitExceeded        11    413   a bound was reached (count, size, depth)
      OutOfSpace           12    507   the disk is full
      Diverged             13    409   a replayed program left the recorded path
      Undecided            14    409   an irreversible call may or may not have happened; a person has to decide
      Denied               15    403   a person or a policy said no
      Unavailable          16    503   a service that is needed, a database for one, does not answer; try again
      SandboxFailed       125    502   the container could not be started or died (docker's 125)
      CommandNotRunnable  126    422   found, but it cannot be run (docker's 126)
      CommandNotFound     127    422   no such program in the sandbox (docker's 127)
      DataLoss             20    500   stored bytes are missing or wrong; never hidden, never retried
      InternalError        70    500   a defect of snapshotd

A message is one sentence: what failed, on which thing, why, and the next step to take.
Columns: class, process exit code, HTTP status. The numbers live on the classes and nowhere else.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of system calls that become `OutOfSpace`: the disk is full, or a user's quota."""


class ServiceAwayError(OSError):
    """A service that this machine needs does not answer, or says that it cannot now; the message names it. Becomes `Unavailable`
    at the top of a request."""


class SnapshotdError(Exception):
    """Base of every error that is shown to a user as one sentence, without a traceback."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """As Python's, but for classes that are made with more than their message."""
        return _make_again, (type(self), self.args, vars(self))

    @property
    def code(self) -> str:
        """Stable name on the wire: the class name."""
        return type(self).__name__

    def as_json(self) -> dict[str, object]:
        """The error as every wire has it."""
        return {"error": {"code": self.code, "message": self.message}}


def _make_again(kind: type[SnapshotdError], args: tuple[Any, ...], members: dict[str, Any]) -> SnapshotdError:
    """Make an error again that was pickled or copied."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(members)
    return error


class UsageError(SnapshotdError):
    exit_code, http_status = 2, 400


class NotFound(SnapshotdError):
    exit_code, http_status = 4, 404


class Ambiguous(SnapshotdError):
    exit_code, http_status = 5, 409


class Conflict(SnapshotdError):
    exit_code, http_status = 6, 409


class Unsupported(SnapshotdError):
    exit_code, http_status = 7, 501


class NotPermitted(SnapshotdError):
    exit_code, http_status = 8, 403


class DaemonUnavailable(SnapshotdError):
    exit_code, http_status = 9, 503


class VersionMismatch(SnapshotdError):
    exit_code, http_status = 10, 426


def check_format(what: str, found: int, newest: int, oldest: int | None = None) -> None:
    """VersionMismatch unless this program reads format `found` of a file: it reads those from `oldest` to `newest`, or
    `newest` alone."""
    oldest = newest if oldest is None else oldest
    if found > newest:
        raise VersionMismatch(
            f"{what} was written by a newer snapshotd (format {found}, this one knows {newest}): use that version or a newer one"
        )
    if found < oldest:
        raise VersionMismatch(
            f"{what} was written by an older snapshotd (format {found}, this one knows {oldest}): use that version, "
            "or one that reads both"
        )


class LimitExceeded(SnapshotdError):
    exit_code, http_status = 11, 413


class OutOfSpace(SnapshotdError):
    exit_code, http_status = 12, 507


class Diverged(SnapshotdError):
    exit_code, http_status = 13, 409


class Undecided(SnapshotdError):
    exit_code, http_status = 14, 409


class Denied(SnapshotdError):
    exit_code, http_status = 15, 403


class Unavailable(SnapshotdError):
    exit_code, http_status = 16, 503


class DataLoss(SnapshotdError):
    exit_code, http_status = 20, 500


class InternalError(SnapshotdError):
    exit_code, http_status = 70, 500


class SandboxFailed(SnapshotdError):
    exit_code, http_status = 125, 502


class CommandNotRunnable(SnapshotdError):
    exit_code, http_status = 126, 422


class CommandNotFound(SnapshotdError):
    exit_code, http_status = 127, 422


BY_CODE: dict[str, type[SnapshotdError]] = {kind.__name__: kind for kind in SnapshotdError.__subclasses__()}
"""Wire name to class, for every class of this module."""


def error_of(answer: dict[str, Any]) -> SnapshotdError:
    """An error from what `as_json` has made of it; InternalError for a code that this version does not know."""
    detail = answer["error"]
    return BY_CODE.get(detail["code"], InternalError)(str(detail["message"]))
