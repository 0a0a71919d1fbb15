"""The records of the SDK that name our sandboxes and snapshots. They are JSON within a `RunState`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Literal

from agents.sandbox.errors import SnapshotNotRestorableError
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase
from pydantic import Field

_MAGIC = b"SNAPSHOTD_SNAPSHOT_V1\n"


class SnapshotdSnapshot(SnapshotBase):
    """A snapshot by its id. It is durable before this object exists, so there is nothing to persist: its stream is a
    reference of some bytes, and no tar."""

    type: Literal["snapshotd"] = "snapshotd"

    async def persist(self, data: io.IOBase, *, dependencies: Dependencies | None = None) -> None:
        """Nothing. SnapshotNotRestorableError: the stream is of another snapshot."""
        if snapshot_in(data.read()) != self.id:
            raise gone(self.id, None)

    async def restore(self, *, dependencies: Dependencies | None = None) -> io.IOBase:
        return reference_to(self.id)

    async def restorable(self, *, dependencies: Dependencies | None = None) -> bool:
        return True


class SnapshotdOptions(BaseSandboxClientOptions):
    """How a new sandbox is made; the words of `Sandbox.create`. `thread`: its files go on where those of this
    `SnapshotdThread` are."""

    type: Literal["snapshotd"] = "snapshotd"
    image: str = "default"
    runtime: Literal["auto", "runc", "docker", "none"] = "auto"
    network: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    name: str | None = None
    exposed_ports: tuple[int, ...] = ()
    thread: str | None = None


class SnapshotdSessionState(SandboxSessionState):
    """A sandbox as it was at `snapshot`, which names a snapshot of ours after every call."""

    type: Literal["snapshotd"] = "snapshotd"
    trajectory: str
    thread: str | None = None


def reference_to(snapshot: str) -> io.BytesIO:
    return io.BytesIO(_MAGIC + json.dumps({"snapshot": snapshot}).encode())


def snapshot_in(stream: bytes) -> str | None:
    """The id in a reference; None: it is something else, such as a tar."""
    if not stream.startswith(_MAGIC):
        return None
    return str(json.loads(stream.removeprefix(_MAGIC))["snapshot"])


def gone(snapshot: str, cause: BaseException | None) -> SnapshotNotRestorableError:
    error = SnapshotNotRestorableError(snapshot_id=snapshot, path=Path(f"<snapshotd:{snapshot}>"))
    error.__cause__ = error.cause = cause
    return error
