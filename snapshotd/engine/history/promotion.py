"""Promotion: a branch becomes the head of the trajectory that it came from, in place. Nothing is destroyed.

The new snapshot has the branch's files. Its mind goes on from the last snapshot that both have in common, with copies of
what the branch said and did since, so that the trajectory needs nothing of the branch and either can be removed. The
marker has the arguments `branch`, `of` (the branch's snapshot), `since` (the common one) and `from` (the old head).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from snapshotd.api.history import PromoteRequest
from snapshotd.api.wire import check_ref
from snapshotd.engine.context import Context
from snapshotd.engine.history.effects import Effects
from snapshotd.engine.history.rewinding import Rewinding
from snapshotd.engine.journal.answers import result_of
from snapshotd.engine.journal.replay import OF_MODEL, PROMOTED
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.terms import number_of
from snapshotd.types import CallID, JournalEntry, Message, Snapshot, SnapshotID, Trajectory, new_id, short

T = TypeVar("T")
MAX_MIND_BYTES = 64 << 20
"""Messages, results and arguments of a branch, as JSON: they are held in memory and written in one transaction."""


class Promotion:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, rewinding: Rewinding, effects: Effects) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._rewinding, self._effects = rewinding, effects

    def promote(self, branch: Trajectory, request: PromoteRequest) -> Snapshot:
        """See `BranchingService.promote`."""
        into = request.into
        target = (
            self._origin(branch) if into is None else self._catalog.refs.find_trajectory(check_ref(into, "trajectory"))
        )
        self._check_related(branch, target)
        with self._context.pins.pinned(self._settle_head(branch)) as head:
            self._rewinding.check_files(target, head)
            common = self._common(branch, target, head)
            kept = self._rewinding.common_messages(head, common)
            messages, entries = self._messages_since(head, kept), self._copy_entries(branch, head, common)
            with self._sessions.start_for_change(target) as sandbox:
                if request.compensate:
                    with self._rewinding.quieten(sandbox, "promote a branch to"):
                        self._rewinding.settle(sandbox, mind=True)
                        left = self._effects.beyond(self._catalog.trajectories.get(target.id), head)
                    self._effects.run_all(target, left, "`snapshotd promote --yes` leaves the call behind")
                with self._rewinding.quieten(sandbox, "promote a branch to"):
                    self._rewinding.settle(sandbox, mind=True)
                    if sandbox.head != common.id and not (request.leave_behind or request.compensate):
                        raise Conflict(
                            self._divergence(branch, self._catalog.trajectories.get(target.id), head, common)
                        )
                    arguments = {"branch": branch.id, "of": head.id, "since": common.id, "from": sandbox.head}
                    return self._rewinding.switch(
                        sandbox,
                        marker("promote", arguments),
                        files=head,
                        follows=common,
                        entries=entries,
                        state=self._catalog.conversations.state(head.id),
                        messages=messages,
                        keep_messages=kept,
                    )

    # -- the two trajectories ------------------------------------------------------------------------------------------

    def _origin(self, branch: Trajectory) -> Trajectory:
        if branch.forked_from is None:
            raise Conflict(
                f"{short(branch.id)} was not forked, so there is no trajectory that it could be the head of; promote a fork"
            )
        return self._catalog.trajectories.get(self._catalog.snapshots.get(branch.forked_from).trajectory)

    def _check_related(self, branch: Trajectory, target: Trajectory) -> None:
        at = branch
        while at.forked_from is not None:
            at = self._origin(at)
            if at.id == target.id:
                return
        raise Conflict(
            f"{short(branch.id)} is no branch of {short(target.id)}: it was not forked from it; "
            "`snapshotd tree` shows the branches of each"
        )

    def _settle_head(self, branch: Trajectory) -> SnapshotID:
        """Take the branch's changes since its last step, and return its head."""
        sandbox = self._sessions.find(branch.id)
        if sandbox is not None and not sandbox.closed:
            try:
                with self._rewinding.quieten(sandbox, "promote"):
                    self._rewinding.settle(sandbox, mind=True)
            finally:
                self._sessions.services.revive(sandbox)
        return self._catalog.trajectories.get(branch.id).head

    def _common(self, branch: Trajectory, target: Trajectory, head: Snapshot) -> Snapshot:
        """The last snapshot before the branch's head that is in the target's history, too."""
        at = head
        while not self._rewinding.in_history(target, at):
            if at.continues is None:
                raise Conflict(
                    f"{short(branch.id)} has nothing in common with {short(target.id)}; fork it and go on there"
                )
            at = self._catalog.snapshots.get(at.continues)
        if at.id == head.id:
            raise Conflict(
                f"{short(branch.id)} has taken no step since {short(head.id)}, where it was forked; there is nothing to promote"
            )
        return at

    def _divergence(self, branch: Trajectory, target: Trajectory, head: Snapshot, common: Snapshot) -> str:
        own = self._catalog.snapshots.of_trajectory(target.id)
        steps = sum(one.seq > common.seq for one in own) if common.trajectory == target.id else len(own)
        left = self._effects.beyond(target, head)
        calls = f", with {number_of(len(left), 'irreversible call')}" if left else ""
        return (
            f"{short(target.id)} has taken {number_of(steps, 'snapshot')} of its own{calls} since {short(branch.id)} was forked from it at "
            f"{short(common.id)}; `snapshotd promote --yes {short(branch.id)}` leaves them behind, and `snapshotd undo` brings "
            "them back"
        )

    # -- the mind ------------------------------------------------------------------------------------------------------

    def _messages_since(self, head: Snapshot, kept: int) -> list[Message]:
        return list(
            _check_size(
                islice(self._catalog.conversations.read(head.id, kept), head.messages - kept),
                lambda message: message.content,
                head,
            )
        )

    def _copy_entries(self, branch: Trajectory, head: Snapshot, common: Snapshot) -> list[JournalEntry]:
        """Copies of the entries since the common snapshot, with their results."""
        ended = (entry for entry in self._catalog.journal.unbound(branch.id) if entry.status is not None)
        recorded = [*self._catalog.journal.read(head.id, since=common.id), *ended]
        ids = {entry.id: CallID(new_id()) for entry in recorded}
        copies = (self._copy(entry, ids, common) for entry in recorded)
        return list(_check_size(copies, lambda entry: [entry.arguments, entry.result, entry.details], head))

    def _copy(self, entry: JournalEntry, ids: dict[CallID, CallID], common: Snapshot) -> JournalEntry:
        result, known = result_of(self._context, entry, MAX_MIND_BYTES)
        if not known:
            raise LimitExceeded(
                f"nothing was promoted: the result of the call {entry.name} ({short(entry.id)}) is no JSON of up to "
                f"{MAX_MIND_BYTES} bytes, or damaged; go on in the branch instead"
            )
        details: dict[str, Any] = {PROMOTED: entry.id, **entry.details}
        if details.get(OF_MODEL) in ids:
            details[OF_MODEL] = ids[details[OF_MODEL]]
        return replace(
            entry, id=ids[entry.id], after=common.id, result=result, details=details, facts=(), snapshot=None
        )


def _check_size(items: Iterable[T], content: Callable[[T], Any], head: Snapshot) -> Iterator[T]:
    size = 0
    for item in items:
        size += len(json.dumps(content(item)))
        if size > MAX_MIND_BYTES:
            raise LimitExceeded(
                f"nothing was promoted: what was said and done up to {short(head.id)} since the fork has more than "
                f"{MAX_MIND_BYTES} bytes; go on in the branch instead"
            )
        yield item
