"""Directories and entries: the service `filesystem.Filesystem`. Each change is one call of the daemon, with its
snapshot. The content of files goes through transfers.py."""

from __future__ import annotations

import posixpath

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.integrations.e2b.connect import Messages, Rpc, text
from snapshotd.integrations.e2b.failures import WireError, unsupported
from snapshotd.integrations.e2b.inside.call import InnerCall
from snapshotd.integrations.e2b.inside.entries import Entries
from snapshotd.integrations.e2b.inside.watching import DirectoryWatcher, DirectoryWatchers
from snapshotd.integrations.e2b.people import People

_ENTRIES_MAX = 100_000


class Filesystem:
    """The service's methods."""

    def __init__(self, client: AsyncSnapshotd, people: People, entries: Entries, watchers: DirectoryWatchers) -> None:
        self._client, self._people, self._entries, self._watchers = client, people, entries, watchers
        self.methods = {
            "Stat": Rpc(unary=self._stat),
            "MakeDir": Rpc(unary=self._make_dir),
            "Move": Rpc(unary=self._move),
            "ListDir": Rpc(unary=self._list_dir),
            "Remove": Rpc(unary=self._remove),
            "WatchDir": Rpc(serving=self._watch_dir),
            "CreateWatcher": Rpc(unary=self._create_watcher),
            "GetWatcherEvents": Rpc(unary=self._watcher_events),
            "RemoveWatcher": Rpc(unary=self._remove_watcher),
        }

    async def _stat(self, call: InnerCall, message: Json) -> Json:
        return {"entry": await self._entries.entry(call.box.id, self._path(call, message))}

    async def _make_dir(self, call: InnerCall, message: Json) -> Json:
        path = self._path(call, message)
        try:
            found = await self._entries.stat(call.box.id, path)
        except NotFound:
            await self._client.make_dir(call.box.id, path, user=call.person.name)
            return {"entry": await self._entries.entry(call.box.id, path)}
        if found.is_dir:
            raise WireError("already_exists", f"directory already exists: {path}")
        raise WireError("invalid_argument", f"path already exists but it is not a directory: {path}")

    async def _move(self, call: InnerCall, message: Json) -> Json:
        path, to = self._path(call, message, "source"), self._path(call, message, "destination")
        parent = posixpath.dirname(to)
        try:
            await self._entries.stat(call.box.id, parent)
        except NotFound:
            await self._client.make_dir(call.box.id, parent, user=call.person.name)
        try:
            await self._client.rename_file(call.box.id, path, to)
        except Conflict as exc:
            raise WireError("invalid_argument", exc.message) from exc
        return {"entry": await self._entries.entry(call.box.id, to)}

    async def _list_dir(self, call: InnerCall, message: Json) -> Json:
        depth = message.get("depth") or 1
        if not isinstance(depth, int) or depth < 0:
            raise WireError("invalid_argument", "`depth` has to be a number from 1 on")
        told: list[Json] = []
        await self._list_below(call.box.id, self._path(call, message), depth, told)
        return {"entries": told}

    async def _list_below(self, sandbox: str, path: str, depth: int, told: list[Json]) -> None:
        for one in await self._entries.list(sandbox, path):
            at = posixpath.join(path, one.name)
            told.append(await self._entries.describe(sandbox, at, one))
            if len(told) > _ENTRIES_MAX:
                raise WireError("resource_exhausted", f"more than {_ENTRIES_MAX} entries; list a directory with fewer")
            if one.is_dir and depth > 1:
                try:
                    await self._list_below(sandbox, at, depth - 1, told)
                except (NotFound, UsageError):
                    pass  # it has gone meanwhile, or something is mounted there

    async def _remove(self, call: InnerCall, message: Json) -> Json:
        try:
            await self._client.remove_file(call.box.id, self._path(call, message))
        except NotFound:  # as `envd`, no error, unless it is the sandbox that is gone
            await self._entries.stat(call.box.id, "/")
        return {}

    async def _watch_dir(self, call: InnerCall, message: Json) -> Messages:
        watcher = await self._watcher(call, message)
        yield {"start": {}}
        async for event in watcher.events(call.keepalive_s):
            yield {"keepalive": {}} if event is None else {"filesystem": event}

    async def _create_watcher(self, call: InnerCall, message: Json) -> Json:
        return {"watcherId": self._watchers.keep(await self._watcher(call, message))}

    async def _watcher_events(self, call: InnerCall, message: Json) -> Json:
        return {"events": self._watchers.find(call.box.id, text(message, "watcherId")).take()}

    async def _remove_watcher(self, call: InnerCall, message: Json) -> Json:
        await self._watchers.remove(call.box.id, text(message, "watcherId"))
        return {}

    async def _watcher(self, call: InnerCall, message: Json) -> DirectoryWatcher:
        if message.get("allowNetworkMounts"):
            raise unsupported("network mounts", "leave `allow_network_mounts` out")
        path = self._path(call, message)
        if not (await self._entries.stat(call.box.id, path)).is_dir:
            raise WireError("invalid_argument", f"path {path} is not a directory")
        return await self._watchers.open(
            call.box.id, path, deep=bool(message.get("recursive")), told=bool(message.get("includeEntry"))
        )

    def _path(self, call: InnerCall, message: Json, name: str = "path") -> str:
        return self._people.path(call.box, call.person, text(message, name))
