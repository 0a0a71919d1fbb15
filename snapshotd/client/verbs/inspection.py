"""The verbs that look at trajectories and snapshots, and that bring their files to this machine."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from snapshotd.api import operations
from snapshotd.api.find import FindInfo
from snapshotd.api.record import replace
from snapshotd.api.snapshots import (
    ChangeInfo,
    FileStatus,
    LogOptions,
    LogQuery,
    MessageInfo,
    RestoreInfo,
    RestoreRequest,
    SnapshotInfo,
    TagRequest,
)
from snapshotd.api.trajectories import OverviewInfo, SandboxInfo, TrajectoryInfo
from snapshotd.api.wire import check_ref
from snapshotd.client.local.arguments import local_path, sandbox_path, wrong
from snapshotd.client.results import ApplyInfo
from snapshotd.client.twofold import on_this_machine, stream, verb
from snapshotd.client.verbs.base import VerbPart, b64, records_of
from snapshotd.errors import Conflict, DaemonUnavailable

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

Which = Literal["stdout", "stderr", "output"]


def apply(
    client: Snapshotd,
    snapshot: str,
    to: str | Path,
    base: str | None = None,
    path: str | bytes | None = None,
    dry_run: bool = False,
    *,
    commit: str | bool = False,
    hooks: bool = False,
) -> ApplyInfo:
    """Bring what changed from `base` to `snapshot` below the directory `path` (/workspace) to the local folder
    `to`, all or nothing; with `dry_run`, only say what that would be. `base` is the snapshot from right after the
    workspace was copied in, unless given. With `commit` (True, or a message), make a git commit of it; hooks of the
    folder's repository, and programs that its settings name, run only with `hooks`.

    Three-way: the folder's own changes are kept. Where both exclude each other, nothing is written and the answer
    names the conflicts. UsageError (the folder cannot be read or written; no commit can be made there, or none
    without a program of its repository), Conflict
    (the folder changed meanwhile; another apply is at work; git refused the commit of what is applied), OutOfSpace,
    Unsupported (there is no git, and it is needed)."""
    from snapshotd.client.apply import apply

    info = client.snapshot(snapshot)
    start = apply.first_of(client, info) if base is None else client.snapshot(base).id
    source = apply.SnapshotReader(client, start, info.id, apply.WORKSPACE if path is None else sandbox_path(path))
    message = None if commit is False else apply.commit_message("" if commit is True else commit, info)
    done = apply.apply(source, local_path(to, "to"), dry_run=dry_run, message=message, hooks=hooks)
    return replace(done, base=start, snapshot=info.id)


class InspectionVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @verb
    async def trajectories(self) -> list[TrajectoryInfo]:
        return await self._transport.call(operations.TRAJECTORIES)

    @verb
    async def overview(self, trajectory: str | None = None) -> list[OverviewInfo]:
        """All trajectories, oldest first, or this one alone, each with its newest snapshot, the one that it was forked from,
        what it takes on disk, and the tokens and cost of its model calls."""
        chosen = None if trajectory is None else check_ref(trajectory, "trajectory")
        return await self._transport.call(operations.OVERVIEW, query={"trajectory": chosen})

    @verb
    async def find(
        self, text: str, trajectory: str | None = None, *, limit: int = 50, before: int | None = None
    ) -> FindInfo:
        """The records (arguments, outputs, messages) of all trajectories, or of one's history, that have all words of `text`,
        the newest first: "several words" in a row, word* by its beginning. At most `limit` (200); `before` is the `next` of an
        earlier answer."""
        chosen = None if trajectory is None else check_ref(trajectory, "trajectory")
        query = {"q": text, "trajectory": chosen, "limit": limit, "before": before}
        return await self._transport.call(operations.FIND, query=query)

    @verb
    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._transport.call(operations.SANDBOXES)

    @verb
    async def log(self, ref: str, last: int | None = None, **options: Unpack[LogOptions]) -> list[SnapshotInfo]:
        """A trajectory's own snapshots, oldest first; with `before`, only those whose `seq` is smaller; with `last` (1 or
        more), only this number of the newest of these."""
        return await self._transport.call(operations.LOG, ref, query=LogQuery(last, **options))

    @verb
    async def all_snapshots(self) -> list[SnapshotInfo]:
        return await self._transport.call(operations.ALL_SNAPSHOTS)

    @verb
    async def conversation(self, ref: str, *, start: int = 0, count: int | None = None) -> list[MessageInfo]:
        """The conversation up to a snapshot, from message number `start` on; at most `count` messages."""
        return await self._transport.call(operations.CONVERSATION, ref, query={"start": start, "count": count})

    @stream
    async def output(
        self, ref: str, which: Which = "output", *, start: int = 0, count: int | None = None
    ) -> AsyncIterator[bytes]:
        """A tool call's recorded output in pieces, from byte `start` on; at most `count` bytes. DataLoss: it is damaged, or
        gone since it was."""
        return await self._transport.pieces(*operations.OUTPUT.at(ref, which), query={"start": start, "count": count})

    @stream
    async def diff(self, a: str, b: str | None = None) -> AsyncIterator[ChangeInfo]:
        """The changes from `a` to `b`; with one ref, from its parent to it."""
        lines = await self._transport.lines(*operations.DIFF.at(), query=_pair(a, b))
        return records_of(lines, ChangeInfo, "the list of changes")

    @verb
    async def patch(
        self, a: str, b: str | None = None, *, write: Callable[[bytes], object], root: str | bytes = "/workspace"
    ) -> int:
        """Write the changes below `root` as a patch that `git apply` and `patch -p1` take. Returns how many changes lie
        elsewhere."""
        query = {**_pair(a, b), "root_b64": b64(sandbox_path(root))}
        async for event in await self._transport.lines(*operations.PATCH.at(), query=query):
            if event["event"] == "end":
                return int(event["outside"])
            write(base64.b64decode(event["data_b64"]))
        raise DaemonUnavailable(
            "the daemon ended the patch early, so what was written is not complete; repeat the command"
        )

    @stream
    async def cat(self, ref: str, path: str | bytes) -> AsyncIterator[bytes]:
        """A regular file's content in pieces. NotFound; UsageError for anything but a regular file."""
        return await self._transport.pieces(*operations.CAT.at(ref), query={"path_b64": b64(sandbox_path(path))})

    @verb
    async def lstat(self, ref: str, path: str | bytes) -> FileStatus:
        """The entry at a path of a snapshot, links not followed. NotFound."""
        return await self._transport.call(operations.FILE_STATUS, ref, query={"path_b64": b64(sandbox_path(path))})

    @verb
    async def restore(self, ref: str, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write a snapshot's tree, or the part below `path`, into the local folder `to`, which must not exist or be
        empty. From a daemon on another machine, its files become this user's, as with `download`."""
        if not self._transport.way.is_here:
            return await self._in_thread(_restore_from_afar, ref, local_path(to, "to"), sandbox_path(path or "/"))
        body = RestoreRequest(str(local_path(to, "to")), os.fsdecode(sandbox_path(path)) if path else "")
        return await self._transport.call(operations.RESTORE, ref, body=body)

    apply = on_this_machine(apply)

    @verb
    async def tag(self, ref: str, name: str, *, move: bool = False) -> str:
        """Give a snapshot a tag; returns the snapshot's id. Conflict when another snapshot has the tag, unless
        `move`."""
        check_ref(ref)
        if "/" in name or name in ("", ".", ".."):  # it would lead to another path of the API
            raise wrong("name", name, "up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit")
        return (await self._transport.call(operations.TAG, name, body=TagRequest(ref, move))).snapshot

    @verb
    async def untag(self, name: str) -> None:
        await self._transport.call(operations.UNTAG, check_ref(name, "tag"))


def _restore_from_afar(client: Snapshotd, ref: str, to: Path, path: bytes) -> RestoreInfo:
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise Conflict(f"{to} exists and is not an empty folder; name another one")
    return client.download(client.snapshot(ref).id, path, to)


def _pair(a: str, b: str | None) -> dict[str, str | None]:
    return {"a": check_ref(a), "b": None if b is None else check_ref(b)}
