"""The output of running calls, piece by piece: shown to followers as it comes, and kept for the call's end."""

from __future__ import annotations

import base64
import threading
from dataclasses import dataclass, field

from snapshotd.engine.context import Context
from snapshotd.engine.protocol.agent_handler import StreamName
from snapshotd.engine.secrecy import ConcealedWriter
from snapshotd.types import BlobID, Trajectory


@dataclass(slots=True)
class _Output:
    """Output so far of a running call."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    writers: dict[StreamName, ConcealedWriter] = field(default_factory=dict)
    last: str | None = None
    """The request that brought the newest piece."""

    def discard(self) -> None:
        for writer in self.writers.values():
            writer.discard()


class CallOutput:
    """The output of one trajectory's running calls. Thread-safe."""

    def __init__(self, context: Context, trajectory: Trajectory) -> None:
        self._context, self._trajectory = context, trajectory
        self._output: dict[str, _Output] = {}

    def write(self, call_id: str, stream: StreamName, data: bytes, rid: str | None) -> None:
        """Add a piece, unless `rid`, its request, brought the newest one already."""
        written = self._output.get(call_id)
        if written is not None and rid is not None and written.last == rid:
            return
        output = self._output.setdefault(call_id, _Output())
        with output.lock:
            output.last = rid
            self._writer(call_id, output, stream).write(data)

    def restore(self, call_id: str, stream: StreamName, data: bytes, rid: str | None) -> None:
        """Add a piece that an earlier daemon has shown."""
        output = self._output.setdefault(call_id, _Output())
        output.last = rid
        self._writer(call_id, output, stream).restore(data)

    def save(self, call_id: str) -> dict[StreamName, BlobID]:
        """Store the output of a call that ends, and forget it."""
        output = self._output.pop(call_id, None)
        if output is None:
            return {}
        try:
            return {stream: writer.save() for stream, writer in output.writers.items()}
        finally:
            output.discard()

    def discard(self, call_id: str) -> None:
        """Forget the output of a call."""
        output = self._output.pop(call_id, None)
        if output is not None:
            output.discard()

    def _writer(self, call_id: str, output: _Output, stream: StreamName) -> ConcealedWriter:
        """The writer for one stream of a call. All pieces of the stream pass one concealer, because a secret may begin
        in one piece and end in another. If the daemon is killed, the bytes that the concealer holds back are neither
        shown nor kept."""

        def show(data: bytes) -> None:
            log = self._context.events.live(self._trajectory.id)
            if log is not None:
                encoded = base64.b64encode(data).decode()
                log.append(
                    {"event": "output", "stream": stream, "data_b64": encoded, "call": call_id, "rid": output.last}
                )

        if stream not in output.writers:
            funnel = self._context.secrecy.of(self._trajectory)
            output.writers[stream] = ConcealedWriter(self._context.spool, funnel, show)
        return output.writers[stream]
