"""`SnapshotdSessionStore`: the SDK's transcripts in the daemon's catalog, and the files that belong to each message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    SessionKey,
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
    fold_session_summary,
    project_key_for_directory,
)

from snapshotd.api.wire import hook_socket_of
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.local.hook_settings import settings_of
from snapshotd.errors import NotFound, UsageError
from snapshotd.integrations.claude_agent.index import Fact, SessionIndex
from snapshotd.integrations.logs import StoredLog


class SnapshotdSessionStore(SessionStore):
    """A `SessionStore` whose sessions know their files.

        store = SnapshotdSessionStore()
        async for message in query(prompt="...", options=await store.options(ClaudeAgentOptions(cwd="project"))):
            ...

    Each tool call has one snapshot of the working folder, by hooks, and none of it runs in a sandbox. A batch of entries is
    durable when `append` returns, whole or not there at all. Errors: the client's; the SDK tries an `append` three times.
    """

    def __init__(self, client: AsyncSnapshotd | None = None) -> None:
        """`client`: of another daemon than the default one."""
        self._client = client or AsyncSnapshotd()
        self._index = SessionIndex(self._client)
        self._logs: dict[tuple[str, ...], StoredLog] = {}

    async def options(self, options: ClaudeAgentOptions, *, take_back: str | None = None) -> ClaudeAgentOptions:
        """The same options with this store, and with hooks that take a snapshot of the folder after each call.

        With `resume` and `resume_session_at` the folder gets the files of that message first; `snapshotd undo` takes that
        back. NotFound: the message has no snapshot, or it is gone. Conflict: several sessions have changed files since; say
        with `take_back` whose changes go: one session's id, or "all"."""
        await self._client.trajectories()  # a daemon has to be there before the first hook
        if options.resume is not None and options.resume_session_at is not None:
            folder = str(options.cwd or Path.cwd())
            trajectory, snapshot = await self.snapshot_at(folder, options.resume, options.resume_session_at)
            await self._client.rewind(trajectory, snapshot, mode="files", session=take_back)
        settings = _settings_of(options)
        for event, groups in settings_of("claude", hook_socket_of(self._client.state_dir), None).groups().items():
            settings.setdefault("hooks", {}).setdefault(event, []).extend(groups)
        return dataclasses.replace(
            options, session_store=self, session_store_flush="eager", settings=json.dumps(settings)
        )

    async def snapshot_at(self, folder: str | Path, session: str, message: str) -> tuple[str, str]:
        """Trajectory and snapshot of the files as they were at a message of a session, by its `uuid`. NotFound."""
        key: SessionKey = {"project_key": project_key_for_directory(folder), "session_id": session}
        calls = _calls_before(await self.load(key) or [], message)
        boxes = await self._client.trajectories()
        boxes.sort(key=lambda box: not (box.name or "").startswith(Path(folder).name))  # its own first
        for box in boxes:
            taken = {entry.details.get("tool_use_id"): entry.snapshot async for entry in self._client.journal(box.id)}
            for call in reversed(calls):
                if (snapshot := taken.get(call)) is not None:
                    return box.id, snapshot
        raise NotFound(
            f"message {message} of session {session} has no snapshot: no call with hooks comes before it, or the folder's "
            "trajectory was removed; resume without `resume_session_at`, which needs no files"
        )

    # -- the SDK's protocol --------------------------------------------------------------------------------------------

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        if not entries:
            return
        subpath, log = await self._log(key)
        await log.append(entries)

        def note(fact: Fact) -> None:
            fact["there"] = sorted({*fact["there"], subpath})
            if not subpath:
                fact["summary"] = fold_session_summary(fact["summary"], key, entries)

        await self._index.change(key["project_key"], key["session_id"], note)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        _, log = await self._log(key)
        found: list[SessionStoreEntry] = []
        known: set[Any] = set()
        for batch in await log.read():
            for entry in batch.value:  # a batch whose answer was lost comes again
                if entry.get("uuid") is None or entry["uuid"] not in known:
                    known.add(entry.get("uuid"))
                    found.append(entry)
        return found or None

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        found = await self._index.all(project_key)
        return [{"session_id": session, "mtime": fact["mtime"]} for session, fact in found.items()]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        found = await self._index.all(project_key)
        return [{**fact["summary"], "mtime": fact["mtime"]} for fact in found.values() if fact["summary"] is not None]

    async def delete(self, key: SessionKey) -> None:
        """Remove a transcript, and without a subpath all of its session. Nothing of it is seen from the moment of one durable
        write; then its entries go."""
        project, session, subpath = key["project_key"], key["session_id"], key.get("subpath") or ""
        fact = await self._index.get(project, session)
        gone = [one for one in fact["there"] if subpath in ("", one)]
        logs = [(await self._log({**key, "subpath": one}))[1] for one in gone]

        def forget(fact: Fact) -> None:
            fact["there"] = [one for one in fact["there"] if one not in gone]
            fact["logs"] |= {one: fact["logs"].get(one, 0) + 1 for one in gone}
            fact["summary"] = fact["summary"] if subpath else None

        if gone:
            await self._index.change(project, session, forget)
        for log in logs:
            await log.remove()

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        fact = await self._index.get(key["project_key"], key["session_id"])
        return [subpath for subpath in fact["there"] if subpath]

    async def _log(self, key: SessionKey) -> tuple[str, StoredLog]:
        project, session, subpath = key["project_key"], key["session_id"], key.get("subpath") or ""
        number = (await self._index.get(project, session))["logs"].get(subpath, 0)
        names = ("claude", project, session, f"{number}:{subpath}")
        return subpath, self._logs.setdefault(names, StoredLog(self._client, *names))


def _calls_before(entries: list[SessionStoreEntry], message: str) -> list[str]:
    """The calls whose results are in a session up to a message, oldest first. NotFound: it is not there."""
    calls: list[str] = []
    for entry in entries:
        content = (entry.get("message") or {}).get("content")
        blocks = content if isinstance(content, list) else []
        calls += (block["tool_use_id"] for block in blocks if block.get("type") == "tool_result")
        if entry.get("uuid") == message:
            return calls
    raise NotFound(
        f"the session has no message {message}; take the `uuid` of one that `get_session_messages_from_store` shows"
    )


def _settings_of(options: ClaudeAgentOptions) -> dict[str, Any]:
    """The settings that the options name or hold. UsageError: they are no JSON object."""
    text = options.settings or "{}"
    try:
        settings = json.loads(text if text.lstrip().startswith("{") else (Path(options.cwd or ".") / text).read_text())
    except (OSError, ValueError) as exc:
        raise UsageError(f"the settings of the options cannot be read: {exc}") from exc
    if not isinstance(settings, dict):
        raise UsageError("the settings of the options are no JSON object")
    return settings
