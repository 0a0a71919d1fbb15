"""Watches directories of sandboxes for clients.

The files are looked at again and again, and what differs is told: a sandbox needs nothing for it, no process that would be in
its snapshots, and a rewind or a merge is seen like any other change. A file that comes and goes between two looks is not
seen. A pause is ten times as long as the look before it, so a large tree costs a tenth of a processor at most.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from snapshotd.api.files import FileInfo
from snapshotd.api.record import Json
from snapshotd.errors import NotFound, SnapshotdError, UsageError
from snapshotd.integrations.e2b.failures import WireError, failure_of, gone
from snapshotd.integrations.e2b.inside.entries import Entries

_LEAST_S, _SHARE = 0.1, 10
_EVENTS_MAX = 10_000
"""Events that wait for a client; then the oldest are left out."""
_FILES_MAX = 100_000
_WATCHERS_MAX = 256
_UNASKED_S = 3600.0
"""A watcher whose client does not ask for its events ends after so long."""


class DirectoryWatchers:
    """All open ones."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._open = set[DirectoryWatcher]()
        self._kept: dict[str, DirectoryWatcher] = {}

    async def open(self, sandbox: str, path: str, *, deep: bool, told: bool) -> DirectoryWatcher:
        """Changes from now on are told. WireError: too many are open, or too many files are there."""
        if len(self._open) >= _WATCHERS_MAX:
            raise WireError("resource_exhausted", f"{_WATCHERS_MAX} directories are watched already; stop a watcher")
        watcher = DirectoryWatcher(self._entries, sandbox, path, deep, told, self._open.discard)
        self._open.add(watcher)
        try:
            await watcher.begin()
        except BaseException:
            self._open.discard(watcher)
            raise
        return watcher

    def keep(self, watcher: DirectoryWatcher) -> str:
        """The id by which a client asks for its events."""
        name = secrets.token_hex(16)
        self._kept[name] = watcher
        return name

    def find(self, sandbox: str, name: str) -> DirectoryWatcher:
        """The watcher that a client has kept under this name. WireError: there is none."""
        found = self._kept.get(name)
        if found is None or found.sandbox != sandbox:
            raise WireError("not_found", f"watcher with id {name} not found")
        return found

    async def remove(self, sandbox: str, name: str) -> None:
        """End a watcher that a client has kept. WireError: there is none."""
        await self.find(sandbox, name).end()
        self._kept.pop(name, None)

    async def end(self, sandbox: str | None = None) -> None:
        """End those of a sandbox, or all."""
        for watcher in list(self._open):
            if sandbox in (None, watcher.sandbox):
                await watcher.end()
        self._kept = {name: one for name, one in self._kept.items() if one in self._open}


class DirectoryWatcher:
    """One directory."""

    def __init__(
        self,
        entries: Entries,
        sandbox: str,
        path: str,
        deep: bool,
        told: bool,
        on_end: Callable[[DirectoryWatcher], object],
    ) -> None:
        self.sandbox = sandbox
        self._entries, self._path, self._deep, self._told, self._on_end = entries, path, deep, told, on_end
        self._waiting = asyncio.Queue[Json | WireError](_EVENTS_MAX)
        self._asked_at = time.monotonic()
        self._seen: dict[str, FileInfo] = {}
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Look for the first time, and start a task that goes on looking."""
        self._seen = await self._look()
        self._task = asyncio.create_task(self._watch())

    async def events(self, keepalive_s: float) -> AsyncIterator[Json | None]:
        """The events as they come; None where there was none for so long. It ends when nobody takes them any more.
        WireError: nothing can be watched any more."""
        try:
            while True:
                self._asked_at = time.monotonic()
                try:
                    event = await asyncio.wait_for(self._waiting.get(), keepalive_s)
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, WireError):
                    raise event
                yield event
        finally:
            await self.end()

    def take(self) -> list[Json]:
        """The events since the last time. WireError: nothing can be watched any more."""
        self._asked_at, taken = time.monotonic(), list[Json]()
        while not self._waiting.empty():
            event = self._waiting.get_nowait()
            if isinstance(event, WireError):
                if taken:
                    self._waiting.put_nowait(event)
                    break
                raise event
            taken.append(event)
        return taken

    async def end(self) -> None:
        """Stop watching. Idempotent."""
        self._on_end(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        try:
            took_s = 0.0
            while time.monotonic() - self._asked_at < _UNASKED_S:
                await asyncio.sleep(max(_LEAST_S, took_s * _SHARE))
                began = time.monotonic()
                now = await self._look()
                for name, kind in _changes(self._seen, now):
                    await self._tell(name, kind)
                self._seen, took_s = now, time.monotonic() - began
        except NotFound:
            self._put(gone(self.sandbox))
        except SnapshotdError as exc:
            self._put(failure_of(exc))
        except WireError as exc:
            self._put(exc)
        self._on_end(self)

    async def _tell(self, name: str, kind: str) -> None:
        event: Json = {"name": name, "type": f"EVENT_TYPE_{kind}"}
        if self._told and kind not in ("REMOVE", "RENAME"):
            with suppress(NotFound, UsageError):
                event["entry"] = await self._entries.entry(self.sandbox, posixpath.join(self._path, name))
        self._put(event)

    def _put(self, event: Json | WireError) -> None:
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait(event)

    async def _look(self) -> dict[str, FileInfo]:
        """The entries, by their names below the directory. An empty directory, or one that is gone, is the same."""
        found: dict[str, FileInfo] = {}
        below = [""]
        while below:
            at = below.pop()
            try:
                entries = await self._entries.list(self.sandbox, posixpath.join(self._path, at))
            except (NotFound, UsageError):
                await self._entries.stat(self.sandbox, "/")  # NotFound: the sandbox is gone
                continue
            for one in entries:
                name = posixpath.join(at, one.name)
                found[name] = one
                if self._deep and one.is_dir:
                    below.append(name)
            if len(found) > _FILES_MAX:
                raise WireError(
                    "resource_exhausted", f"more than {_FILES_MAX} files are below {self._path}; watch less"
                )
        return found


def _changes(before: dict[str, FileInfo], now: dict[str, FileInfo]) -> Iterator[tuple[str, str]]:
    """Name and kind of each change. A new file with the content, rights and time of one that has gone is that one under
    another name: it is told as `envd` does, the old name as renamed and the new one as created."""
    old = {_identity(one) for name, one in before.items() if name not in now}
    new = {_identity(one) for name, one in now.items() if name not in before}
    for name, one in before.items():
        if name not in now:
            yield name, "RENAME" if _identity(one) in new else "REMOVE"
    for name, one in now.items():
        known = before.get(name)
        if known is None:
            yield name, "CREATE"
            if one.kind == "file" and one.size and _identity(one) not in old:
                yield name, "WRITE"
            continue
        if not one.is_dir and _content(one) != _content(known):
            yield name, "WRITE"
        if (one.mode, one.uid, one.gid) != (known.mode, known.uid, known.gid):
            yield name, "CHMOD"


def _content(one: FileInfo) -> tuple[object, ...]:
    return one.kind, one.size, one.modified_at, one.target


def _identity(one: FileInfo) -> tuple[object, ...]:
    return one.kind, one.size, one.modified_at, one.mode, one.uid, one.gid, one.target
