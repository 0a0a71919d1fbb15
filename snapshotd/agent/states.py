"""`state`: the agent's own JSON values, saved with each snapshot."""

from __future__ import annotations

import os
import threading
from typing import Any, Dict, Iterator, MutableMapping, Optional

from snapshotd.agent.calls import put, within
from snapshotd.agent.session import session
from snapshotd.agent.wire.values import label, strict


class State(MutableMapping[str, Any]):
    """A mapping of texts to JSON values. Thread-safe.

    Read from the daemon once per process, and again after recorded calls were replayed; written through. Values are
    copies: a list or object that was changed in place has to be assigned again. Keys have 1 to 200 printable
    characters; a value that is not JSON is a TypeError or ValueError. All of it is limited to 1 MiB. Outside of a
    sandbox it is a dict of this process. Every access may raise SnapshotdError or SnapshotdUnavailable.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: Optional[Dict[str, Any]] = None

    def refresh(self) -> None:
        """Read it again at the next access: after another process of this sandbox has changed it."""
        self._values = None

    def __getitem__(self, key: str) -> Any:
        return strict(self._load()[key])

    def __setitem__(self, key: str, value: Any) -> None:
        key, copy = label("A key of the state", key), strict(value)
        with self._lock:
            values = self._load()
            if session.inside():
                fields = dict(within(), key=key)
                session.request("state_set", fields, put(fields, "value", copy))
            values[key] = copy

    def __delitem__(self, key: str) -> None:
        with self._lock:
            values = self._load()
            if key not in values:
                raise KeyError(key)
            if session.inside():
                session.request("state_set", dict(within(), key=key))
            del values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._load()))

    def __len__(self) -> int:
        return len(self._load())

    def __repr__(self) -> str:
        return "<state {!r}>".format(self._load())

    def _load(self) -> Dict[str, Any]:
        with self._lock:
            if self._values is None:
                self._values = dict(session.request("state", {})["body"]) if session.inside() else {}
            return self._values

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        if session.was_inside:
            self._values = None  # another process may have changed the parent's values by now


state = State()
session.on_replayed.append(state.refresh)
os.register_at_fork(after_in_child=state._after_fork)
