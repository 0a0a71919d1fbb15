"""The verbs for calls that wait for a person."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from snapshotd.api import operations
from snapshotd.api.approvals import ApprovalInfo, ApprovalView, ApproveRequest, AskRequest, DenyRequest
from snapshotd.api.wire import PREVIEW_FILES
from snapshotd.client.twofold import stream, verb
from snapshotd.client.verbs.base import VerbPart
from snapshotd.client.verbs.history import RECORDED


class ApprovalVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @verb
    async def ask(
        self,
        trajectory: str,
        call: str,
        tool: str,
        arguments: Any = None,
        *,
        side_effect: str = "local",
        question: str | None = None,
        expires_s: float | None = None,
    ) -> ApprovalInfo | None:
        """Ask a person about a call that this program is about to make, and that it names `call` (1 to 64 letters, digits,
        '.', '_' and '-'). Returns at once; again with the same call: what has been decided by now. Without a question
        the policy decides if a person is asked; None: it lets the call run. Denied: it does not; Conflict: another call
        has the name."""
        body = AskRequest(trajectory, call, tool, arguments, side_effect, question, expires_s)
        return await self._transport.call(operations.ASK, body=body)

    @verb
    async def approvals(self, status: str | None = None) -> list[ApprovalInfo]:
        """Oldest first; with `status` (pending, approved, denied, expired, stale) only the ones with it."""
        return await self._transport.call(operations.APPROVALS, query={"status": status})

    @verb
    async def approval(self, ref: str, *, max_files: int = PREVIEW_FILES) -> ApprovalView:
        """One, by a unique prefix of its id, with the files that changed since the trajectory's last approval."""
        return await self._transport.call(operations.APPROVAL, ref, query={"max_files": max_files})

    @verb
    async def approve(
        self, ref: str, *, by: str | None = None, reason: str | None = None, arguments: Any = RECORDED
    ) -> ApprovalInfo:
        """Let the call run, with other `arguments` if they are given. `by`: the decider's name; default: this process's
        user. Conflict: decided already, or the trajectory's files have changed since (the approval is stale then)."""
        return await self._transport.call(operations.APPROVE_CALL, ref, body=ApproveRequest(by, reason, arguments))

    @verb
    async def deny(self, ref: str, *, by: str | None = None, reason: str | None = None) -> ApprovalInfo:
        """Refuse it; the agent is told why. Conflict: decided already."""
        return await self._transport.call(operations.DENY_CALL, ref, body=DenyRequest(by, reason))

    @stream
    async def watch(self) -> AsyncIterator[dict[str, Any]]:
        """Events for outside tools, of all trajectories, from this call on (with asyncio: from the first event that is
        asked for on): `approval` (a person is asked, or has
        decided) and `finished`. A client that does not keep up loses the oldest (an event `lost` has their `count`).
        Ends with DaemonUnavailable, or when the daemon stops; close it to leave."""
        return _news(await self._transport.lines(*operations.WATCH.at()))


async def _news(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        if event["event"] not in ("watching", "alive"):
            yield event
