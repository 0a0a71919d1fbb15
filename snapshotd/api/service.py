"""The daemon itself, and its errors."""

from __future__ import annotations

from snapshotd.api.record import ApiRecord, record


@record(frozen=True)
class VersionInfo(ApiRecord):
    version: str
    """The version of the package snapshotd."""
    api_version: str
    """Version of the HTTP API."""
    pid: int
    state_dir: str
    """The daemon's state directory."""


@record(frozen=True)
class ErrorDetail(ApiRecord):
    code: str
    """Name of the error's class, stable: NotFound, Conflict, ..."""
    message: str
    """One sentence: what failed, on which thing, why, and the next step."""


@record(frozen=True)
class ErrorAnswer(ApiRecord):
    error: ErrorDetail
