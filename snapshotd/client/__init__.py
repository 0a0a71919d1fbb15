"""The Python client.

    from snapshotd.client import Sandbox

    with Sandbox.create(workspace=".") as sandbox:
        result = sandbox.exec("pytest -q")
        print(result.exit_code, result.snapshot_id)
        left, right = sandbox.fork(2)

`Snapshotd` is the same, verb by verb. Errors are those of `snapshotd.errors`.
"""

from snapshotd.client.client import Snapshotd
from snapshotd.client.feeding import Terminal
from snapshotd.client.mind import RECORDED
from snapshotd.client.ports import Port
from snapshotd.client.results import FileInfo, Policy, Provider, WriteInfo
from snapshotd.client.sandbox import Command, ExecFailed, ExecResult, Sandbox, Snapshot
from snapshotd.errors import SnapshotdError

__all__ = [
    "RECORDED",
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
