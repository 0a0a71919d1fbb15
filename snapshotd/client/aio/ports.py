"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/ports.py`: change that one."""

from __future__ import annotations

from pathlib import Path

from snapshotd.api import operations
from snapshotd.client.aio.carrying import AsyncPort
from snapshotd.client.aio.verbs import AsyncVerbs
from snapshotd.client.local.arguments import check_count, local_path
from snapshotd.client.ports import _LAST_PORT, OnFailure, _listen, _listen_on_path
from snapshotd.errors import UsageError


class AsyncPorts(AsyncVerbs):
    """The part of `AsyncSnapshotd` that opens ports."""

    async def port(
        self,
        ref: str,
        number: int,
        local: int | None = None,
        *,
        unix: str | Path | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> AsyncPort:
        """Listen on 127.0.0.1:`local` (None or 0: any free port), or on a new unix socket at the path `unix` that only
        this user may use. Every connection goes to the TCP server on port `number` of the trajectory's sandbox, on its
        loopback or all its addresses, whatever its network. It need not run yet: each connection looks for it anew. Use
        the result in a `with` block, or close it.

        A connection that cannot be made is closed, and `on_failure` is called with the reason, from another thread. It
        is cut when the sandbox ends. UsageError: the numbers, the path; Conflict: the local address is taken.
        """
        check_count("port", number, 1, _LAST_PORT)
        check_count("local", 0 if local is None else local, 0, _LAST_PORT)
        if unix is not None and local is not None:
            raise UsageError("a local port and a unix socket were named; leave one of them out")
        found = await self._transport.call(operations.TRAJECTORY, ref)
        listener = _listen_on_path(local_path(unix)) if unix is not None else _listen(local or 0)
        return AsyncPort(self._transport, operations.CONNECT.to(found.id, str(number)), listener, on_failure)
