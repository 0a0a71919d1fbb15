"""`SnapshotdBackend`: one sandbox as DeepAgents' backend, alone or with the saver that binds it to a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from snapshotd.client import Sandbox
from snapshotd.errors import Conflict, NotFound, NotPermitted, SnapshotdError, UsageError
from snapshotd.integrations.langgraph import SnapshotdSaver

_TIMEOUT_S = 1800
R = TypeVar("R")


class SnapshotdBackend(BaseSandbox):
    """A sandbox whose every call is a snapshot.

        with SnapshotdSaver(sandbox=sandbox) as saver:
            agent = create_deep_agent(model=..., backend=SnapshotdBackend(saver), checkpointer=saver)

    With a saver every command runs on the files of its step's checkpoint: going back on a thread takes the sandbox back, and a
    call that was made is not made again after a kill. With a `Sandbox` it always runs in that one.
    """

    enable_capture_offload = False
    """So that the recorded command is the model's own. Its output is kept by the daemon."""

    def __init__(
        self, place: SnapshotdSaver | Sandbox, *, user: str | None = None, timeout: float = _TIMEOUT_S
    ) -> None:
        """`user`: runs the commands in the sandbox; else root. `timeout`: seconds for a command without one of its own."""
        self._place, self._user, self._timeout_s = place, user, timeout

    @property
    def id(self) -> str:
        return self._sandbox().id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command. One that takes too long is ended, with exit code 124."""
        limit = self._timeout_s if timeout is None else timeout or None
        try:
            done = self._place.exec(["/bin/sh", "-c", f"{{ {command}\n}} 2>&1"], user=self._user, timeout=limit)
        except (NotFound, Conflict, UsageError) as exc:
            return ExecuteResponse(output=exc.message, exit_code=None)
        said = f"\n(ended after {limit:g} s)" if done.timed_out else ""
        return ExecuteResponse(output=done.stdout + done.stderr + said, exit_code=done.exit_code)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Each file is one call, whole or not at all."""
        write = self._sandbox().files.write
        return [
            FileUploadResponse(path, _try_file(path, partial(write, path, data, user=self._user))[1])
            for path, data in files
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        read = self._sandbox().files.read
        return [FileDownloadResponse(path, *_try_file(path, partial(read, path))) for path in paths]

    def _sandbox(self) -> Sandbox:
        return self._place if isinstance(self._place, Sandbox) else self._place.sandbox()


def _try_file(path: str, work: Callable[[], R]) -> tuple[R | None, str | None]:
    """The result of work on a file, or DeepAgents' word for why there is none."""
    if not path.startswith("/") or "\0" in path:
        return None, "invalid_path"
    try:
        return work(), None
    except NotFound:
        return None, "file_not_found"
    except NotPermitted:
        return None, "permission_denied"
    except UsageError as exc:
        return None, "is_directory" if "directory" in exc.message else "invalid_path"
    except SnapshotdError as exc:
        return None, exc.message
