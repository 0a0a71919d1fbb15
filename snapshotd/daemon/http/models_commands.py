"""The API's words about commands in the background."""

from __future__ import annotations

import signal
from typing import Any, Literal

from pydantic import Field

from snapshotd import types as t
from snapshotd.daemon.http import models
from snapshotd.daemon.http.wire import STDIN_WINDOW_BYTES, TIMEOUT_MAX_S
from snapshotd.engine.base import CommandInfo


class BackgroundRequest(models.Request):
    argv: list[str] = Field(min_length=1)
    cwd: str | None = Field(None, description="Absolute path in the sandbox; its working directory if null.")
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = Field(
        None, description="Name or number, optionally with `:group`; looked up in the sandbox's own files."
    )
    stdin: bool = Field(False, description="Its standard input is what is written to it; else it is empty.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=TIMEOUT_MAX_S,
        allow_inf_nan=False,
        description="After so many seconds the command is ended with everything that it started.",
    )
    idle_timeout_s: float | None = Field(
        None, ge=0, le=TIMEOUT_MAX_S, allow_inf_nan=False, description="As in a request to `exec`."
    )


class SignalRequest(models.Request):
    signal: int = Field(signal.SIGTERM, ge=1, le=64, description="Number of the signal.")


class WriteRequest(models.Request):
    data_b64: str = Field("", max_length=STDIN_WINDOW_BYTES * 4 // 3 + 4)
    end: bool = Field(False, description="Close the input behind the data.")


class WriteAnswer(models.Answer):
    bytes: int = Field(
        description="Bytes that the command has taken. Fewer than were sent: it does not read just now; send the rest again."
    )


class Command(models.Answer):
    """A command in the background, or one that a client runs in the foreground."""

    id: str
    trajectory: str
    argv: list[str]
    cwd: str
    stdin: bool
    timeout_s: float | None
    started_at: str
    status: Literal["running"] | t.CallStatus
    exit_code: int | None
    ended_at: str | None
    snapshot: str | None = Field(description="Taken when it ended; null while it runs, and if none could be taken.")
    error: str | None = Field(description="Why it ended, where its exit code does not say it.")
    background: bool = Field(
        description="False: a client runs it, which may have gone away. It is listed while it runs."
    )

    @staticmethod
    def of(info: CommandInfo) -> Command:
        return Command(
            id=info.id,
            trajectory=info.trajectory,
            argv=list(info.argv),
            cwd=info.cwd,
            stdin=info.stdin,
            timeout_s=info.timeout_s,
            started_at=models.iso_time(info.began_at_ns),
            status="running" if info.status is None else info.status,
            exit_code=info.exit_code,
            ended_at=None if info.ended_at_ns is None else models.iso_time(info.ended_at_ns),
            snapshot=info.snapshot,
            error=info.error,
            background=info.background,
        )


def event_json(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a command with its times as text."""
    times = {f"{name}_at": f"{name}_at_ns" for name in ("began", "ended") if f"{name}_at_ns" in event}
    kept = {key: value for key, value in event.items() if key not in times.values()}
    return {**kept, **{name: models.iso_time(event[key]) for name, key in times.items()}}
