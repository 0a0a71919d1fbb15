"""One pass over a stream of bytes that finds its secrets. It decides on each part as soon as later bytes can no longer
matter.

Configured values and shapes are searched independently. Where they overlap, the configured value is the secret, and the
parts of the shape that stick out are secrets too. A marker that is there already stays. The result does not depend on
how the stream is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from snapshotd.secrets.base import Found
from snapshotd.secrets.configured import Configured
from snapshotd.secrets.needles import LOOK_BACK
from snapshotd.secrets.shapes import NAMES, Shapes, Span

PIECE_BYTES = 64 << 10
"""Limit of one `Scan.feed`, because a hostile text has a candidate every few bytes."""


class Patterns:
    """The patterns of a search. Immutable, for any number of scans at a time."""

    def __init__(self, configured: Configured) -> None:
        self.configured = configured
        self.shapes = Shapes(NAMES | configured.names)

    def none_in(self, data: bytes) -> bool:
        """True if this, as a whole text, surely holds neither secrets nor markers."""
        return not self.configured.needles.find(data, 0, True)[0] and not self.shapes.find(data, 0, True)[0]


class Scan:
    """The state of one stream. Holds back bytes that may begin a secret: at most about twice the longest one."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._data = b""
        self._given = 0
        """Bytes of the data that were returned. The bytes before (`LOOK_BACK`) stay for patterns that look back."""
        self._configured_from = 0
        self._shapes_from = 0
        self._configured: list[Span] = []
        self._shaped: list[Span] = []

    def feed(self, data: bytes, final: bool = False) -> list[bytes | Found]:
        """The next piece of the stream; returns the parts that are decided now, in order. With `final` all of them
        are."""
        self._data += data
        configured = self._patterns.configured
        spans, self._configured_from = configured.needles.find(self._data, self._configured_from, final)
        self._configured += [Span(begin, end, configured.name(self._data[begin:end])) for begin, end in spans]
        shaped, self._shapes_from = self._patterns.shapes.find(self._data, self._shapes_from, final)
        self._shaped += shaped
        limit = min(self._configured_from, self._shapes_from)
        out = list(self._take_decided(limit) if self._configured or self._shaped else self._take_text(limit))
        self._drop_given()
        return out

    def _take_decided(self, limit: int) -> Iterator[bytes | Found]:
        for begin, end, name in self._secrets():
            if end > limit:
                limit = min(limit, begin)
                break
            yield from self._take_text(begin)
            assert name is not None
            yield Found(name, self._data[begin:end])
            self._given = end
        yield from self._take_text(limit)

    def _take_text(self, end: int) -> Iterator[bytes]:
        if self._given < end:
            yield self._data[self._given : end]
            self._given = end

    def _secrets(self) -> list[Span]:
        """The spans found so far without overlaps, in order, from `_given` on."""
        markers = [span for span in self._shaped if span.name is None]
        configured = list(_clear_of(self._configured, markers))
        tokens = _without((span for span in self._shaped if span.name is not None), configured)
        return sorted(
            Span(max(span.begin, self._given), span.end, span.name)
            for span in (*configured, *tokens)
            if span.end > self._given
        )

    def _drop_given(self) -> None:
        drop = max(0, self._given - LOOK_BACK)
        self._data = self._data[drop:]
        self._configured = [_move(span, drop) for span in self._configured if span.end > self._given]
        self._shaped = [_move(span, drop) for span in self._shaped if span.end > self._given]
        self._configured_from -= drop
        self._shapes_from -= drop
        self._given -= drop


def _move(span: Span, by: int) -> Span:
    return Span(span.begin - by, span.end - by, span.name)


def _clear_of(spans: Iterable[Span], others: list[Span]) -> Iterator[Span]:
    """The spans that touch none of the others. Both are in order and without overlaps."""
    at = 0
    for span in spans:
        while at < len(others) and others[at].end <= span.begin:
            at += 1
        if at == len(others) or others[at].begin >= span.end:
            yield span


def _without(spans: Iterable[Span], cuts: list[Span]) -> Iterator[Span]:
    """The parts of the spans outside of the cuts. Both are in order and without overlaps."""
    at = 0
    for begin, end, name in spans:
        while at < len(cuts) and cuts[at].end <= begin:
            at += 1
        cut = at
        while cut < len(cuts) and cuts[cut].begin < end:
            if begin < cuts[cut].begin:
                yield Span(begin, cuts[cut].begin, name)
            begin = cuts[cut].end
            cut += 1
        if begin < end:
            yield Span(begin, end, name)
