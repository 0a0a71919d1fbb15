"""The asynchronous client. Most of it is made of the one for threads (`generate.py`)."""

from snapshotd.client.aio.carrying import AsyncPort
from snapshotd.client.aio.client import AsyncSnapshotd
from snapshotd.client.aio.feeding import AsyncTerminal
from snapshotd.client.aio.sandbox import AsyncSandbox, AsyncSnapshot

__all__ = ["AsyncPort", "AsyncSandbox", "AsyncSnapshot", "AsyncSnapshotd", "AsyncTerminal"]
