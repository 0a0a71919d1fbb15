"""The results of commands and runs, for the objects of sandbox.py."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Sequence

from snapshotd.api.record import field, record
from snapshotd.client.local.arguments import argv_of, bytes_of
from snapshotd.client.results import ExecInfo
from snapshotd.errors import SnapshotdError


@record(frozen=True)
class ExecResult:
    """The result of a command. `stdout` and `stderr` are text with U+FFFD for bytes that are not UTF-8; the raw bytes
    are in `*_bytes`.

    `snapshot_id` is the snapshot that holds everything the command did; None for a command in a throw-away fork.
    `timed_out`: its `timeout` ended it. An exit code of 124 alone may be the command's own.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    snapshot_id: str | None
    timed_out: bool = False

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")


@record(frozen=True)
class RunResult(ExecResult):
    """The result of an agent's run: its output, the exit code of its program (-1: not known), and its last snapshot.
    `status` is the trajectory's: finished, failed, stopped or interrupted."""

    trajectory: str = field(kw_only=True)
    status: str = field(kw_only=True)


class ExecFailed(SnapshotdError):  # noqa: N818 - like every error of ours, it is named by what happened
    """A command or run given `check=True` ended with another exit code than 0. `result` is how; its snapshot was taken
    all the same."""

    def __init__(self, message: str, result: ExecResult) -> None:
        super().__init__(message)
        self.result = result


class KeptOutput:
    """The output of a command as it comes."""

    def __init__(
        self, on_stdout: Callable[[bytes], object] | None, on_stderr: Callable[[bytes], object] | None
    ) -> None:
        self._told = {"stdout": on_stdout, "stderr": on_stderr}
        self._pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

    def take(self, stream: str, data: bytes) -> None:
        self._pieces[stream].append(data)
        listener = self._told[stream]
        if listener is not None:
            listener(data)

    def output(self) -> tuple[bytes, bytes]:
        """All of both streams so far."""
        stdout, stderr = (b"".join(self._pieces[name]) for name in ("stdout", "stderr"))
        return stdout, stderr

    def result(self, exit_code: int, snapshot_id: str | None, *, timed_out: bool) -> ExecResult:
        return ExecResult(exit_code, *self.output(), snapshot_id, timed_out)

    def check_result(self, done: ExecInfo, command: str | Sequence[str], check: bool) -> ExecResult:
        """The result of the command that ended so. ExecFailed, with `check`."""
        snapshot = None if done.snapshot is None else done.snapshot.id
        result = self.result(done.exit_code, snapshot, timed_out=done.timed_out)
        if check and result.exit_code != 0:
            raise exec_failure(command if isinstance(command, str) else shlex.join(command), result, done.call.error)
        return result


def exec_failure(command: str, result: ExecResult, error: str | None) -> ExecFailed:
    said = error or result.stderr[-500:].strip()
    return ExecFailed(f"the command `{command}` ended with exit code {result.exit_code}: {said}", result)


def argv_or_shell(command: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else argv_of(command)


def input_of(data: str | bytes | None) -> io.BytesIO | None:
    return None if data is None else io.BytesIO(bytes_of("input", data))
