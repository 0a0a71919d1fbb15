"""The Python client, for threads and for asyncio.

    from snapshotd.client import Sandbox

    with Sandbox.create(workspace=".") as sandbox:
        result = sandbox.exec("pytest -q")
        print(result.exit_code, result.snapshot_id)
        left, right = sandbox.fork(2)

    from snapshotd.client import AsyncSandbox

    async with await AsyncSandbox.create(workspace=".") as sandbox:
        result = await sandbox.exec("pytest -q")

`Snapshotd` and `AsyncSnapshotd` are the same, verb by verb. Errors are those of `snapshotd.errors`.
"""

from typing import TYPE_CHECKING, Any

from snapshotd.client.client import Snapshotd
from snapshotd.client.feeding import Terminal
from snapshotd.client.mind import RECORDED
from snapshotd.client.ports import Port
from snapshotd.client.results import FileInfo, Policy, Provider, WriteInfo
from snapshotd.client.sandbox import Command, ExecFailed, ExecResult, Sandbox, Snapshot
from snapshotd.errors import SnapshotdError

if TYPE_CHECKING:
    from snapshotd.client.aio import AsyncPort, AsyncSandbox, AsyncSnapshot, AsyncSnapshotd, AsyncTerminal

__all__ = [
    "RECORDED",
    "AsyncPort",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AsyncSnapshotd",
    "AsyncTerminal",
    "Command",
    "ExecFailed",
    "ExecResult",
    "FileInfo",
    "Policy",
    "Port",
    "Provider",
    "Sandbox",
    "Snapshot",
    "Snapshotd",
    "SnapshotdError",
    "Terminal",
    "WriteInfo",
]


def __getattr__(name: str) -> Any:
    """The asynchronous client, when it is asked for: asyncio takes 30 ms to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from snapshotd.client import aio

    return getattr(aio, name)
