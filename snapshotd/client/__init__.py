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

if TYPE_CHECKING:
    from snapshotd.client.aio.client import AsyncSnapshotd
    from snapshotd.client.aio.sandbox import AsyncCommand, AsyncSandbox, AsyncSnapshot
    from snapshotd.client.client import Snapshotd
    from snapshotd.client.feeding import AsyncTerminal, Terminal
    from snapshotd.client.fleet.branch import Branch
    from snapshotd.client.fleet.fleet import Fleet
    from snapshotd.client.following import StillRunning
    from snapshotd.client.outcomes import ExecFailed, ExecResult, RunResult
    from snapshotd.client.results import FileInfo, Policy, Provider, ServiceOptions, WriteInfo
    from snapshotd.client.sandbox import Command, Sandbox, Snapshot
    from snapshotd.client.verbs.history import RECORDED
    from snapshotd.client.verbs.ports import AsyncPort, Port
    from snapshotd.errors import SnapshotdError

__all__ = [
    "RECORDED",
    "AsyncCommand",
    "AsyncPort",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AsyncSnapshotd",
    "AsyncTerminal",
    "Branch",
    "Command",
    "ExecFailed",
    "ExecResult",
    "FileInfo",
    "Fleet",
    "Policy",
    "Port",
    "Provider",
    "RunResult",
    "Sandbox",
    "ServiceOptions",
    "Snapshot",
    "Snapshotd",
    "SnapshotdError",
    "StillRunning",
    "Terminal",
    "WriteInfo",
]

_MODULES = {
    "client.aio.client": ("AsyncSnapshotd",),
    "client.aio.sandbox": ("AsyncCommand", "AsyncSandbox", "AsyncSnapshot"),
    "client.client": ("Snapshotd",),
    "client.feeding": ("AsyncTerminal", "Terminal"),
    "client.fleet.branch": ("Branch",),
    "client.fleet.fleet": ("Fleet",),
    "client.following": ("StillRunning",),
    "client.outcomes": ("ExecFailed", "ExecResult", "RunResult"),
    "client.results": ("FileInfo", "Policy", "Provider", "ServiceOptions", "WriteInfo"),
    "client.sandbox": ("Command", "Sandbox", "Snapshot"),
    "client.verbs.history": ("RECORDED",),
    "client.verbs.ports": ("AsyncPort", "Port"),
    "errors": ("SnapshotdError",),
}


def __getattr__(name: str) -> Any:
    """A name is loaded when it is asked for: asyncio takes 30 ms to import, and the command line has no use for objects."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"snapshotd.{module}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
