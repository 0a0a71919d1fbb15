"""The background work on the index of texts: it follows the catalog, in the order in which snapshots were committed. It waits
until the daemon is quiet or somebody looks for something, so that agents' steps and the daemon's start have the processor.

The rows of the catalog's snapshots have growing numbers, so what is new lies above a mark. A trajectory that is removed takes
its rows away, and SQLite gives the highest numbers again. So the snapshot at the mark is compared: if it is another one, and
at each start, all rows are compared with those of the index, and whatever differs is taken away or added. A crash therefore
loses nothing: what was not committed to the index is found at the next start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from snapshotd.catalog.base import NumberedSnapshot
from snapshotd.engine.base import Event
from snapshotd.engine.context import Context
from snapshotd.engine.search.index import TextIndex
from snapshotd.engine.search.texts import Text, texts_of
from snapshotd.errors import DataLoss, NotFound, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.kernel import turns
from snapshotd.types import TrajectoryID

_log = logging.getLogger(__name__)
_PAGE = 500
_BATCH_CHARS = 1 << 20
"""Texts of one transaction, about."""
QUIET_S = 3.0
"""Texts are added when no step came for so long, when somebody looks for something ..."""
WAITING_MAX = 1000
"""... or when so many events wait. A step has two, so this is about as much as a search can wait for."""
_RETRY_S = 60.0


class Filling:
    """See the module's text. One thread. Thread-safe."""

    def __init__(self, context: Context, index: TextIndex) -> None:
        self._context, self._index = context, index
        self._changed = threading.Condition()
        self._asked = 0
        """Number of the change that is to be in the index."""
        self._done = -1
        self._urgent = self._closed = False
        self._gone: set[TrajectoryID] = set()
        self._mark: NumberedSnapshot | None = None
        self._thread = threading.Thread(target=self._work, name="find-index")

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Note an event of the catalog. Returns at once."""
        if event["event"] not in ("snapshot", "trajectory"):
            return
        with self._changed:
            self._asked += 1
            if event["event"] == "trajectory":
                self._gone.add(event["trajectory"])  # perhaps: the catalog knows
            if self._asked - self._done in (1, WAITING_MAX):  # else the thread is awake, or sleeps until it is quiet
                self._changed.notify_all()

    def catch_up(self, within_s: float) -> bool:
        """Wait until all that was committed before this call is in the index. False: it is not, within that time."""
        with self._changed:
            wanted = self._asked
            self._urgent = self._urgent or self._done < wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= wanted or self._closed, within_s)

    def waiting(self) -> int:
        """Number of snapshots that are not in the index yet, about."""
        states = self._context.catalog.figures.states()
        return max(0, sum(states.values()) - self._index.count())

    def close(self) -> None:
        """End; what is left is done after the next start. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        """This is the top of a thread: what fails is tried again."""
        rest, damaged = 0.0, False
        while not self._wait(rest):
            with self._changed:
                asked, gone, self._urgent = self._asked, self._gone, False
                self._gone = set()
            try:
                if damaged:
                    self._index.start_anew()
                self._fill(gone)
                rest, damaged = 0.0, False
            except DataLoss as exc:
                _log.warning("the index of texts is made anew: %s", exc.message)
                self._mark, damaged, rest = None, True, QUIET_S
                continue
            except SnapshotdError as exc:
                _log.warning("texts wait to be indexed: %s", exc.message)
                self._mark, rest = None, _RETRY_S
                continue
            except Exception:  # noqa: BLE001 - the top of a thread
                _log.exception("texts cannot be indexed; they are tried again")
                self._mark, rest = None, _RETRY_S
                continue
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _wait(self, rest: float) -> bool:
        """Wait for work. True at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, rest)
            self._changed.wait_for(lambda: self._closed or self._asked > self._done)
            seen = -1
            while seen != self._asked and not self._is_due():
                seen = self._asked
                self._changed.wait_for(self._is_due, QUIET_S)
            return self._closed

    def _is_due(self) -> bool:
        return self._closed or self._urgent or self._asked - self._done >= WAITING_MAX

    def _fill(self, gone: set[TrajectoryID]) -> None:
        for trajectory in gone:
            try:
                self._context.catalog.trajectories.get(trajectory)
            except NotFound:
                self._index.forget(trajectory)
        mark = self._mark
        if mark is not None and self._context.catalog.figures.rows(mark.pk - 1, 1) != [mark]:
            mark = None  # the newest were removed
        self._follow(mark)

    def _follow(self, mark: NumberedSnapshot | None) -> None:
        """Make the index have the catalog's rows above a mark, and no others there."""
        after = 0 if mark is None else mark.pk
        while page := self._context.catalog.figures.rows(after, _PAGE):
            turns.give_way()
            last = page[-1].pk
            known = {row.pk: row for row in self._index.rows(after, last)}
            gone = [pk for pk, row in known.items() if row not in set(page)]
            missing = [row for row in page if known.get(row.pk) != row]
            self._change(gone, missing)
            after, self._mark = last, page[-1]
            if self._closed:
                return
        self._change([row.pk for row in self._index.rows(after, None)], ())

    def _change(self, gone: Sequence[int], missing: Sequence[NumberedSnapshot]) -> None:
        if gone:
            self._index.change(gone, ())
        batch: list[tuple[NumberedSnapshot, list[Text]]] = []
        size = 0
        for row in missing:
            if self._closed:
                return
            turns.give_way()
            try:
                texts = list(texts_of(self._context, self._context.catalog.snapshots.get(row.id)))
            except NotFound:
                continue  # removed meanwhile
            batch.append((row, texts))
            size += sum(len(text.text) for text in texts)
            if size >= _BATCH_CHARS:
                self._commit(batch)
                batch, size = [], 0
        if batch:
            self._commit(batch)

    def _commit(self, batch: list[tuple[NumberedSnapshot, list[Text]]]) -> None:
        hit("engine.find.read")
        self._index.change((), batch)
        hit("engine.find.added")
