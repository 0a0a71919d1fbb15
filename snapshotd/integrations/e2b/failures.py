"""Errors, in the forms that the SDKs know: a JSON object with a status for the control API and `/files`, a code for Connect.

Each SDK makes an exception of its own of a status or code: 400 an InvalidArgument, 401 an Authentication error, 404 a
NotFound, 507 a NotEnoughSpace, 502 one that says that the sandbox is gone.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from snapshotd.errors import (
    Ambiguous,
    CommandNotFound,
    CommandNotRunnable,
    Conflict,
    DaemonUnavailable,
    Denied,
    LimitExceeded,
    NotFound,
    NotPermitted,
    OutOfSpace,
    SandboxFailed,
    SnapshotdError,
    Undecided,
    Unsupported,
    UsageError,
)

STATUS = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "aborted": 409,
    "too_large": 413,
    "resource_exhausted": 429,
    "internal": 500,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
    "no_space": 507,
    "gone": 502,
}
"""Code to HTTP status. The codes of Connect (connectrpc.com/docs/protocol, Error Codes), and three of ours."""
CONNECT_CODES = {"too_large": "resource_exhausted", "no_space": "internal", "gone": "unavailable"}

_CODES: dict[type[SnapshotdError], str] = {
    UsageError: "invalid_argument",
    NotFound: "not_found",
    Ambiguous: "aborted",
    Conflict: "aborted",
    Undecided: "aborted",
    Unsupported: "unimplemented",
    NotPermitted: "permission_denied",
    Denied: "permission_denied",
    DaemonUnavailable: "unavailable",
    LimitExceeded: "resource_exhausted",
    OutOfSpace: "no_space",
    SandboxFailed: "internal",
    CommandNotFound: "not_found",
    CommandNotRunnable: "invalid_argument",
}


class WireError(Exception):
    """A request that fails. `code` is one of STATUS."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        return STATUS[self.code]

    @property
    def connect_code(self) -> str:
        return CONNECT_CODES.get(self.code, self.code)


def failure_of(error: SnapshotdError) -> WireError:
    """The failure that an error of the daemon is for a client."""
    return WireError(_CODES.get(type(error), "internal"), error.message)


def unsupported(what: str, instead: str) -> WireError:
    """The client asks for something that this server does not do."""
    return WireError("unimplemented", f"snapshotd's E2B server has no {what}; {instead}")


def not_found(sandbox: str) -> WireError:
    """The sandbox of a request about it is not there."""
    return WireError("not_found", f"sandbox {sandbox!r} not found")


def gone(sandbox: str) -> WireError:
    """The sandbox of a request inside does not run: the words by which the SDKs know it."""
    return WireError("gone", f"The sandbox {sandbox} was not found")


def answer(failure: WireError) -> Response:
    """The answer of the control API and of `/files`."""
    told = {"code": failure.status, "message": failure.message}
    return JSONResponse(told, failure.status, {"Should-Retry": "true" if failure.code == "unavailable" else "false"})
