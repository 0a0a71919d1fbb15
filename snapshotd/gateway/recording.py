"""Records a reply while it passes: its bytes, up to a limit, and its content."""

from __future__ import annotations

from snapshotd.gateway import json_body
from snapshotd.gateway.base import ReplyContent, TurnReply, TurnRequest
from snapshotd.gateway.dialect import Dialect
from snapshotd.gateway.sse import EventReader

READ_LIMIT_BYTES = 64 << 20
"""Size limit of a stream that is put together. Past it a reply is passed on and not read any more."""


class Recording:
    """One reply. Fed with its pieces, in order, by one thread."""

    def __init__(
        self, dialect: Dialect, request: TurnRequest, status: int, content_type: str, replay_limit_bytes: int
    ) -> None:
        self.streamed = 200 <= status < 300 and content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.body_bytes = 0
        self._dialect = dialect
        self._request = request
        self._status = status
        self._content_type = content_type
        self._limit = replay_limit_bytes
        self._body = bytearray()
        self._events = EventReader(replay_limit_bytes)
        self._stream = dialect.stream_reader(request)

    def take(self, piece: bytes) -> None:
        """Record the next piece."""
        self.body_bytes += len(piece)
        if self.body_bytes <= self._limit:
            self._body += piece
        elif self._body:
            self._body = bytearray()
        if self.streamed and self.body_bytes <= READ_LIMIT_BYTES:
            for event in self._events.feed(piece):
                self._stream.feed(event)

    @property
    def hold(self) -> bool:
        """True if the agent must wait for the rest until the reply is recorded, because it could act on the rest.

        A plain reply waits as a whole, up to the limit; of a stream, the part after the model's last words waits, or
        after its first call.
        """
        limit = READ_LIMIT_BYTES if self.streamed else self._limit
        return self.body_bytes <= limit and (self._stream.settled or self._stream.asked or not self.streamed)

    @property
    def finished(self) -> bool:
        """True if the stream has announced its end. Its connection may stay open for a while."""
        return self.streamed and self._stream.finished

    def reply(self, failure: str | None, started_at_ns: int, duration_ns: int) -> TurnReply:
        """The recorded reply. `failure`: the reason why it ended early, if it did."""
        content = self._content()
        if (
            failure is None
            and self.streamed
            and not (self._stream.settled or self._stream.finished)
            and not self._unread
        ):
            failure = "the provider ended the stream before its last event"
        body = bytes(self._body) if self.body_bytes <= self._limit else None
        return TurnReply(
            self._status,
            content,
            failure is None,
            failure or content.error,
            self._content_type,
            body,
            self.body_bytes,
            started_at_ns,
            duration_ns,
        )

    @property
    def _unread(self) -> bool:
        return self._events.overflow or self.body_bytes > (READ_LIMIT_BYTES if self.streamed else self._limit)

    def _content(self) -> ReplyContent:
        if self._unread:
            return ReplyContent(error=f"the reply of {self.body_bytes} bytes is too long to be read")
        if self.streamed:
            return self._dialect.read_reply(self._stream.reply(), self._request)
        value = json_body.parse_or_none(bytes(self._body))
        if 200 <= self._status < 300:
            return self._dialect.read_reply(value, self._request)
        return ReplyContent(error=self._dialect.read_error(value) or f"HTTP status {self._status}")
