"""Requests under a key of their client's: whatever they make is made once, however often they are asked.

The request that is at work is known to its thread (`present`): the verb hands it to the transaction that makes what was
asked for, so that a crash leaves both or neither (`catalog/tables/requests.py`). A second request under the key waits for the
first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.failpoints import hit
from snapshotd.types import RequestKey

T = TypeVar("T")
_AGAIN_S = 3.0
"""A client that lost the answer asks again at once."""
_present: ContextVar[RequestKey | None] = ContextVar("request", default=None)


def present() -> RequestKey | None:
    """The request whose work this thread does; None: it has no key. For the one commit that is what it asks for."""
    return _present.get()


@contextmanager
def without_key() -> Iterator[None]:
    """Let the thread work without a key inside the block."""
    token = _present.set(None)
    try:
        yield
    finally:
        _present.reset(token)


class _Key:
    """A key under which requests are at work."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.asked = 0
        self.present = 0


class Asking:
    """A request, as long as its client waits for the answer. This one has no key: it is made."""

    def once(self, make: Callable[[], T], recall: Callable[[tuple[str, ...]], T], *, recall_only: bool = False) -> T:
        """The answer: of `make`, or if an earlier request under the key has made it, of `recall`, which gets the ids of
        what was made. Waits while another one under the key is at work. The work of `make` and the key become durable
        together; a key whose request failed is free again. Conflict: the key is another request's. With `recall_only`
        NotFound if nothing was made."""
        return make()

    def wait_for_repeat(self) -> bool:
        """Wait some seconds for the client, which went away before the answer, to ask again under its key. True if it has."""
        return False


class Requests:
    """See the module's text. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._keys: dict[str, _Key] = {}
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, request: RequestKey | None) -> Iterator[Asking]:
        """The request of a client, for the block in which the client waits. `request`: its key, if it has one. The verbs that
        are called in `Asking.once` belong to it."""
        if request is None:
            yield Asking()
            return
        with self._lock:
            key = self._keys.setdefault(request.key, _Key())
            key.present += 1
        with key.changed:
            key.asked += 1
            number = key.asked
            key.changed.notify_all()
        try:
            yield _Keyed(self._catalog, request, key, number)
        finally:
            with self._lock:
                key.present -= 1
                if not key.present:
                    del self._keys[request.key]


class _Keyed(Asking):
    def __init__(self, catalog: Catalog, request: RequestKey, key: _Key, number: int) -> None:
        self._catalog, self._request, self._key, self._number = catalog, request, key, number

    def once(self, make: Callable[[], T], recall: Callable[[tuple[str, ...]], T], *, recall_only: bool = False) -> T:
        with self._key.lock:
            made = self._catalog.requests.find(self._request)
            if made is not None:
                return recall(made)
            if recall_only:
                raise NotFound(
                    "nothing is recorded under this idempotency key: what was asked for failed, was cut off, or has been done "
                    "more than a day ago; look at the trajectory's log before you ask for it again"
                )
            token = _present.set(self._request)
            try:
                outcome = make()
            except BaseException:
                self._catalog.requests.forget(self._request)
                raise
            finally:
                _present.reset(token)
        hit("engine.request.done")
        return outcome

    def wait_for_repeat(self) -> bool:
        with self._key.changed:
            return self._key.changed.wait_for(lambda: self._key.asked > self._number, _AGAIN_S)
